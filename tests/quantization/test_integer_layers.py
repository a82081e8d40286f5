"""Layers with integer weights in the place of ordinary ones."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

from manyheads.errors import ConfigError
from manyheads.quantization.integer_codes import round_weight
from manyheads.quantization.integer_layers import IntegerEmbedding, IntegerLinear

NAMES: tuple[Any, ...] = ("int8", "int4")


def layer(name: Any, rows: int = 48, columns: int = 64, *, bias: bool = True) -> IntegerLinear:
    torch.manual_seed(0)
    linear = nn.Linear(columns, rows, bias=bias)
    return IntegerLinear(round_weight(linear.weight, name), linear.bias)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_those_of_the_weights_it_shows(name: Any, bias: bool) -> None:
    linear = layer(name, bias=bias)
    x = torch.randn(3, 2, 64)
    expected = nn.functional.linear(x, linear.weight, linear.bias)
    with torch.no_grad():
        result = linear(x)
    assert result.shape == (3, 2, 48)
    assert (result - expected).norm() < 0.02 * expected.norm()
    assert linear(torch.empty(0, 64)).shape == (0, 48)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_get_the_gradient_of_the_exact_product(name: Any) -> None:
    linear = layer(name)
    x = torch.randn(3, 64, requires_grad=True)
    linear(x).sum().backward()
    torch.testing.assert_close(x.grad, linear.weight.sum(0).expand(3, -1))


@pytest.mark.parametrize("name", NAMES)
def test_copies_compute_the_same(name: Any) -> None:
    linear, x = layer(name), torch.randn(1, 64)
    with torch.no_grad():
        expected = linear(x)
        assert torch.equal(copy.deepcopy(linear)(x), expected)


def test_codes_that_are_loaded_later_are_packed_again() -> None:
    linear, fresh, x = layer("int8"), layer("int8"), torch.randn(1, 64)
    fresh.codes.neg_()
    with torch.no_grad():
        before = linear(x)
        linear.load_state_dict(fresh.state_dict())
        after = linear(x)
    torch.testing.assert_close(after - linear.bias, linear.bias - before, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("change", [lambda part: part.half(), lambda part: part.double()])
def test_another_dtype_is_refused(change: Any) -> None:
    with pytest.raises(ConfigError, match=r"float32.*dequantize_weights"):
        change(layer("int8"))


def test_training_is_refused() -> None:
    with pytest.raises(ConfigError, match="int4 weights cannot be trained"):
        layer("int4").train()
    assert not layer("int4").eval().training


def test_half_precision_inputs_give_half_precision() -> None:
    with torch.no_grad():
        assert layer("int8")(torch.randn(2, 64).bfloat16()).dtype == torch.bfloat16


@pytest.mark.parametrize("name", NAMES)
def test_an_embedding_gives_rows_and_scores_tokens(name: Any) -> None:
    table = IntegerEmbedding(round_weight(torch.randn(50, 64), name))
    ids = torch.tensor([[3, 4], [49, 0]])
    assert torch.equal(table(ids), table.weight[ids])
    x = torch.randn(2, 64)
    with torch.no_grad():
        scores = table.multiply(x)
    expected = x @ table.weight.T
    assert (scores - expected).norm() < 0.02 * expected.norm()
