"""The products of a step with a few tokens, with what is computed on their way.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_few_products.py --on cpu`.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor


@pytest.mark.parametrize("tokens", [2, 8, 16])
@pytest.mark.parametrize("kind", ["plain", "norm and bias", "residual", "gated"])
def test_products_are_those_of_torch(
    tokens: int, kind: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from manyheads.decoding.steps import triton_products

    # The interpreter has no products in half precision, and cannot launch a kernel early.
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    if device == "cpu":
        monkeypatch.setattr(triton_products, "_early", lambda _: {"EARLY": False})
    draw = torch.Generator().manual_seed(0)

    def normal(*sizes: int) -> Tensor:
        return torch.randn(sizes, generator=draw).to(device, dtype)

    rows, columns = 90, 300
    x, weight = normal(tokens, columns), normal(rows, columns) * columns**-0.5
    norm, bias, residual = normal(columns), normal(rows), normal(tokens, rows)
    wide = F.rms_norm(x.double(), (columns,), norm.double() + 1, 1e-6)
    product = triton_products.product_of_few
    match kind:
        case "plain":
            result, expected = product(x, weight), x.double() @ weight.double().T
        case "norm and bias":
            result = product(x, weight, norm=(norm, 1.0, 1e-6), bias=bias)
            expected = F.linear(wide, weight.double(), bias.double())
        case "residual":
            result = product(x, weight, residual=residual)
            expected = residual.double() + x.double() @ weight.double().T
        case _:
            result = product(x, weight, norm=(norm, 1.0, 1e-6), gated=True)
            gate, other = F.linear(wide, weight.double()).chunk(2, dim=1)
            expected = F.silu(gate) * other
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((result.double() - expected).norm() / expected.norm()) < limit
