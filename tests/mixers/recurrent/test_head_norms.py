"""Norms of recurrent heads, by their formulas; the kernel is compared in tests/gpu."""

import pytest
import torch
from torch import Tensor

from manyheads.mixers.recurrent.head_norms import EPS, gated_norm, unit


def normal(*sizes: int, seed: int) -> Tensor:
    return torch.randn(sizes, generator=torch.Generator().manual_seed(seed))


def test_vectors_of_one_length() -> None:
    x = normal(5, 3, 8, seed=1)
    torch.testing.assert_close(unit(x, 0.5).norm(dim=-1), torch.full((5, 3), 0.5))
    zero = unit(torch.zeros(1, 1, 4))
    assert torch.equal(zero, torch.zeros(1, 1, 4))
    # A short vector is made longer by as much as the eps allows.
    short = unit(torch.tensor([[[1e-4, 0.0]]]))
    torch.testing.assert_close(short[0, 0, 0].item(), 1e-4 * (1e-8 + EPS) ** -0.5)


@pytest.mark.parametrize("activation", ["silu", "sigmoid"])
def test_the_gate_before_or_after_the_norm(activation: str) -> None:
    x, gate, weight = normal(5, 3, 8, seed=1), normal(5, 3, 8, seed=2), normal(8, seed=3)
    opened = gate.sigmoid() * (gate if activation == "silu" else 1.0)

    def normed(y: Tensor) -> Tensor:
        return weight * y * (y.square().mean(-1, keepdim=True) + 1e-5).rsqrt()

    after = gated_norm(x, gate, weight, 1e-5, activation)  # type: ignore[arg-type]
    before = gated_norm(x, gate, weight, 1e-5, activation, gate_first=True)  # type: ignore[arg-type]
    torch.testing.assert_close(after, normed(x) * opened)
    torch.testing.assert_close(before, normed(x * opened))
