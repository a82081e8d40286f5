"""A Triton kernel of norms with a gate: every number is read and written once, and its gradients.

Importing this file needs triton: import it inside a function that runs on CUDA.

With x a row, g its gate, w the weight and a the activation of gates:

    norm first      output = scale * w * x * r * a(g)        r = (mean(x^2) + eps)^(-1/2)
    gate first      the same with z = x a(g) for x, and no gate after it

Without a gate, whose activation is then "none", there is the norm alone. Each program of the
gradients stores its share of the weight's; torch adds the shares in a fixed order.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.kernels.triton_decay import side_by_side

ACTIVATIONS = ("none", "silu", "sigmoid")
# Numbers of one program: as many rows as have so many.
NUMBERS = 4096


@triton.jit
def _activate(gate, ACTIVATION: tl.constexpr):
    """The activation and its derivative."""
    value = 1.0 / (1.0 + tl.exp(-gate))
    slope = value * (1.0 - value)
    if ACTIVATION == 1:
        slope = value + gate * slope
        value = gate * value
    return value, slope


@triton.jit
def _rows(rows, heads, d, ROWS: tl.constexpr, D: tl.constexpr):
    """The rows of this program, their tokens and heads, the columns, and what there is of them."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    column = tl.arange(0, D)
    valid = (row < rows)[:, None] & (column < d)[None, :]
    return row, row // heads, row % heads, column, valid


@triton.jit
def _load(at, token, head, column, valid, stride, d):
    at = at + token[:, None] * stride + head[:, None] * d + column[None, :]
    return tl.load(at, mask=valid, other=0.0).to(tl.float32)


@triton.jit
def _norm(
    x_at,
    gate_at,
    weight_at,
    out_at,
    x_stride,
    gate_stride,
    rows,
    heads,
    d,
    eps,
    scale,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    row, token, head, column, valid = _rows(rows, heads, d, ROWS, D)
    x = _load(x_at, token, head, column, valid, x_stride, d)
    if ACTIVATION:
        activated, _ = _activate(
            _load(gate_at, token, head, column, valid, gate_stride, d), ACTIVATION
        )
    if ACTIVATION and GATE_FIRST:
        x = x * activated
    root = scale * tl.rsqrt(tl.sum(x * x, 1) / d + eps)
    out = x * root[:, None]
    if WEIGHTED:
        out = out * tl.load(weight_at + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
    if ACTIVATION and not GATE_FIRST:
        out = out * activated
    at = out_at + row[:, None] * d + column[None, :]
    tl.store(at, out.to(out_at.dtype.element_ty), mask=valid)


@triton.jit
def _norm_back(
    x_at,
    gate_at,
    weight_at,
    d_out_at,
    d_x_at,
    d_gate_at,
    shares_at,
    x_stride,
    gate_stride,
    rows,
    heads,
    d,
    eps,
    scale,
    ACTIVATION: tl.constexpr,
    GATE_FIRST: tl.constexpr,
    WEIGHTED: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
):
    row, token, head, column, valid = _rows(rows, heads, d, ROWS, D)
    at = row[:, None] * d + column[None, :]
    x = _load(x_at, token, head, column, valid, x_stride, d)
    d_out = tl.load(d_out_at + at, mask=valid, other=0.0).to(tl.float32) * scale
    x_ungated = x
    if ACTIVATION:
        activated, slope = _activate(
            _load(gate_at, token, head, column, valid, gate_stride, d), ACTIVATION
        )
    if ACTIVATION and GATE_FIRST:
        x = x * activated
    root = tl.rsqrt(tl.sum(x * x, 1) / d + eps)[:, None]
    normed = x * root
    # The gradient of the norm's output: before a gate behind it, then before the weight.
    d_normed = d_out
    if ACTIVATION and not GATE_FIRST:
        d_normed = d_out * activated
    if WEIGHTED:
        share = tl.sum(d_normed * normed, 0)
        tl.store(shares_at + tl.program_id(0) * d + column, share, mask=column < d)
        weight = tl.load(weight_at + column, mask=column < d, other=0.0).to(tl.float32)[None, :]
        d_normed = d_normed * weight
        d_out = d_out * weight
    if ACTIVATION and not GATE_FIRST:
        d_gate = d_out * normed * slope
        tl.store(d_gate_at + at, d_gate.to(d_gate_at.dtype.element_ty), mask=valid)
    d_x = root * (d_normed - normed * (tl.sum(d_normed * normed, 1) / d)[:, None])
    if ACTIVATION and GATE_FIRST:
        d_gate = d_x * x_ungated * slope
        tl.store(d_gate_at + at, d_gate.to(d_gate_at.dtype.element_ty), mask=valid)
        d_x = d_x * activated
    tl.store(d_x_at + at, d_x.to(d_x_at.dtype.element_ty), mask=valid)


class _GatedNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, gate: Tensor | None, weight: Tensor | None, options: dict[str, Any]
    ) -> Tensor:
        x, gate = side_by_side(x), None if gate is None else side_by_side(gate)
        out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        _launch(_norm, x, gate, weight, options, out)
        ctx.save_for_backward(x, gate, weight)
        ctx.options = options
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor | None, ...]:
        x, gate, weight = ctx.saved_tensors
        d_x = torch.empty(x.shape, dtype=x.dtype, device=x.device)
        d_gate = None if gate is None else torch.empty_like(d_x, dtype=gate.dtype)
        programs = triton.cdiv(x.shape[0] * x.shape[1], _rows_per_program(x))
        shares = x.new_empty(programs, x.shape[2], dtype=torch.float32)
        filler = d_x if d_gate is None else d_gate
        _launch(_norm_back, x, gate, weight, ctx.options, d_out.contiguous(), d_x, filler, shares)
        d_weight = None if weight is None else shares.sum(0).to(weight.dtype)
        return d_x, d_gate, d_weight, None


def _rows_per_program(x: Tensor) -> int:
    return max(NUMBERS // triton.next_power_of_2(x.shape[2]), 1)


def _launch(
    kernel: Any,
    x: Tensor,
    gate: Tensor | None,
    weight: Tensor | None,
    options: dict[str, Any],
    *results: Tensor,
) -> None:
    tokens, heads, d = x.shape
    rows = _rows_per_program(x)
    kernel[(triton.cdiv(tokens * heads, rows),)](
        x,
        x if gate is None else gate,
        x if weight is None else weight,
        *results,
        x.stride(0),
        0 if gate is None else gate.stride(0),
        tokens * heads,
        heads,
        d,
        options["eps"],
        options["scale"],
        ACTIVATION=ACTIVATIONS.index(options["activation"]),
        GATE_FIRST=options["gate_first"],
        WEIGHTED=weight is not None,
        ROWS=rows,
        D=triton.next_power_of_2(d),
        num_warps=8 if triton.next_power_of_2(d) > NUMBERS else 4,
    )


def norm_with_gate(
    x: Float[Tensor, "n h d"],
    gate: Float[Tensor, "n h d"] | None = None,
    weight: Float[Tensor, " d"] | None = None,
    *,
    eps: float,
    scale: float = 1.0,
    activation: str = "none",
    gate_first: bool = False,
) -> Float[Tensor, "n h d"]:
    """The norm of every row, in the precision of `x`; computed in float32."""
    options = {"eps": eps, "scale": scale, "activation": activation, "gate_first": gate_first}
    return _GatedNorm.apply(x, gate, weight, options)
