"""A mixture of sources: shares by weight, every source in rounds of its own, resumed exactly."""

from collections import Counter
from itertools import islice

import numpy as np
import pytest

from manyheads.data.chunks import Chunks, DocumentChunks, FixedChunks, MixedChunks
from manyheads.data.stream import Stream
from manyheads.errors import ConfigError
from tests.data.tiny import store_of

LARGE, SMALL = [40, 17, 3, 80, 25], [6, 7, 9]


def mixture(layout: str, weights: tuple[float, ...] = (3.0, 1.0)) -> MixedChunks:
    stores = {"large": store_of(LARGE), "small": store_of(SMALL)}
    sources: dict[str, Chunks] = {
        name: FixedChunks(store, length=4) if layout == "fixed" else DocumentChunks(store, length=8)
        for name, store in stores.items()
    }
    return MixedChunks(sources, weights)


LAYOUTS = pytest.mark.parametrize("layout", ["fixed", "documents"])


@LAYOUTS
@pytest.mark.parametrize("weights", [(3.0, 1.0), (1.0, 9.0), (0.5, 0.5)])
def test_tokens_come_in_the_ratio_of_the_weights(layout: str, weights: tuple[float, ...]) -> None:
    mixed = mixture(layout, weights)
    numbers = [number for batch in Stream(mixed, batch_tokens=40).epoch(0) for number in batch]
    shares = mixed.shares(numbers)
    for share, weight in zip(shares.values(), weights, strict=True):
        assert share == pytest.approx(weight / sum(weights), abs=0.01)
    assert sum(shares.values()) == pytest.approx(1)


@LAYOUTS
def test_each_source_is_read_in_whole_rounds(layout: str) -> None:
    mixed = mixture(layout)
    stream = Stream(mixed, batch_tokens=40, seed=5)
    counts: Counter[int] = Counter()
    for epoch in range(2):
        counts.update(number for batch in stream.epoch(epoch) for number in batch)
    owners = mixed.owners(range(len(mixed)))
    for source in range(2):
        times = [counts[number] for number in np.flatnonzero(owners == source).tolist()]
        assert max(times) - min(times) <= 1
        assert sum(times) == 2 * mixed.draws[source]


@LAYOUTS
def test_going_on_from_any_step_is_as_never_having_stopped(layout: str) -> None:
    stream = Stream(mixture(layout), batch_tokens=40, micro_batches=2, seed=1)
    whole = list(islice(stream.steps(), 9))
    for step in (0, 4, 7):
        again = next(stream.steps(whole[step].after))
        assert again.shares == whole[step + 1].shares
        for ours, expected in zip(again.batches, whole[step + 1].batches, strict=True):
            assert ours.texts is not None
            assert expected.texts is not None
            assert ours.texts.values.tolist() == expected.texts.values.tolist()
        assert stream.position(step + 1) == whole[step].after


@LAYOUTS
def test_a_batch_has_the_texts_of_its_numbers_in_order(layout: str) -> None:
    mixed = mixture(layout)
    sources = list(mixed.sources.values())
    numbers = [len(mixed) - 1, 0, len(sources[0]), 3]
    batch = mixed.batch(numbers).texts
    assert batch is not None
    for text, number in zip(batch.to_list(), numbers, strict=True):
        owner = int(mixed.owners([number])[0])
        alone = sources[owner].batch([number - int(mixed.firsts[owner])]).texts
        assert alone is not None
        assert text.tolist() == alone.values.tolist()


def test_seeds_give_other_orders_and_texts_another_checksum() -> None:
    orders = [next(Stream(mixture("fixed"), batch_tokens=40, seed=n).epoch(0)) for n in (0, 0, 1)]
    assert orders[0] == orders[1] != orders[2]
    other = MixedChunks({"large": FixedChunks(store_of([50]), length=4)}, [1.0])
    assert mixture("fixed").checksum == mixture("fixed").checksum != other.checksum


def test_a_source_without_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="leave it out"):
        MixedChunks({"empty": DocumentChunks(store_of([0]), length=4)}, [1.0])
