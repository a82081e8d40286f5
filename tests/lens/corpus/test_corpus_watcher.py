"""Distances, tokens and examples of heads are those of their patterns."""

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.lens.corpus import corpus_watcher
from manyheads.lens.corpus.corpus_pass import read_corpus
from manyheads.lens.corpus.pass_state import CorpusPass, PassSettings
from manyheads.lens.measure import row_sums
from manyheads.models.build import Model, build

VOCABULARY = 40
SETTINGS = PassSettings(max_length=None)


def texts(seed: int = 0) -> list[list[int]]:
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCABULARY, size).tolist() for size in (9, 1, 17, 2, 12, 30)]


def small(family: str) -> Model:
    sizes = {"layers": 2, "width": 32, "heads": 4, "vocabulary": VOCABULARY}
    # One key head for two query heads.
    sizes |= {"kv_heads": 2} if family.startswith("llama") else {}
    return build(family, **sizes, seed=0)


@pytest.fixture(scope="module", params=["llama-1b-shape", "bert-base"])
def case(request: pytest.FixtureRequest) -> tuple[Model, CorpusPass, lens.PatternSet]:
    model = small(request.param)
    done, _ = read_corpus(model, texts(), SETTINGS, progress=False)
    # Where each pattern is by the number of its text.
    each = [
        lens.Pattern(pattern.address, number, pattern.rows, pattern.weights, pattern.visible)
        for number, text in enumerate(texts())
        for pattern in lens.patterns(model, [text]).each
    ]
    return model, done, lens.PatternSet(tuple(each))


def test_distances_are_those_of_the_patterns(
    case: tuple[Model, CorpusPass, lens.PatternSet],
) -> None:
    _, done, patterns = case
    for block, sums in done.sums.blocks.items():
        for head, address in enumerate(block.addresses):
            earlier, later = np.zeros((2, corpus_watcher.DISTANCE_BINS))
            for text in range(len(texts())):
                weights = patterns.of(address, text).weights.numpy()
                for query, key in np.ndindex(*weights.shape):
                    place = abs(query - key).bit_length()
                    (earlier if key <= query else later)[place] += weights[query, key]
            assert np.allclose(sums.earlier[head], earlier, atol=1e-4)
            assert np.allclose(sums.later[head], later, atol=1e-4)


def test_tokens_are_those_of_the_patterns(case: tuple[Model, CorpusPass, lens.PatternSet]) -> None:
    _, done, patterns = case
    for block, sums in done.sums.blocks.items():
        at, of_queries = np.zeros((2, VOCABULARY, block.heads))
        for text, ids in enumerate(texts()):
            for head, address in enumerate(block.addresses):
                weights = patterns.of(address, text).weights.numpy()
                for place, token in enumerate(ids):
                    if place:
                        at[token, head] += weights[:, place].sum()
                        of_queries[token, head] += weights[place, 1:].max()
        assert np.allclose(sums.at.sums[:, :-2], at[sums.at.ids], atol=1e-4)
        assert np.allclose(sums.of_queries.sums[:, :-1], of_queries[sums.of_queries.ids], atol=1e-4)
        counts = np.bincount([token for ids in texts() for token in ids[1:]], minlength=VOCABULARY)
        assert (sums.at.sums[:, -1] == counts[sums.at.ids]).all()


def test_examples_are_the_sharpest_of_all_patterns(
    case: tuple[Model, CorpusPass, lens.PatternSet],
) -> None:
    _, done, patterns = case
    for block, sums in done.sums.blocks.items():
        for head, address in enumerate(block.addresses):
            activation = {
                text: float(patterns.of(address, text).weights[1:, 1:].max()) if len(ids) > 1 else 0
                for text, ids in enumerate(texts())
            }
            sharpest = sums.book.sharpest(head)
            assert [each.text for each in sharpest] == sorted(
                activation, key=lambda text: -activation[text]
            )
            for each in sharpest:
                assert each.activation == pytest.approx(activation[each.text], abs=1e-5)
                weights = patterns.of(address, each.text).weights
                for query, key, weight in each.links():
                    assert weight == pytest.approx(float(weights[query, key]), abs=1e-5)


def test_long_texts_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small("llama-1b-shape")
    whole, _ = read_corpus(model, texts(), SETTINGS, progress=False)
    # Tiles of four queries and one key head.
    monkeypatch.setitem(row_sums.ROWS, "cpu", 8)
    monkeypatch.setitem(row_sums.CHUNK_WEIGHTS, "cpu", 64)
    parts, _ = read_corpus(model, texts(), SETTINGS, progress=False)
    for block, sums in whole.sums.blocks.items():
        assert np.allclose(sums.earlier, parts.sums.of(block).earlier, atol=1e-4)
        assert np.allclose(sums.at.sums, parts.sums.of(block).at.sums, atol=1e-4)


def test_an_example_has_the_queries_around_the_sharpest() -> None:
    settings = PassSettings(
        max_length=None, examples=corpus_watcher.ExampleSettings(queries=8, keys=2)
    )
    done, _ = read_corpus(small("llama-1b-shape"), [list(range(3, 33))], settings, progress=False)
    for sums in done.sums.blocks.values():
        for stored in sums.book.stored:
            [example] = stored.values()
            assert len(example.rows) == 8
            assert example.query in example.rows
            assert (example.counts <= 2).all()


def test_equal_attention_has_no_lift() -> None:
    """With projections of zero every query looks at all its keys alike."""
    model = small("bert-base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "attention" in name:
                parameter.zero_()
    done, _ = read_corpus(model, texts(), SETTINGS, progress=False)
    for sums in done.sums.blocks.values():
        at = sums.at.sums
        share = at[:, 0] / at[:, 0].sum() / (at[:, -2] / at[:, -2].sum())
        assert np.allclose(share, 1, atol=1e-4)
