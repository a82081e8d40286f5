"""Keys, values and coefficients of neurons add up to what a feed-forward writes."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from manyheads.errors import InputError
from manyheads.lens.weights.ffn_key_values import Feeds, Neuron, feeds_of
from manyheads.models.build import build
from manyheads.models.recipes import ModelConfig
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, RMSNorm, SandwichNorm
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap
from tests.messages import refuses
from tests.models.zoo import (
    DECODERS,
    ENCODERS,
    EXPERTS,
    SEQ2SEQS,
    decoder,
    ids,
    layer,
    own,
    small,
)

WITH_SHARED = replace(EXPERTS, shared=16, shared_gate="sigmoid", renormalise=False)
CASES: dict[str, ModelConfig] = {
    "mlp": DECODERS["gpt2"],
    "geglu": ENCODERS["modernbert"],
    "swiglu": DECODERS["llama"],
    "post": ENCODERS["bert"],
    "experts": DECODERS["experts"],
    "shared expert": decoder(layer(own(mask=Causal()), WITH_SHARED)),
}


@pytest.mark.parametrize("case", CASES)
def test_coefficients_times_values_are_what_is_written(case: str) -> None:
    model: Any = small(CASES[case])
    feeds = feeds_of(model)
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
    feeds = feeds_of(model)
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(0))
    residual = feeds.residual(0)
    with torch.no_grad():
        entered, nothing = residual.enter(x), residual.enter(torch.zeros(1, 32))
        expert = feeds.experts(0)[0]
        module: Any = feeds.module(0)
        rows = module.expand.weight if expert is None else module.expand[expert].T
        expected = (entered - nothing) @ rows[: feeds.size(0, expert)].T
        found = x @ feeds.keys(0, expert).T
    ratio = torch.nn.functional.cosine_similarity(found, expected, dim=1)
    torch.testing.assert_close(ratio, torch.ones(5), atol=1e-5, rtol=0)


@pytest.mark.parametrize("norm", [RMSNorm(), LayerNorm()])
def test_a_norm_behind_is_passed_through(norm: Any) -> None:
    model: Any = build(decoder(layer(own(mask=Causal()), norm=SandwichNorm(norm))), seed=0)
    feeds, second = feeds_of(model), model.stack.layers[0].feedforward_residual.second_norm
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
        "'5' is not the address of a neuron: write it as L5N10, of expert 2 L5E2N10.",
    ):
        Neuron.parse("5")


def test_neurons_that_are_not_there_are_refused() -> None:
    feeds = feeds_of(small(DECODERS["uneven"]))
    assert feeds.find([(0, 3), "L1N2", Neuron(3, 39)])[0] == Neuron(0, 3)
    with refuses(
        InputError, "L2N0 is in a layer without a feed-forward: use one of the layers 0, 1, 3."
    ):
        feeds.find(["L2N0"])
    with refuses(InputError, "there is no neuron L0N40: use 0 to 39."):
        feeds.find(["L0N40"])
    with refuses(InputError, "layer 0 has no expert 1: leave the expert out."):
        feeds.find(["L0E1N0"])
    with refuses(InputError, "layer 0 has no expert None: name one, as 0."):
        feeds_of(small(DECODERS["experts"])).find([(0, 1)])
    with refuses(InputError, "no neuron is named: give some, as L0N5 or (0, 5)."):
        feeds.find([])


def test_stacks_are_named() -> None:
    both = small(SEQ2SEQS["t5"])
    assert feeds_of(both).stack.name == "decoder"
    assert feeds_of(both, "encoder").stack.name == "encoder"
    with refuses(InputError, 'this Seq2Seq has no stack \'main\': use "encoder" or "decoder".'):
        feeds_of(both, "main")
    with refuses(InputError, "this Decoder has no stack 'encoder': use \"main\"."):
        feeds_of(small(DECODERS["gpt2"]), "encoder")
    with refuses(InputError, "the main stack has no feed-forward: look elsewhere."):
        feeds_of(build(decoder(layer(own(mask=Causal()), None)), seed=0))
    assert isinstance(feeds_of(both), Feeds)
