"""Weights as integers and scales: what is stored, and how near it is."""

from typing import Any

import pytest
import torch

from manyheads.quantization.integer_codes import GROUP, LARGEST, SMALLEST, pack, round_weight

NAMES: tuple[Any, ...] = ("int8", "int4")
SHAPES = [(64, 96), (7, 33), (5, 64), (1, 1), (33, 70)]


def draw(rows: int, columns: int) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(rows * columns))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_packed_codes_are_read_back_exactly(name: Any, shape: tuple[int, int]) -> None:
    rows, columns = shape
    low, high = SMALLEST[name], LARGEST[name]
    integers = torch.randint(low, high + 1, shape, dtype=torch.int8)
    groups = 1 if name == "int8" else -(-columns // GROUP)
    scales = torch.rand(rows, groups).bfloat16().float()
    codes = pack(integers, scales, name)
    assert torch.equal(codes.integers(), integers)
    wide = scales if name == "int8" else scales.repeat_interleave(GROUP, dim=1)[:, :columns]
    assert torch.equal(codes.values(), integers * wide)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", NAMES)
def test_no_weight_moves_by_more_than_half_a_step(name: Any, shape: tuple[int, int]) -> None:
    weight = draw(*shape)
    codes = round_weight(weight, name, search=False)
    steps = codes.scales.float().abs()
    if name == "int4":
        steps = steps.repeat_interleave(GROUP, dim=1)[:, : shape[1]]
    # A bfloat16 scale is rounded too, and the code 8 does not exist.
    slack = 0.501 if name == "int8" else 1.05
    assert ((codes.values() - weight).abs() <= slack * steps + 1e-7).all()


def test_four_bits_take_half_a_byte_per_weight() -> None:
    codes = round_weight(draw(64, 128), "int4")
    assert codes.codes.nbytes + codes.scales.nbytes == 64 * 128 // 2 + 64 * 4 * 2


def test_searched_scales_have_a_smaller_error() -> None:
    weight = draw(64, 256)
    plain, searched = (
        (round_weight(weight, "int4", search=search).values() - weight).norm()
        for search in (False, True)
    )
    assert searched < 0.97 * plain


@pytest.mark.parametrize("name", NAMES)
def test_rows_of_zeros_stay_zero(name: Any) -> None:
    weight = torch.zeros(3, 64)
    weight[1] = draw(1, 64)
    values = round_weight(weight, name).values()
    assert values.isfinite().all()
    assert not values[[0, 2]].any()


@pytest.mark.parametrize("name", NAMES)
def test_selected_rows_are_those_of_the_matrix(name: Any) -> None:
    codes, rows = round_weight(draw(9, 40), name), torch.tensor([4, 0, 4])
    assert torch.equal(codes.select(rows).values(), codes.values()[rows])
