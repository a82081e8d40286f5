"""Keys, values and coefficients of neurons add up to what a feed-forward writes."""

from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from manyheads import lens
from manyheads.errors import InputError
from manyheads.lens.weights.ffn_key_values import (
    FeedForwards,
    Neuron,
    feed_forwards_of,
    key_value_memories,
)
from manyheads.models.build import build
from manyheads.models.readout import LanguageHead, ReadoutTransform
from manyheads.models.recipes import ModelConfig
from manyheads.parts.experts import ClampedSwiGLU
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, RMSNorm, SandwichNorm
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.lens.weights.test_neurons import planted
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    EXPERTS,
    SEQ2SEQS,
    VISIONS,
    decoder,
    encoder,
    ids,
    layer,
    own,
    small,
)

WITH_SHARED = replace(EXPERTS, shared=16, shared_gate="sigmoid", renormalize=False)
CLAMPED = replace(EXPERTS, bias=True, gating=ClampedSwiGLU(limit=0.5))
CASES: dict[str, ModelConfig] = {
    "mlp": DECODERS["gpt2"],
    "geglu": ENCODERS["modernbert"],
    "swiglu": DECODERS["llama"],
    "post": ENCODERS["bert"],
    "experts": DECODERS["experts"],
    "shared expert": decoder(layer(own(mask=Causal()), WITH_SHARED)),
    "clamped experts": decoder(layer(own(mask=Causal()), CLAMPED)),
    "parallel": DECODERS["parallel"],
}


