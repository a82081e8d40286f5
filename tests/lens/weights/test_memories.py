"""Keys and values of whole layers in words equal those of single directions."""

from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.weights.ffn_key_values import Neuron, memories
from manyheads.models.build import build
from manyheads.models.readout import LanguageHead, ReadoutTransform
from tests.lens.weights.test_neurons import planted
from tests.messages import refuses
from tests.models.zoo import DECODERS, ENCODERS, SEQ2SEQS, VISIONS, encoder, layer, small

# In the package the name means the function.
module = import_module("manyheads.lens.weights.ffn_key_values")


def test_a_planted_word_is_clear() -> None:
    found = memories(planted(), clear_above=3.5, progress=False)
    mine = found.of(0)
    assert mine.written[5] == 11
    assert mine.read[5] == 7
    neuron, word, score = found.clear(1)[0]
    assert (neuron, word) == (Neuron(0, 5), 11)
    assert score == pytest.approx(mine.written_clearly[5])


def test_scores_are_those_of_the_readout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value alone in the stream, through norm and head; the norm's bias is none of its own."""
    monkeypatch.setattr(module, "ROOM", 100)
    model: Any = small(DECODERS["llama"])
    found = memories(model, progress=False).of(1)
    values = model.stack.layers[1].feedforward.contract.weight.T
    with torch.no_grad():
        scores = model.stack.final_norm(values) @ model.table.T
    np.testing.assert_array_equal(found.written, scores.argmax(1).numpy())
    z = (scores.max(1).values - scores.mean(1)) / scores.std(1, correction=0)
    np.testing.assert_allclose(found.written_clearly, z.numpy(), atol=1e-3)
    np.testing.assert_allclose(found.value_norm, values.detach().norm(dim=1).numpy(), rtol=1e-5)


def test_a_head_with_a_layer_of_its_own_is_gone_through() -> None:
    config = encoder(layer(), readout=LanguageHead(transform=ReadoutTransform()))
    model: Any = build(config, seed=0)
    found = memories(model, progress=False)
    assert found.facts["through"] == "transform and unembedding"
    values = model.stack.layers[0].feedforward.contract.weight.T
    with torch.no_grad():
        scores = model.readout.features(model.stack.final_norm(values)) @ model.table.T
    np.testing.assert_array_equal(found.of(0).written, scores.argmax(1).numpy())


def test_every_expert_is_a_memory(tmp_path: Path) -> None:
    found = memories(small(DECODERS["experts"]), progress=False)
    assert [(each.layer, each.expert, len(each)) for each in found.layers][:5] == [
        (0, 0, 24),
        (0, 1, 24),
        (0, 2, 24),
        (0, 3, 24),
        (1, 0, 24),
    ]
    assert len(found.rows()) == found.table().row_count == len(found.frame()) == 8
    assert "layer 0 expert 0" in str(found)
    for ending in ("json", "safetensors"):
        found.save(tmp_path / f"found.{ending}")
        again = lens.load(tmp_path / f"found.{ending}")
        assert str(again) == str(found)
        np.testing.assert_array_equal(again.of(1, 2).written, found.of(1, 2).written)


def test_models_without_words() -> None:
    assert memories(small(ENCODERS["tags"]), progress=False).facts["through"] == "embedding"
    both = small(SEQ2SEQS["2017"])
    assert memories(both, stack="encoder", progress=False).facts["through"] == "embedding"
    with refuses(InputError, "a Vision has no words to read or write: use a model of texts."):
        memories(small(VISIONS["vit"]))
    with refuses(InputError, "clear_above=0.0 calls every word clear: use more than 0."):
        memories(both, clear_above=0.0)
    with refuses(InputError, "layer 7 has no feed-forward: use one of 0, 1."):
        memories(both, progress=False).of(7)


def test_a_value_of_nothing_says_nothing() -> None:
    model: Any = build(DECODERS["gpt2"], seed=0)
    with torch.no_grad():
        model.stack.layers[0].feedforward.contract.weight.zero_()
    assert (memories(model, progress=False).of(0).written_clearly == 0).all()
