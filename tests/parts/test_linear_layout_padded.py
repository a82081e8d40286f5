"""A widened matrix gives what the narrow one gives, forth and back."""

import pytest
import torch
from torch import nn

from manyheads.parts.linear_layout import split_linear, split_padded

ROWS = {"query": 70, "gate": 3, "key": 64, "value": 1}


@pytest.mark.parametrize("biased", [False, True])
def test_widened_is_the_same_map(biased: bool) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(6, sum(ROWS.values()), bias=biased).double()
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    leaves = (x, *linear.parameters())
    pull = torch.randn(7, sum(ROWS.values()), dtype=torch.float64)
    result, expected = split_padded(linear, x, ROWS), split_linear(linear, x, ROWS)
    assert list(result) == list(expected) == list(ROWS)
    sums = [(torch.cat([*parts.values()], dim=1) * pull).sum() for parts in (result, expected)]
    for name, size in ROWS.items():
        assert result[name].shape == (7, size)
        torch.testing.assert_close(result[name], expected[name])
    for one, other in zip(*(torch.autograd.grad(each, leaves) for each in sums), strict=True):
        torch.testing.assert_close(one, other)


def test_the_host_needs_no_widening() -> None:
    linear, x = nn.Linear(6, sum(ROWS.values())), torch.randn(100, 6)
    parts = split_linear(linear, x, ROWS)
    assert torch.equal(torch.cat([*parts.values()], dim=1), linear(x))
    assert parts["gate"].stride() == (138, 1), "a part was copied"
