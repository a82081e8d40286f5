"""Triton kernels for gated feed-forwards: the activation of one half times the other.

Importing this file needs triton: import it inside a function that runs on CUDA.

A compiler does the forward pass well. Its backward pass joins the gradients of the halves in a
kernel that computes both for every number, which takes three times as long as reading and writing.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.library import triton_op, wrap_triton

KINDS = ("gelu", "gelu_tanh", "silu")
ROWS, COLUMNS = 16, 128


@triton.jit
def _activated(x, KIND: tl.constexpr):
    """The activation and its derivative."""
    if KIND == 0:
        below = 0.5 * (1 + tl.erf(x * 0.7071067811865476))
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == 1:
        inner = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        bent = 2 * tl.sigmoid(2 * inner) - 1
        value = 0.5 * x * (1 + bent)
        steep = 0.7978845608028654 * (1 + 3 * 0.044715 * x * x)
        slope = 0.5 * (1 + bent) + 0.5 * x * (1 - bent * bent) * steep
    else:
        open_ = tl.sigmoid(x)
        value = x * open_
        slope = open_ * (1 + x * (1 - open_))
    return value, slope


@triton.jit
def _gate(
    joined_at,
    inside_at,
    push_at,
    rows,
    size,
    KIND: tl.constexpr,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    inside = (row < rows) & (column < size)
    at = row * (2 * size) + column
    gate = tl.load(joined_at + at, mask=inside, other=0.0).to(tl.float32)
    passed = tl.load(joined_at + at + size, mask=inside, other=0.0).to(tl.float32)
    value, slope = _activated(gate, KIND)
    kind = joined_at.dtype.element_ty
    if BACK:
        pull = tl.load(inside_at + row * size + column, mask=inside, other=0.0).to(tl.float32)
        tl.store(push_at + at, (pull * passed * slope).to(kind), mask=inside)
        tl.store(push_at + at + size, (pull * value).to(kind), mask=inside)
    else:
        tl.store(inside_at + row * size + column, (value * passed).to(kind), mask=inside)


@triton_op("manyheads::gated", mutates_args=())
def gated(joined: Tensor, kind: int) -> Tensor:
    """The activation of the first half, `KINDS[kind]`, times the second: (n, 2 m) to (n, m).

    torch parses these annotations and does not know those with shapes.
    """
    joined = joined.contiguous()
    inside = joined.new_empty(joined.shape[0], joined.shape[1] // 2)
    _launch(joined, inside, joined, kind, back=False)
    return inside


@triton_op("manyheads::gated_back", mutates_args=())
def _gated_back(joined: Tensor, pull: Tensor, kind: int) -> Tensor:
    joined = joined.contiguous()
    push = torch.empty_like(joined)
    _launch(joined, pull.contiguous(), push, kind, back=True)
    return push


def _launch(joined: Tensor, inside: Tensor, push: Tensor, kind: int, *, back: bool) -> None:
    rows, size = inside.shape
    wrap_triton(_gate)[(triton.cdiv(rows, ROWS), triton.cdiv(size, COLUMNS))](
        joined, inside, push, rows, size, KIND=kind, BACK=back, ROWS=ROWS, COLUMNS=COLUMNS
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:  # noqa: ARG001
    joined, ctx.kind = inputs
    ctx.save_for_backward(joined)


def _back(ctx: Any, pull: Tensor) -> tuple[Tensor, None]:
    (joined,) = ctx.saved_tensors
    return _gated_back(joined, pull, ctx.kind), None


torch.library.register_autograd("manyheads::gated", _back, setup_context=_keep)
