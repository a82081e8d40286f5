"""Which passages are shown for a head: the same in whatever order they go by."""

import numpy as np
import pytest

from manyheads.lens.corpus.examples import DECILES, ExampleBook, HeadExample, bin_of, priority_of

PASSAGES, TOP, PER_BIN = 120, 5, 2


def example(text: int, activation: float) -> HeadExample:
    none = np.zeros(0, dtype=np.int64)
    return HeadExample(text, 1, activation, range(1, 2), np.array([0]), none, none.astype(float))


def filled(order: list[int], activations: np.ndarray) -> ExampleBook:
    book = ExampleBook(heads=activations.shape[1], top=TOP, per_bin=PER_BIN, seed=3)
    for text in order:
        for head in np.flatnonzero(book.choose(text, activations[text])).tolist():
            book.keep(head, example(text, float(activations[text, head])))
    return book


@pytest.fixture(scope="module")
def activations() -> np.ndarray:
    """Of a head that is spread, one that is nearly always 1, and one with many equal values."""
    draw = np.random.default_rng(0)
    saturated = 1 - 10 ** -draw.uniform(3, 6, PASSAGES)
    return np.stack(
        (draw.uniform(size=PASSAGES), saturated, draw.integers(1, 4, PASSAGES) / 4), axis=1
    )


def test_the_sharpest_are_those_of_a_full_search(activations: np.ndarray) -> None:
    book = filled(list(range(PASSAGES)), activations)
    for head in range(activations.shape[1]):
        ranked = sorted(range(PASSAGES), key=lambda text: (-activations[text, head], text))
        assert [each.text for each in book.sharpest(head)] == ranked[:TOP]


def test_the_choice_does_not_depend_on_the_order_of_passages(activations: np.ndarray) -> None:
    book = filled(list(range(PASSAGES)), activations)
    other = filled(np.random.default_rng(1).permutation(PASSAGES).tolist(), activations)
    for head in range(activations.shape[1]):
        assert [each.text for each in book.sharpest(head)] == [
            each.text for each in other.sharpest(head)
        ]
        mine, shuffled = (
            {decile: [each.text for each in tenth] for decile, tenth in tenths.items()}
            for tenths in (book.by_decile(head, 2), other.by_decile(head, 2))
        )
        assert mine == shuffled


def test_each_bin_has_the_passages_of_lowest_priority(activations: np.ndarray) -> None:
    book = filled(list(range(PASSAGES)), activations)
    bins = bin_of(activations[:, 0])
    for place in set(bins.tolist()):
        texts = sorted(np.flatnonzero(bins == place), key=lambda text: priority_of(int(text), 3))
        drawn = {each.text for each in book._drawn(0)[place]}
        assert drawn == set(map(int, texts[:PER_BIN]))


def test_deciles_rise_with_the_activation(activations: np.ndarray) -> None:
    tenths = filled(list(range(PASSAGES)), activations).by_decile(0, PER_BIN)
    assert set(tenths) <= set(range(1, DECILES + 1))
    assert len(tenths) >= DECILES - 1
    means = [np.mean([each.activation for each in tenth]) for tenth in tenths.values()]
    assert means == sorted(means)
    assert all(len(tenth) <= PER_BIN for tenth in tenths.values())


def test_every_passage_is_counted_once(activations: np.ndarray) -> None:
    book = filled(list(range(PASSAGES)), activations)
    assert (book.histogram.sum(1) == PASSAGES).all()
    assert (book.linear.sum(1) == PASSAGES).all()
    assert np.allclose(book.activation_sums, activations.sum(0))


def test_links_name_query_key_and_weight() -> None:
    links = HeadExample(
        0, 5, 0.9, range(4, 7), np.array([1, 2, 0]), np.array([3, 5, 0]), np.array([0.5, 0.9, 0.1])
    ).links()
    assert list(links) == [(4, 3, 0.5), (5, 5, 0.9), (5, 0, 0.1)]
