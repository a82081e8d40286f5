"""Statistics of a text twice as long take at most twice the memory."""

from typing import Any

import pytest
import torch

from manyheads.kernels import reference
from manyheads.lens.attention_maps.patterns import patterns, top_keys
from manyheads.lens.measure import row_sums
from manyheads.lens.measure.statistics import statistics
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.parts.masks import GlobalTokens, Window
from manyheads.parts.positions import Alibi, Disentangled, Rotary, Shaw, T5Buckets
from manyheads.taps import Head
from tests.kernels.test_memory import Watched, measured
from tests.models.zoo import decoder, encoder, layer, own, writes

SHORT, LONG = 160, 320

CASES: dict[str, ModelConfig] = {
    "causal": decoder(*[writes(position=Rotary(), kv_heads=2)]),
    "both ways": encoder(*[layer(own(position=Rotary()))]),
    "a window": decoder(*[writes(position=Rotary(), mask=Window(32))]),
    "global tokens": encoder(*[layer(own(mask=Window(8, 8) | GlobalTokens((0,))))]),
    "alibi": decoder(*[writes(position=Alibi())]),
    "t5": encoder(*[layer(own(position=T5Buckets()))]),
    "shaw": encoder(*[layer(own(position=Shaw(reach=8)))]),
    "deberta": encoder(*[layer(own(position=Disentangled(buckets=16, reach=64)))]),
    "a sink": decoder(*[writes(sink="learned")]),
}


def taken(config: ModelConfig, tokens: int) -> Watched:
    model: Any = build(config, seed=0)
    # Every token is a copy of one of few, as in real texts of little variety.
    text = [torch.arange(tokens) % 29]
    work = lambda: statistics(model, text, classes={"low": range(5)}, progress=False)  # noqa: E731
    return measured(work)


@pytest.mark.parametrize("case", CASES)
def test_twice_the_tokens_need_at_most_twice_the_memory(
    case: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reference, "LARGEST_CHUNK", 2**13)
    monkeypatch.setattr(row_sums, "CHUNK_WEIGHTS", {"cpu": 2**13})
    monkeypatch.setattr(row_sums, "ROWS", {"cpu": 16})
    short, long = (taken(CASES[case], tokens) for tokens in (SHORT, LONG))
    assert long.peak <= 2.2 * short.peak
    assert long.largest <= 2.2 * short.largest
    assert long.largest < 4 * LONG**2 / 2


def test_a_few_rows_of_a_long_text_take_little_room() -> None:
    model = build(CASES["causal"], seed=0)
    text = [torch.arange(4096) % 29]
    few = measured(lambda: patterns(model, text, [Head(0, 0)], rows=range(4000, 4010)))
    assert few.largest < 4 * 4096**2 / 8
    sparse = measured(lambda: top_keys(model, text, [Head(0, 0)], top_k=4))
    assert sparse.largest <= 4 * 2**22
