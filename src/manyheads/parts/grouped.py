"""Matrix products of tokens grouped by expert: each group meets a matrix of its own."""

from itertools import pairwise

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

__all__ = ["grouped_matmul"]


def grouped_matmul(
    x: Float[Tensor, "n c"], weights: Float[Tensor, "e c f"], ends: Int[Tensor, " e"]
) -> Float[Tensor, "n f"]:
    """Rows up to `ends[0]` times the first matrix, from there to `ends[1]` times the second, ...

    bfloat16 on CUDA is one kernel that never asks the host; elsewhere one product a group.
    """
    if x.is_cuda and x.dtype == torch.bfloat16:
        return F.grouped_mm(x, weights, offs=ends)
    return _each(x, weights, ends)


def _spans(ends: Tensor) -> list[tuple[int, int]]:
    return list(pairwise((0, *ends.tolist())))


# Opaque to the compiler, which could not know the groups' sizes.
@torch.library.custom_op("manyheads::grouped_matmul", mutates_args=())
def _each(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    output = x.new_empty(x.shape[0], weights.shape[2])
    for (start, stop), weight in zip(_spans(ends), weights, strict=True):
        if stop > start:
            torch.mm(x[start:stop], weight, out=output[start:stop])
    return output


@_each.register_fake
def _(x: Tensor, weights: Tensor, ends: Tensor) -> Tensor:
    del ends
    return x.new_empty(x.shape[0], weights.shape[2])


@torch.library.custom_op("manyheads::grouped_outer", mutates_args=())
def _outer(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    """For each group the product of its rows of x, transposed, and of y."""
    output = x.new_zeros(ends.shape[0], x.shape[1], y.shape[1])
    for index, (start, stop) in enumerate(_spans(ends)):
        if stop > start:
            torch.mm(x[start:stop].T, y[start:stop], out=output[index])
    return output


@_outer.register_fake
def _(x: Tensor, y: Tensor, ends: Tensor) -> Tensor:
    return x.new_empty(ends.shape[0], x.shape[1], y.shape[1])


def _keep(ctx, inputs, output) -> None:  # type: ignore[no-untyped-def]
    del output
    ctx.save_for_backward(*inputs)


def _backward(ctx, gradient):  # type: ignore[no-untyped-def]
    x, weights, ends = ctx.saved_tensors
    gradient = gradient.contiguous()
    return _each(gradient, weights.transpose(1, 2), ends), _outer(x, gradient, ends), None


_each.register_autograd(_backward, setup_context=_keep)
