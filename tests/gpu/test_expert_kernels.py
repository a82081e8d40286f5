"""Kernels for experts: products of a few tokens with their matrices, and visits of fewer still.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_expert_kernels.py --on cpu`.
"""

import pytest
import torch

from manyheads import Ragged
from manyheads.parts import experts
from manyheads.parts.experts import ClampedSwiGLU, Experts, MixtureOfExperts

MIXTURES = {
    "plain": Experts(width=72, hidden=40, count=12, top_k=3),
    "as routed": Experts(width=72, hidden=130, count=70, top_k=1, renormalize=False),
    "biases, clamped": Experts(
        width=130, hidden=72, count=9, top_k=4, bias=True, gating=ClampedSwiGLU(limit=1.0)
    ),
    "shared": Experts(width=64, hidden=32, count=8, top_k=2, shared=24, shared_gate="sigmoid"),
}


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


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("tokens", [1, 2])
@torch.inference_mode()
def test_few_visits_give_what_sorted_tokens_give(
    tokens: int, name: str, device: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = MIXTURES[name]
    torch.manual_seed(0)
    module = MixtureOfExperts(config)
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    dtype = torch.float32 if device == "cpu" else torch.bfloat16
    module = module.to(device, dtype)
    x = torch.randn(tokens, config.width).to(device, dtype)
    like = Ragged.from_list([x])
    monkeypatch.setattr(experts, "runs_triton", lambda _: True)
    assert module._few_visits(x)
    result, losses = module(x, like)
    assert losses is None
    monkeypatch.setattr(experts, "runs_triton", lambda _: False)
    expected, _ = module(x, like)
    limit = 1e-5 if device == "cpu" else 3e-2
    assert float((result - expected).float().norm() / expected.float().norm()) < limit


def test_many_visits_are_sorted_by_expert(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(experts, "runs_triton", lambda _: True)
    module = MixtureOfExperts(MIXTURES["plain"]).to(device)
    # Each token visits three of twelve experts.
    with torch.inference_mode():
        assert module._few_visits(torch.randn(4, 72, device=device))
        assert not module._few_visits(torch.randn(5, 72, device=device))
    assert not module._few_visits(torch.randn(1, 72, device=device))
