"""The kernel of norms with a gate: outputs and gradients are those of plain torch.

Without a GPU, but with triton: `MANYHEADS_NO_TYPECHECK=1 TRITON_INTERPRET=1 pytest
tests/gpu/test_norm_kernels.py --on cpu`.
"""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from manyheads.mixers.recurrent.head_norms import gated_norm, unit

# Tokens, heads and channels.
SHAPES = [(70, 3, 64), (5, 2, 48), (1, 1, 3), (9, 1, 1030)]


def normal(*sizes: int, device: str, seed: int) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(sizes, generator=draw).to(device)


def part_of_wider(tokens: int, heads: int, size: int, device: str, seed: int) -> Tensor:
    """As part of a projection: tokens are further apart than they are wide."""
    whole = normal(tokens, heads * size + 24, device=device, seed=seed)
    return whole[:, 8:-16].unflatten(1, (heads, size))


def compare(run: Callable[..., Tensor], inputs: list[Tensor], limit: float = 1e-5) -> None:
    inputs = [each.detach().requires_grad_() for each in inputs]
    results = []
    for by_triton in (True, False):
        output = run(*inputs, by_triton=by_triton)
        pull = normal(*output.shape, device=str(output.device), seed=9).to(output.dtype)
        results.append((output, *torch.autograd.grad(output, inputs, pull)))
    for one, other in zip(*results, strict=True):
        assert one.dtype == other.dtype
        assert one.shape == other.shape
        assert (one - other).norm() <= limit * other.norm()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gate_first", [False, True])
@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_a_norm_with_a_gate(
    shape: tuple[int, int, int], gate_first: bool, activation: str, device: str
) -> None:
    x, gate = (part_of_wider(*shape, device, seed) for seed in (1, 2))
    weight = normal(shape[2], device=device, seed=3)

    def run(*inputs: Tensor, by_triton: bool) -> Tensor:
        return gated_norm(*inputs, 1e-5, activation, gate_first=gate_first, by_triton=by_triton)  # type: ignore[arg-type]

    compare(run, [x, gate, weight])


@pytest.mark.parametrize("shape", SHAPES)
def test_vectors_of_length_one(shape: tuple[int, int, int], device: str) -> None:
    x = part_of_wider(*shape, device, seed=1)

    def run(inputs: Tensor, *, by_triton: bool) -> Tensor:
        return unit(inputs, 0.3, by_triton=by_triton)

    compare(run, [x])
    lengths = unit(x, 0.3, by_triton=True).norm(dim=-1)
    torch.testing.assert_close(lengths, torch.full_like(lengths, 0.3), rtol=1e-3, atol=1e-3)


def test_bfloat16_rounds_once(device: str) -> None:
    x, gate = (part_of_wider(70, 3, 64, device, seed).bfloat16() for seed in (1, 2))
    weight = normal(64, device=device, seed=3).bfloat16()

    def run(*inputs: Tensor, by_triton: bool) -> Tensor:
        return gated_norm(*inputs, 1e-5, by_triton=by_triton)

    compare(run, [x, gate, weight], limit=5e-3)