@pytest.mark.parametrize("case", CASES)
def test_coefficients_times_values_are_what_is_written(case: str) -> None:
    model: Any = small(CASES[case])
    feeds = feed_forwards_of(model)
    taps = (Tap.BEFORE, Tap.OUTPUT)
    sites = [Site(at, tap, Sublayer.FEEDFORWARD) for at in feeds.layers for tap in taps]
    record = Record(sites)
    with torch.no_grad():
        model(ids(), watch=record)
        for at in feeds.layers:
            before, output = (record[Site(at, tap, Sublayer.FEEDFORWARD)] for tap in taps)
            assert isinstance(before, Ragged)
            assert isinstance(output, Ragged)
            written = torch.zeros_like(output.values)
            for expert in feeds.experts(at):
                every = range(feeds.size(at, expert))
                spoken = feeds.coefficients(at, expert, every, before.values)
                written += spoken @ feeds.values(at, expert)
            module: Any = feeds.module(at)
            bias = getattr(getattr(module, "contract", None), "bias", None)
            expected = output.values if bias is None else output.values - bias
            torch.testing.assert_close(written, expected, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("case", ["mlp", "swiglu", "post", "experts"])
def test_keys_read_the_stream_as_the_feedforward_does(case: str) -> None:
    """Up to the norm's divisor, and what bias it adds."""
    model: Any = small(CASES[case])
    feeds = feed_forwards_of(model)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    residual = feeds.residual(0)
    with torch.no_grad():
        entered, nothing = residual.read(x), residual.read(torch.zeros(1, 32))
        expert = feeds.experts(0)[0]
        module: Any = feeds.module(0)
        rows = module.expand.weight if expert is None else module.expand[expert].T
        expected = (entered - nothing) @ rows[: feeds.size(0, expert)].T
        result = x @ feeds.keys(0, expert).T
    ratio = torch.nn.functional.cosine_similarity(result, expected, dim=1)
    torch.testing.assert_close(ratio, torch.ones(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()])
def test_a_norm_behind_is_passed_through(norm: Any) -> None:
    model: Any = build(decoder(layer(own(mask=Causal()), norm=SandwichNorm(norm))), seed=0)
    feeds, second = feed_forwards_of(model), model.stack.layers[0].feedforward_residual.second_norm
    with torch.no_grad():
        second.weight.normal_()
        alone = second(model.stack.layers[0].feedforward.contract.weight.T)
        passed = feeds.values(0)
    ratio = torch.nn.functional.cosine_similarity(passed, alone, dim=1)
    torch.testing.assert_close(ratio, torch.ones(len(passed)), atol=1e-4, rtol=0)


def test_neurons_have_addresses() -> None:
    for text in ("L0N3", "L12E4N5", "L1SN0"):
        assert str(Neuron.parse(text)) == text
    with refuses(
        InputError,
        "'5'",
        "L5N10",
    ):
        Neuron.parse("5")


def test_unknown_neurons_are_refused() -> None:
    feeds = feed_forwards_of(small(DECODERS["uneven"]))
    assert feeds.find([(0, 3), "L1N2", Neuron(3, 39)])[0] == Neuron(0, 3)
    with refuses(InputError, "L2N0", "0, 1, 3"):
        feeds.find(["L2N0"])
    with refuses(InputError, "there is no neuron L0N40: use 0 to 39."):
        feeds.find(["L0N40"])
    with refuses(InputError, "layer 0", "expert 1", "leave out"):
        feeds.find(["L0E1N0"])
    with refuses(InputError, "layer 0", "expert None", "use one of"):
        feed_forwards_of(small(DECODERS["experts"])).find([(0, 1)])
    with refuses(InputError, "no neurons", "L0N5"):
        feeds.find([])


def test_stacks_are_named() -> None:
    both = small(SEQ2SEQS["t5"])
    assert feed_forwards_of(both).stack.name == "decoder"
    assert feed_forwards_of(both, "encoder").stack.name == "encoder"
    with refuses(InputError, 'this Seq2Seq has no stack \'main\': use "encoder" or "decoder".'):
        feed_forwards_of(both, "main")
    with refuses(InputError, "this Decoder has no stack 'encoder': use \"main\"."):
        feed_forwards_of(small(DECODERS["gpt2"]), "encoder")
    with refuses(InputError, "main stack has no feed-forward"):
        feed_forwards_of(build(decoder(layer(own(mask=Causal()), None)), seed=0))
    assert isinstance(feed_forwards_of(both), FeedForwards)


# In the package the name means the function.
module = import_module("manyheads.lens.weights.ffn_key_values")


def test_a_planted_word_is_clear() -> None:
    result = key_value_memories(planted(), clear_above=3.5, progress=False)
    mine = result.of(0)
    assert mine.written[5] == 11
    assert mine.read[5] == 7
    neuron, word, score = result.clear(1)[0]
    assert (neuron, word) == (Neuron(0, 5), 11)
    assert score == pytest.approx(mine.written_z[5])


def test_scores_are_those_of_the_readout(monkeypatch: pytest.MonkeyPatch) -> None:
    """A value alone in the stream, through norm and head; the norm's bias is none of its own."""
    monkeypatch.setattr(module, "LARGEST_CHUNK", 100)
    model: Any = small(DECODERS["llama"])
    result = key_value_memories(model, progress=False).of(1)
    values = model.stack.layers[1].feedforward.contract.weight.T
    with torch.no_grad():
        scores = model.stack.final_norm(values) @ model.table.T
    np.testing.assert_array_equal(result.written, scores.argmax(1).numpy())
    z = (scores.max(1).values - scores.mean(1)) / scores.std(1, correction=0)
    np.testing.assert_allclose(result.written_z, z.numpy(), atol=1e-3)
    np.testing.assert_allclose(result.value_norm, values.detach().norm(dim=1).numpy(), rtol=1e-5)


def test_a_head_with_a_layer_of_its_own_is_gone_through() -> None:
    config = encoder(layer(), readout=LanguageHead(transform=ReadoutTransform()))
    model: Any = build(config, seed=0)
    result = key_value_memories(model, progress=False)
    assert result.metadata["through"] == "transform and unembedding"
    values = model.stack.layers[0].feedforward.contract.weight.T
    with torch.no_grad():
        scores = model.readout.features(model.stack.final_norm(values)) @ model.table.T
    np.testing.assert_array_equal(result.of(0).written, scores.argmax(1).numpy())


def test_every_expert_is_a_memory(tmp_path: Path) -> None:
    result = key_value_memories(small(DECODERS["experts"]), progress=False)
    assert [(each.layer, each.expert, len(each)) for each in result.layers][:5] == [
        (0, 0, 24),
        (0, 1, 24),
        (0, 2, 24),
        (0, 3, 24),
        (1, 0, 24),
    ]
    assert len(result.rows()) == result.table().row_count == len(result.frame()) == 8
    assert "layer 0 expert 0" in str(result)
    for ending in ("json", "safetensors"):
        result.save(tmp_path / f"found.{ending}")
        again = lens.load(tmp_path / f"found.{ending}")
        assert str(again) == str(result)
        np.testing.assert_array_equal(again.of(1, 2).written, result.of(1, 2).written)


def test_models_without_words() -> None:
    assert (
        key_value_memories(small(ENCODERS["tags"]), progress=False).metadata["through"]
        == "embedding"
    )
    both = small(SEQ2SEQS["2017"])
    assert (
        key_value_memories(both, stack="encoder", progress=False).metadata["through"] == "embedding"
    )
    with refuses(InputError, "Vision", "reads text"):
        key_value_memories(small(VISIONS["vit"]))
    with refuses(InputError, "clear_above", "got 0.0", "more than 0"):
        key_value_memories(both, clear_above=0.0)
    with refuses(InputError, "layer 7 has no feed-forward: use one of 0, 1."):
        key_value_memories(both, progress=False).of(7)


def test_a_value_of_zeros_writes_no_token() -> None:
    model: Any = build(DECODERS["gpt2"], seed=0)
    with torch.no_grad():
        model.stack.layers[0].feedforward.contract.weight.zero_()
    assert (key_value_memories(model, progress=False).of(0).written_z == 0).all()
