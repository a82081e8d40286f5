"""Blocks of GGUF files as integer codes, beside the values that the package gguf unpacks."""

from typing import Any

import gguf
import numpy as np
import pytest
import torch
import torch.nn.functional as F

from manyheads.quantization.gguf_blocks import FOUR_BITS, four_bit_codes, joined
from manyheads.quantization.integer_codes import IntegerCodes, round_weight
from manyheads.quantization.products import Dequantized, Int4Pack, choose_product, why_not

TYPES: Any = gguf.GGMLQuantizationType
ROWS, COLUMNS = 32, 512


def blocks_of(kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Random blocks with scales of a usual size, and the values that they stand for."""
    values, size = gguf.GGML_QUANT_SIZES[TYPES[kind]]
    draw = np.random.default_rng(0)
    blocks = draw.integers(0, 256, (ROWS, COLUMNS // values, size), dtype=np.uint8)
    starts: dict[str, Any] = {"Q4_0": (0,), "Q4_1": (0, 2), "Q4_K": (0, 2)}
    for start in starts[kind]:
        scales = draw.uniform(0.01, 0.02, blocks.shape[:2]).astype(np.float16)
        blocks[..., start : start + 2] = scales[..., None].view(np.uint8)
    exact = gguf.quants.dequantize(blocks.reshape(ROWS, -1), TYPES[kind])
    return torch.from_numpy(blocks), torch.from_numpy(exact)


def codes_of(kind: str) -> tuple[IntegerCodes, torch.Tensor]:
    blocks, exact = blocks_of(kind)
    return four_bit_codes(kind, blocks), exact


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1"])
def test_values_are_those_of_the_blocks(kind: str) -> None:
    codes, exact = codes_of(kind)
    assert codes.layout == kind.lower()
    assert torch.equal(codes.values(), exact)


def test_scales_of_scales_are_rounded_to_half_precision() -> None:
    codes, exact = codes_of("Q4_K")
    assert codes.layout == "q4_1"
    assert not torch.equal(codes.values(), exact)
    assert (codes.values() - exact).norm() < 5e-4 * exact.norm()


def test_all_kinds_that_keep_four_bits_are_tested() -> None:
    assert set(FOUR_BITS) == {"Q4_0", "Q4_1", "Q4_K"}


@pytest.mark.parametrize("second", ["Q4_0", "Q4_1"])
def test_rows_of_several_matrices_are_joined(second: str) -> None:
    parts, values = zip(codes_of("Q4_0"), codes_of(second), strict=True)
    both = joined(list(parts))
    assert both.layout == second.lower()
    assert torch.equal(both.values(), torch.cat(values))
    order = torch.tensor([40, 3])
    assert torch.equal(both.select(order).values(), torch.cat(values)[order])


def test_rows_of_eight_bits_are_joined() -> None:
    weight = torch.randn(10, 32, generator=torch.Generator().manual_seed(0))
    both = joined([round_weight(weight[:4], "int8"), round_weight(weight[4:], "int8")])
    assert torch.equal(both.values(), round_weight(weight, "int8").values())


@pytest.mark.parametrize("kind", sorted(FOUR_BITS))
@pytest.mark.parametrize("tokens", [1, 5, 100])
def test_products_are_those_of_the_values(kind: str, tokens: int) -> None:
    codes, exact = codes_of(kind)
    x = torch.randn(tokens, COLUMNS, generator=torch.Generator().manual_seed(1))
    expected = F.linear(x, exact)
    for product in {choose_product(codes, tokens), Int4Pack, Dequantized}:
        if why_not(product, codes) is None:
            result = product(codes)(x)
            assert (result - expected).norm() < 0.01 * expected.norm()
