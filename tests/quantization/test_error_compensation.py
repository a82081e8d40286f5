"""Rounding with compensation: what counts is the error of the outputs."""

import pytest
import torch
from torch import Tensor

from manyheads.quantization.error_compensation import compensated_codes
from manyheads.quantization.integer_codes import IntegerCodes, round_weight


def correlated(tokens: int, columns: int) -> Tensor:
    """Inputs as of a layer: few directions, and channels of different size."""
    draw = torch.Generator().manual_seed(0)
    directions = torch.randn(columns // 4, columns, generator=draw)
    sizes = torch.rand(columns, generator=draw) * 3
    return torch.randn(tokens, columns // 4, generator=draw) @ directions * sizes


def output_error(codes: IntegerCodes, weight: Tensor, x: Tensor) -> float:
    return float((x @ (codes.values() - weight).T).norm() / (x @ weight.T).norm())


@pytest.mark.parametrize("columns", [160, 150])
def test_outputs_are_nearer_than_with_plain_rounding(columns: int) -> None:
    weight, x = torch.randn(48, columns, generator=torch.Generator().manual_seed(1)), None
    x = correlated(1200, columns)
    seen, unseen = x[:1000], x[1000:]
    compensated = compensated_codes(weight, seen.T @ seen)
    plain = round_weight(weight, "int4", search=False)
    for inputs in (seen, unseen):
        assert output_error(compensated, weight, inputs) < 0.5 * output_error(plain, weight, inputs)


def test_channels_that_are_always_zero_do_no_harm() -> None:
    weight, x = torch.randn(8, 64), correlated(100, 64)
    x[:, 5] = 0
    codes = compensated_codes(weight, x.T @ x)
    assert codes.values().isfinite().all()
    assert output_error(codes, weight, x) < 0.1


def test_independent_inputs_of_one_size_leave_nothing_to_compensate() -> None:
    weight = torch.randn(8, 64)
    codes = compensated_codes(weight, torch.eye(64))
    assert torch.equal(codes.values(), round_weight(weight, "int4").values())
