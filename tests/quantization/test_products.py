"""Every operation that this machine has, against the product with the weights themselves."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.quantization import products
from manyheads.quantization.integer_codes import round_weight
from manyheads.quantization.products import PRODUCTS, Product, choose_product, why_not

CASES = [(name, product) for name, kinds in PRODUCTS.items() for product in kinds]
# Rows x columns; the last ones are no multiple of a group.
SHAPES = [(64, 96), (48, 64), (33, 70), (7, 31)]


def problem(rows: int, columns: int, tokens: int) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(rows + tokens)
    return (
        torch.randn(rows, columns, generator=draw),
        torch.randn(tokens, columns, generator=draw),
    )


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("name", "product"), CASES)
def test_products_are_those_of_the_weights(
    name: Any, product: type[Product], shape: tuple[int, int]
) -> None:
    weight, x = problem(*shape, 5)
    codes = round_weight(weight, name)
    if why_not(product, codes) is not None:
        pytest.skip(str(why_not(product, codes)))
    exact = F.linear(x, codes.values())
    result = product(codes)(x)
    assert result.dtype == torch.float32
    assert (result - exact).norm() < 0.02 * exact.norm()


@pytest.mark.parametrize(("name", "product"), CASES)
def test_tokens_do_not_depend_on_those_beside_them(name: Any, product: type[Product]) -> None:
    weight, x = problem(64, 96, 6)
    codes = round_weight(weight, name)
    if why_not(product, codes) is not None:
        pytest.skip("not on this machine")
    multiply = product(codes)
    # A token with far larger inputs would take the range of one scale for all.
    x[3] *= 1000
    together, alone = multiply(x), torch.cat([multiply(row[None]) for row in x])
    largest = alone.abs().amax(1, keepdim=True)
    torch.testing.assert_close(together / largest, alone / largest, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(("name", "product"), CASES)
def test_vectors_are_written_and_added_in_place(name: Any, product: type[Product]) -> None:
    weight, x = problem(64, 96, 1)
    codes = round_weight(weight, name)
    if why_not(product, codes) is not None:
        pytest.skip("not on this machine")
    multiply = product(codes)
    expected, out, total = multiply(x)[0], torch.empty(64), torch.ones(64)
    assert multiply.writer(out)(x[0]) is out
    torch.testing.assert_close(out, expected)
    assert multiply.adder()(total, x[0]) is total
    torch.testing.assert_close(total, expected + 1)


@pytest.mark.parametrize("tokens", [1, 4, 5, 100])
@pytest.mark.parametrize("name", ["int8", "int4"])
def test_the_chosen_operation_can_multiply(name: Any, tokens: int) -> None:
    for shape in SHAPES:
        weight, x = problem(*shape, tokens)
        codes = round_weight(weight, name)
        product = choose_product(codes, tokens)
        assert tokens <= product.most_tokens
        assert product(codes)(x).shape == (tokens, shape[0])


def test_an_operation_that_saturates_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Saturating(products.Dequantized):
        def __call__(self, x: Tensor) -> Tensor:
            return super().__call__(x).clamp(-1, 1)

    monkeypatch.setitem(PRODUCTS, "int8", (Saturating, products.Dequantized))
    codes = round_weight(torch.randn(8, 64), "int8")
    assert "wrong" in str(why_not(Saturating, codes))
    assert choose_product(codes, 3) is products.Dequantized


def test_columns_outside_groups_fall_back_to_the_definition(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(products, "_has_avx512", lambda: True)
    codes = round_weight(torch.randn(8, 33), "int4")
    assert choose_product(codes, 1) is products.Dequantized
    assert "33 columns" in str(why_not(products.FourBitGroups, codes)) or not products.ARM


@pytest.mark.skipif(not products.X86, reason="its operations are those of x86")
@pytest.mark.parametrize(
    ("product", "name", "avx512", "limit"),
    [
        (products.Int4Pack, "int4", True, 0.03),
        (products.HalfWeights, "int4", False, 3e-4),
        (products.HalfWeights, "int8", False, 1e-6),
        (products.WeightedSum, "int8", False, 3e-6),
    ],
)
def test_what_is_used_on_the_other_processors_is_right_too(
    product: type[Product], name: Any, avx512: bool, limit: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products, "_has_avx512", lambda: avx512)
    weight, x = problem(48, 64, 5)
    # Rows of sizes that half precision does not reach.
    codes = round_weight(weight * torch.logspace(-12, 8, 48)[:, None], name)
    assert product.cannot(codes) is None
    exact = F.linear(x, codes.values())
    largest = exact.abs().amax(0)
    result, exact = product(codes)(x) / largest, exact / largest
    assert (result - exact).norm() < limit * exact.norm()
    torch.testing.assert_close(product(codes).plus(x, largest) / largest, 1 + result)


@pytest.mark.skipif(
    products.Int8.cannot(round_weight(torch.randn(32, 32), "int8")) is not None, reason="not here"
)
def test_sums_that_saturate_without_vnni_are_noticed() -> None:
    """oneDNN obeys this variable as it would a processor without the instructions."""
    code = (
        "import torch\n"
        "from manyheads.quantization import products as p\n"
        "codes = p.round_weight(torch.randn(32, 64), 'int8')\n"
        "print(p.why_not(p.Int8, codes), p.choose_product(codes, 1).__name__)\n"
    )
    environment = {**os.environ, "ONEDNN_MAX_CPU_ISA": "AVX2"}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert "wrong" in result.stdout
    assert result.stdout.split()[-1] == "WeightedSum"


@pytest.mark.parametrize("product", [products.Int8, products.PackedInt8])
def test_integers_of_eight_bits_are_multiplied_exactly(product: type[products.Int8]) -> None:
    codes = round_weight(torch.randn(48, 64, generator=torch.Generator().manual_seed(0)), "int8")
    if why_not(product, codes) is not None:
        pytest.skip("not on this machine")
    # Integers up to 127 are their own codes.
    x = torch.randint(-127, 128, (product.block + 3, 64)).float()
    x[:, 0] = 127
    expected = (x.double() @ codes.integers().double().T * codes.scales.T.double()).float()
    torch.testing.assert_close(product(codes)(x), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("product", [products.Int8, products.PackedInt8])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_visible(value: float, product: type[products.Int8]) -> None:
    codes = round_weight(torch.randn(48, 64), "int8")
    if why_not(product, codes) is not None:
        pytest.skip("not on this machine")
    x = torch.zeros(2, 64)
    x[0, 3] = value
    multiply = product(codes)
    assert not multiply(x)[0].isfinite().any()
    assert torch.equal(multiply(x)[1], torch.zeros(48))
    assert not multiply.writer(torch.empty(48))(x[0]).isfinite().any()
    assert torch.equal(multiply.writer(torch.empty(48))(x[1]), torch.zeros(48))
