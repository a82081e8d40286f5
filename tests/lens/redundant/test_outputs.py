"""What two heads write is compared as its definition says."""

from typing import Any

import numpy as np
import pytest
import torch

from manyheads.lens.redundant import outputs
from manyheads.lens.redundant.outputs import output_similarity
from manyheads.lens.results.addresses import attention_at
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.models.vision import Vision
from manyheads.ragged import Ragged
from manyheads.taps import Head, Record, Site, Tap
from tests.lens.measure.test_statistics import fresh, texts_for
from tests.models.zoo import DECODERS, ENCODERS, VISIONS

CASES: list[ModelConfig] = [
    DECODERS["uneven"],
    DECODERS["sinks"],
    ENCODERS["modernbert"],
    VISIONS["vit"],
]


def written(model: Any, inputs: Any) -> np.ndarray:
    """h n c: what each head adds to the residual stream."""
    stack = model.stacks()["main"]
    layers = [place for place, layer in enumerate(stack.layers) if layer.attention is not None]
    record = Record(Site(layer, Tap.HEAD_OUTPUT) for layer in layers)
    with torch.no_grad():
        model(list(inputs.images) if isinstance(model, Vision) else inputs.ids, watch=record)
    result = []
    for layer in layers:
        attention = attention_at(stack, layer, Site(layer, Tap.HEAD_OUTPUT).sublayer)
        seen = record[Site(layer, Tap.HEAD_OUTPUT)]
        assert isinstance(seen, Ragged)
        size = attention.config.size
        for head in range(attention.config.heads):
            weight = attention.output.weight[:, head * size : (head + 1) * size].detach().double()
            result.append(seen.values[:, head].double() @ weight.T)
    return torch.stack(result).numpy()


@pytest.mark.parametrize("config", CASES)
def test_cosines_are_means_over_tokens(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = fresh(config)
    inputs = texts_for(model)
    rows = written(model, inputs)
    rows = rows / np.linalg.norm(rows, axis=-1, keepdims=True)
    expected = np.einsum("hnc,gnc->hg", rows, rows) / rows.shape[1]
    result = output_similarity(model, inputs, progress=False)
    np.testing.assert_allclose(result.values, expected, atol=1e-5)
    monkeypatch.setattr(outputs, "LARGEST_CHUNK", {"cpu": 1})
    pieces = output_similarity(model, inputs, batch_tokens=6, progress=False)
    np.testing.assert_allclose(pieces.values, expected, atol=1e-5)


@pytest.mark.parametrize("config", CASES)
def test_alignment_is_linear_cka(config: ModelConfig) -> None:
    model = fresh(config)
    inputs = texts_for(model)
    rows = written(model, inputs)
    rows = rows - rows.mean(1, keepdims=True)
    squares = np.square(np.einsum("hna,gnb->hgab", rows, rows)).sum((-1, -2))
    own = np.sqrt(np.diagonal(squares))
    result = output_similarity(model, inputs, "cka", batch_tokens=6, progress=False)
    np.testing.assert_allclose(result.values, squares / np.outer(own, own), atol=1e-4)


def test_a_head_that_takes_back_what_another_writes() -> None:
    model: Any = build(DECODERS["gpt2"], seed=0)
    attention = model.stack.layers[1].attention
    with torch.no_grad():
        for rows in attention.projections().values():
            rows[8:16] = rows[:8]
        attention.project.bias.zero_()
        weight = attention.output.weight
        weight[:, 8:16] = -2 * weight[:, :8]
        weight[:, 16:24] = 0
    texts = [[1, 2, 3, 4], [5, 6, 7]]
    result = output_similarity(model, texts, progress=False)
    assert result.of(Head(1, 0), Head(1, 1)) == pytest.approx(-1, abs=1e-5)
    assert np.isnan(result.of(Head(1, 0), Head(1, 2)))
    aligned = output_similarity(model, texts, "cka", progress=False)
    assert aligned.of(Head(1, 0), Head(1, 1)) == pytest.approx(1, abs=1e-4)
    assert np.isnan(aligned.of(Head(1, 2), Head(1, 2)))
