"""The overlap of two heads equals the one from their patterns, for every kind of model."""

import math
from functools import cache
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.kernels.contract import Request, Want
from manyheads.kernels.reference import attend
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.results.addresses import Block, attention_at, blocks_of
from manyheads.models.build import build
from manyheads.models.model_interface import ModelInputs
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.masks import Causal, Window, visible
from manyheads.parts.positions import Rotary
from manyheads.ragged import Lengths
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap
from tests.kernels.test_memory import measured
from tests.lens.measure.test_statistics import EVERY, fresh, texts_for
from tests.messages import refuses
from tests.models.zoo import DECODERS, decoder, small, writes

# In the package the name means the function.
module = import_module("manyheads.lens.attention_maps.overlap")

LIMIT = 1e-4
CHOSEN = (
    "decoder windows and whole",
    "encoder modernbert",
    "encoder longformer",
    "decoder alibi in a window",
    "encoder t5",
    "decoder llama",
    "decoder uneven",
    "decoder gates",
    "encoder bert",
    "blocks and globals",
    "seq2seq window",
    "vision vit",
    "sinks in windows",
    "shaw in a window",
    "prefix",
    "cross with gates and a sink",
)


@cache
def recorded(name: str) -> tuple[Any, ModelInputs, Record]:
    model = fresh(EVERY[name])
    inputs = texts_for(model)
    sites = [Site(b.layer, Tap.PATTERN, b.sublayer, b.stack) for b in blocks_of(model)]
    record = Record(sites)
    with torch.no_grad():
        if isinstance(model, Vision):
            model(list(inputs.images), watch=record)
        elif isinstance(model, Seq2Seq):
            model(inputs.source, inputs.ids, watch=record)
        else:
            model(inputs.ids, watch=record)
    return model, inputs, record


