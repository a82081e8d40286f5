"""Grouped products are the products of the groups."""

import torch
from hypothesis import given
from hypothesis import strategies as st

from manyheads.parts.experts import grouped_matmul


@given(sizes=st.lists(st.integers(0, 4), min_size=1, max_size=5))
def test_each_group_meets_its_own_matrix(sizes: list[int]) -> None:
    x = torch.randn(sum(sizes), 3, requires_grad=True)
    weights = torch.randn(len(sizes), 3, 5, requires_grad=True)
    ends = torch.tensor(sizes).cumsum(0).int()
    pull = torch.randn(sum(sizes), 5)
    result = grouped_matmul(x, weights, ends)
    expected = torch.cat([a @ b for a, b in zip(x.split(sizes), weights, strict=True)])
    torch.testing.assert_close(result, expected)
    for one, other in zip(
        torch.autograd.grad((result * pull).sum(), (x, weights)),
        torch.autograd.grad((expected * pull).sum(), (x, weights)),
        strict=True,
    ):
        torch.testing.assert_close(one, other)


def test_the_compiler_sees_shapes_and_gradients_as_they_are() -> None:
    x, weights = torch.randn(4, 3, requires_grad=True), torch.randn(2, 3, 5, requires_grad=True)
    ends = torch.tensor([1, 4], dtype=torch.int32)
    torch.library.opcheck(torch.ops.manyheads.grouped_matmul.default, (x, weights, ends))
