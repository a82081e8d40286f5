"""Feed-forward layers by their formulas."""

import math

import pytest
import torch
from torch import Tensor

from manyheads.parts.feedforward import ACTIVATIONS, MLP, FeedForward, GeGLU, SwiGLU
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Record, Site, Sublayer, Tap, WatchContext

BATCH = Ragged(torch.randn(5, 6), Lengths.of([3, 0, 2]))


def erf_gelu(x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def tanh_gelu(x: Tensor) -> Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)))


FORMULAS = {
    "relu": lambda x: x.clamp(min=0),
    "gelu": erf_gelu,
    "gelu_tanh": tanh_gelu,
    "quick_gelu": lambda x: x / (1 + torch.exp(-1.702 * x)),
    "silu": lambda x: x / (1 + torch.exp(-x)),
    "tanh": lambda x: 1 - 2 / (torch.exp(2 * x) + 1),
}


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_activations_are_their_formulas(name: str) -> None:
    x = torch.linspace(-5, 5, 101)
    torch.testing.assert_close(ACTIVATIONS[name](x), FORMULAS[name](x), rtol=1e-5, atol=1e-6)


def linear(x: Tensor, layer: torch.nn.Linear, rows: slice = slice(None)) -> Tensor:
    y = x @ layer.weight[rows].T
    return y if layer.bias is None else y + layer.bias[rows]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_an_mlp_is_two_projections_with_an_activation_between(activation: str, bias: bool) -> None:
    layer = FeedForward(MLP(width=6, hidden=10, activation=activation, bias=bias))
    inside = FORMULAS[activation](linear(BATCH.values, layer.expand))
    torch.testing.assert_close(layer(BATCH.values, BATCH), linear(inside, layer.contract))
    assert sum(p.numel() for p in layer.parameters()) == 2 * 6 * 10 + 16 * bias


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize(
    ("kind", "activation"), [(GeGLU, "gelu"), (GeGLU, "gelu_tanh"), (SwiGLU, "silu")]
)
def test_a_gated_one_multiplies_the_activated_half_by_the_other(
    kind: type[GeGLU | SwiGLU], activation: str, bias: bool
) -> None:
    chosen = {"activation": activation} if kind is GeGLU else {}
    layer = FeedForward(kind(width=6, hidden=10, bias=bias, **chosen))
    x = BATCH.values
    gate, passed = (linear(x, layer.expand, rows) for rows in (slice(10), slice(10, 20)))
    inside = FORMULAS[activation](gate) * passed
    torch.testing.assert_close(layer(x, BATCH), linear(inside, layer.contract))
    assert sum(p.numel() for p in layer.parameters()) == 3 * 6 * 10 + 26 * bias


@pytest.mark.parametrize("config", [MLP(width=6, hidden=10), SwiGLU(width=6, hidden=10)])
def test_inside_is_what_the_second_projection_gets(config: MLP | SwiGLU) -> None:
    layer = FeedForward(config)
    site = Site(2, Tap.INSIDE, Sublayer.FEEDFORWARD)
    record = Record([site])
    context = WatchContext(record, layer=2, sublayer=Sublayer.FEEDFORWARD)
    output = layer(BATCH.values, BATCH, context)
    inside = record[site]
    assert isinstance(inside, Ragged)
    assert inside.lengths.each == (3, 0, 2)
    torch.testing.assert_close(output, linear(inside.values, layer.contract))


def test_dropout_acts_in_training_alone() -> None:
    torch.manual_seed(0)
    layer = FeedForward(MLP(width=6, hidden=2000, activation="relu", bias=False, dropout=0.5))
    full = layer.eval()(BATCH.values, BATCH)
    assert torch.equal(layer(BATCH.values, BATCH), full)
    layer.train()
    draws = torch.stack([layer(BATCH.values, BATCH) for _ in range(400)])
    spread = draws.std(0)
    assert spread.min() > 0
    # The mean of 400 draws, to within five of its own deviations.
    assert ((draws.mean(0) - full).abs() < 5 * spread / 400**0.5).all()
