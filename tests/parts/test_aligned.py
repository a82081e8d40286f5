"""A widened matrix gives what the narrow one gives, forth and back."""

import pytest
import torch
from torch import nn

from manyheads.parts.aligned import aligned, widened


@pytest.mark.parametrize("biased", [False, True])
def test_widened_is_the_same_map(biased: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, 5, bias=biased).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    leaves = (x, *linear.parameters())
    pull = torch.randn(7, 5, dtype=torch.float64)
    wide, expected = widened(linear, x, 3), linear(x)
    assert wide.shape == (7, 8)
    assert not wide[:, 5:].any()
    found = wide[:, :5]
    torch.testing.assert_close(found, expected)
    for one, other in zip(
        torch.autograd.grad((found * pull).sum(), leaves),
        torch.autograd.grad((expected * pull).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_the_host_needs_no_widening() -> None:
    linear, x = nn.Linear(6, 5), torch.randn(100, 6)
    assert torch.equal(aligned(linear, x), linear(x))


def test_a_map_that_is_more_than_a_matrix_is_asked_itself() -> None:
    class Doubled(nn.Linear):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    linear, x = Doubled(6, 5), torch.randn(100, 6)
    assert torch.equal(aligned(linear, x), linear(x))