def cosine(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    return (p * q).sum(-1) / np.sqrt((p**2).sum(-1) * (q**2).sum(-1))


def jensen_shannon(p: np.ndarray, q: np.ndarray) -> np.ndarray:
    def with_sink(x: np.ndarray) -> np.ndarray:
        return np.concatenate((x, np.maximum(0, 1 - x.sum(-1, keepdims=True))), axis=-1)

    def divergence(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        ratio = np.where(x > 0, x / np.where(y > 0, y, 1), 1)
        return (x * np.log(ratio)).sum(-1)

    p, q = with_sink(p), with_sink(q)
    middle = (p + q) / 2
    return 1 - (divergence(p, middle) + divergence(q, middle)) / 2 / math.log(2)


def from_patterns(
    model: Any, record: Record, blocks: list[Block], measure: str
) -> tuple[np.ndarray, np.ndarray]:
    """Pair by pair and text by text, with which pairs are of one layer."""
    patterns: list[list[np.ndarray]] = []
    layers = []
    for block in blocks:
        seen = record[Site(block.layer, Tap.PATTERN, block.sublayer, block.stack)]
        assert isinstance(seen, Patterns)
        for head in range(block.heads):
            patterns.append([each[head].double().numpy() for each in seen.each])
            layers.append(block)
    function = cosine if measure == "cosine" else jensen_shannon
    sights = {block: sights_of(model, block, patterns[layers.index(block)]) for block in blocks}
    values = np.full((len(patterns), len(patterns)), np.nan)
    for one, mine in enumerate(patterns):
        for other, peer in enumerate(patterns[: one + 1]):
            rows = []
            for text, (p, q) in enumerate(zip(mine, peer, strict=True)):
                seen_by_both = sights[layers[one]][text] & sights[layers[other]][text]
                rows.append(function(p[seen_by_both], q[seen_by_both]))
            joined = np.concatenate(rows)
            if len(joined):
                values[one, other] = values[other, one] = joined.mean()
    same = np.array([[one == other for other in layers] for one in layers])
    return values, same


def sights_of(model: Any, block: Block, patterns: list[np.ndarray]) -> list[np.ndarray]:
    """Which queries see a key."""
    attention = attention_at(model.stacks()[block.stack], block.layer, block.sublayer)
    cpu = torch.device("cpu")
    return [
        visible(attention.config.mask, range(len(p)), *p.shape, cpu).any(-1).numpy()
        for p in patterns
    ]


def groups(model: Any) -> dict[tuple[str, Sublayer], list[Block]]:
    result: dict[tuple[str, Sublayer], list[Block]] = {}
    for block in blocks_of(model):
        result.setdefault((block.stack, block.sublayer), []).append(block)
    return result


@pytest.mark.parametrize("name", CHOSEN)
def test_overlap_is_that_of_the_patterns(name: str) -> None:
    model, inputs, record = recorded(name)
    for (stack, sublayer), blocks in groups(model).items():
        expected, same = from_patterns(model, record, blocks, "cosine")
        options = {"stack": stack, "sublayer": sublayer, "progress": False}
        result = overlap(model, inputs, **options)
        np.testing.assert_allclose(result.values, expected, atol=LIMIT)
        within = overlap(model, inputs, partners="same layer", **options)
        np.testing.assert_allclose(within.values[same], expected[same], atol=LIMIT)
        assert np.isnan(within.values[~same]).all()


@pytest.mark.parametrize("name", CHOSEN[::3])
def test_divergence_is_that_of_the_patterns(name: str) -> None:
    model, inputs, record = recorded(name)
    for (stack, sublayer), blocks in groups(model).items():
        expected, _ = from_patterns(model, record, blocks, "jensen-shannon")
        options = {"stack": stack, "sublayer": sublayer, "progress": False}
        result = overlap(model, inputs, "jensen-shannon", **options)
        np.testing.assert_allclose(result.values, expected, atol=LIMIT)


@pytest.mark.parametrize("measure", ["cosine", "jensen-shannon"])
@pytest.mark.parametrize("name", ["windows and whole", "uneven"])
def test_pieces_of_rows_and_batches_add_up(
    name: str, measure: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, inputs, _ = recorded(f"decoder {name}")
    whole = overlap(model, inputs, measure, progress=False)
    monkeypatch.setattr(module, "ROWS", {"cpu": 4})
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", {"cpu": 100})
    pieces = overlap(model, inputs, measure, batch_tokens=6, progress=False)
    np.testing.assert_allclose(pieces.values, whole.values, atol=1e-6)


def test_the_overlap_is_the_designs_identity() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(9, 2, 4, generator=generator) for _ in range(2))
    lengths = Lengths.of([9])

    def lse(query: torch.Tensor, key: torch.Tensor) -> torch.Tensor:
        request = Request(
            queries=lengths, keys=lengths, mask=Causal(), scale=0.5, want=Want(lse=True)
        )
        result = attend(query, key, torch.zeros(9, 1, 1), request).lse
        assert result is not None
        return result

    one, other = (lse(query[:, [h]], key[:, [h]]) for h in (0, 1))
    joined = lse(query.flatten(1)[:, None], key.flatten(1)[:, None])
    identity = (joined - one - other).exp().squeeze()
    scores = torch.einsum("thd,shd->hts", query, key) * 0.5
    hidden = torch.ones(9, 9).triu(1).bool()
    p, q = scores.masked_fill(hidden, -torch.inf).softmax(-1)
    torch.testing.assert_close(identity, (p * q).sum(-1))


def test_two_equal_heads_overlap_wholly() -> None:
    model = build(decoder(*[writes(position=Rotary())] * 2), seed=0)
    attention = model.stack.layers[0].attention
    with torch.no_grad():
        rows = attention.projections()
        for name in ("query", "key"):
            rows[name][8:16] = rows[name][:8]
    result = overlap(model, [[1, 2, 3, 4, 5, 6]], progress=False)
    assert result.of(Head(0, 0), Head(0, 1)) == pytest.approx(1, abs=1e-6)
    assert result.of(Head(0, 0), Head(0, 2)) < 0.99
    np.testing.assert_allclose(np.diagonal(result.values), 1, atol=1e-6)


def test_it_can_be_saved(tmp_path: Any) -> None:
    result = overlap(small(DECODERS["llama"]), [[1, 2, 3], [4, 5]], progress=False)
    result.save(tmp_path / "overlap.json")
    again = lens.load(tmp_path / "overlap.json")
    np.testing.assert_allclose(again.values, result.values)
    assert again.metadata == result.metadata
    assert result.metadata["tokens"] == 5


def test_what_it_cannot_measure_is_refused() -> None:
    model = small(DECODERS["llama"])
    with refuses(InputError, "no texts", "pass at least one"):
        overlap(model, iter([]))


@pytest.mark.parametrize("mask", [Causal(), Window(32)])
def test_memory_grows_with_the_tokens(mask: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "ROWS", {"cpu": 64})
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", {"cpu": 2**15})
    config: ModelConfig = decoder(*[writes(position=Rotary(), mask=mask)] * 2)
    model = build(config, seed=0)

    def peak(tokens: int) -> Any:
        text = [torch.arange(tokens) % 29]
        return measured(lambda: overlap(model, text, progress=False))

    short, long = peak(256), peak(512)
    assert long.peak <= 2.2 * short.peak
    assert long.largest < 4 * 512**2 / 2
