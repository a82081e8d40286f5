"""Products of a few tokens with the matrices of their experts.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_expert_kernels.py --on cpu`.
"""

import pytest
import torch


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("sizes", [(3, 0, 20, 1), (0, 0, 1, 0), (16, 33, 0), (1,) * 9])
def test_each_group_meets_its_own_matrix(
    sizes: tuple[int, ...], dtype: torch.dtype, device: str
) -> None:
    from manyheads.parts import triton_experts

    if device == "cpu" and dtype == torch.bfloat16:
        pytest.skip("the interpreter has no products in bfloat16")
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(sum(sizes), 72, generator=draw).to(device, dtype)
    weights = torch.randn(len(sizes), 72, 90, generator=draw).to(device, dtype)
    ends = torch.tensor(sizes, device=device).cumsum(0).int()
    if device == "cuda":
        result = triton_experts.few_grouped_matmul(x, weights, ends)
    else:
        result = torch.empty(sum(sizes), 90, dtype=dtype)
        triton_experts.launch(triton_experts._product, x, weights, ends, result)
    expected = torch.cat(
        [a.double() @ b.double() for a, b in zip(x.split(sizes), weights, strict=True)]
    )
    limit = 1e-5 if dtype == torch.float32 else 1e-2
    assert float((result.double() - expected).norm() / expected.norm()) < limit
