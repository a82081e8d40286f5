"""Triton kernels for experts that few tokens visit, as in a step of generation.

Each visit, of one token to one expert, is computed on its own, and nothing has to be sorted:

    route      the experts of each token and their weights
    expand     h = act(x W) * (x V), by visit
    contract   y = weight * (h U), by visit
    add        the sum of y over the visits of a token

The matrices of an expert are read once per visit, which takes the time as long as most visits are
to different experts.

Importing this file needs triton: import it inside a function that runs on CUDA.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

# Channels and columns of a matrix that a program reads at once: enough to hide how long that takes.
ROWS, COLUMNS = 256, 16
# Columns of a program that adds.
ADDED = 512


@triton.jit
def _route(
    logits_at,
    weights_at,
    chosen_at,
    experts,
    top_k,
    EXPERTS: tl.constexpr,
    SLOTS: tl.constexpr,
    RENORMALIZE: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    expert, slot = tl.arange(0, EXPERTS), tl.arange(0, SLOTS)
    present = expert < experts
    logit = tl.load(logits_at + token * experts + expert, mask=present, other=float("-inf"))
    logit = logit.to(tl.float32)
    share = tl.exp(logit - tl.max(logit, 0))
    share = share / tl.sum(share, 0)
    weights, chosen = tl.zeros((SLOTS,), tl.float32), tl.zeros((SLOTS,), tl.int32)
    left = tl.where(present, share, -1.0)
    for number in range(top_k):
        best = tl.max(left, 0)
        # Among logits that are no numbers there is no largest, but the next kernel reads a matrix.
        place = tl.minimum(tl.min(tl.where(left == best, expert, EXPERTS), 0), experts - 1)
        weights = tl.where(slot == number, best, weights)
        chosen = tl.where(slot == number, place, chosen)
        left = tl.where(expert == place, -1.0, left)
    if RENORMALIZE:
        weights = weights / tl.sum(weights, 0)
    tl.store(weights_at + token * top_k + slot, weights, mask=slot < top_k)
    tl.store(chosen_at + token * top_k + slot, chosen, mask=slot < top_k)


@triton.jit
def _expand(
    x_at,
    matrices_at,
    biases_at,
    chosen_at,
    h_at,
    width,
    hidden,
    top_k,
    alpha,
    limit,
    CLAMPED: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    visit = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen_at + visit).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < hidden
    x_at += visit // top_k * width
    matrices_at += expert * width * (2 * hidden)
    gates = tl.zeros((ROWS, COLUMNS), tl.float32)
    values = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, width, ROWS):
        row = start + tl.arange(0, ROWS)
        x = tl.load(x_at + row, mask=row < width, other=0.0).to(tl.float32)[:, None]
        mask = (row < width)[:, None] & in_columns[None, :]
        at = matrices_at + row[:, None] * (2 * hidden) + column[None, :]
        gates += x * tl.load(at, mask=mask, other=0.0).to(tl.float32)
        values += x * tl.load(at + hidden, mask=mask, other=0.0).to(tl.float32)
    gate, value = tl.sum(gates, 0), tl.sum(values, 0)
    if BIASED:
        at = biases_at + expert * (2 * hidden) + column
        gate += tl.load(at, mask=in_columns, other=0.0).to(tl.float32)
        value += tl.load(at + hidden, mask=in_columns, other=0.0).to(tl.float32)
    if CLAMPED:
        gate = tl.minimum(gate, limit)
        value = 1.0 + tl.minimum(tl.maximum(value, -limit), limit)
    h = gate * tl.sigmoid(alpha * gate) * value
    h_at += visit * hidden + column
    tl.store(h_at, h.to(h_at.dtype.element_ty), mask=in_columns)


@triton.jit
def _contract(
    h_at,
    matrices_at,
    biases_at,
    chosen_at,
    weights_at,
    y_at,
    width,
    hidden,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    visit = tl.program_id(0).to(tl.int64)
    expert = tl.load(chosen_at + visit).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < width
    h_at += visit * hidden
    matrices_at += expert * hidden * width
    products = tl.zeros((ROWS, COLUMNS), tl.float32)
    for start in range(0, hidden, ROWS):
        row = start + tl.arange(0, ROWS)
        x = tl.load(h_at + row, mask=row < hidden, other=0.0).to(tl.float32)[:, None]
        mask = (row < hidden)[:, None] & in_columns[None, :]
        at = matrices_at + row[:, None] * width + column[None, :]
        products += x * tl.load(at, mask=mask, other=0.0).to(tl.float32)
    y = tl.sum(products, 0)
    if BIASED:
        at = biases_at + expert * width + column
        y += tl.load(at, mask=in_columns, other=0.0).to(tl.float32)
    y *= tl.load(weights_at + visit)
    tl.store(y_at + visit * width + column, y, mask=in_columns)


@triton.jit
def _add_visits(y_at, out_at, width, top_k, COLUMNS: tl.constexpr):
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_columns = column < width
    total = tl.zeros((COLUMNS,), tl.float32)
    for number in range(top_k):
        at = y_at + (token * top_k + number) * width + column
        total += tl.load(at, mask=in_columns, other=0.0)
    out_at += token * width + column
    tl.store(out_at, total.to(out_at.dtype.element_ty), mask=in_columns)


def route(
    logits: Float[Tensor, "n e"], top_k: int, renormalize: bool
) -> tuple[Float[Tensor, "n k"], Int[Tensor, "n k"]]:
    """The largest probabilities of each token, and the experts that have them."""
    tokens, experts = logits.shape
    logits = logits.contiguous()
    weights = torch.empty(tokens, top_k, dtype=torch.float32, device=logits.device)
    chosen = torch.empty(tokens, top_k, dtype=torch.int32, device=logits.device)
    _route[(tokens,)](
        logits,
        weights,
        chosen,
        experts,
        top_k,
        EXPERTS=triton.next_power_of_2(experts),
        SLOTS=triton.next_power_of_2(top_k),
        RENORMALIZE=renormalize,
        num_warps=1 if experts <= 256 else 4,
    )
    return weights, chosen


def visit_experts(
    x: Float[Tensor, "n c"],
    weights: Float[Tensor, "n k"],
    chosen: Int[Tensor, "n k"],
    expand: tuple[Float[Tensor, "e c two_f"], Float[Tensor, "e two_f"] | None],
    contract: tuple[Float[Tensor, "e f c"], Float[Tensor, "e c"] | None],
    clamped: tuple[float, float] | None,
) -> Float[Tensor, "n c"]:
    """The weighted sum of the experts of each token, whose matrices come with their biases.

    The gates are SiLU, or `clamped` by a limit and with a steepness: (steepness, limit).
    """
    x = x.contiguous()
    (tokens, width), top_k, hidden = x.shape, chosen.shape[1], contract[0].shape[1]
    h = x.new_empty(tokens * top_k, hidden)
    y = torch.empty(tokens * top_k, width, dtype=torch.float32, device=x.device)
    output = torch.empty_like(x)
    alpha, limit = (1.0, 0.0) if clamped is None else clamped
    shape = {"ROWS": ROWS, "COLUMNS": COLUMNS, "num_warps": 4}
    _expand[(tokens * top_k, triton.cdiv(hidden, COLUMNS))](
        x,
        expand[0].contiguous(),
        x if expand[1] is None else expand[1],
        chosen,
        h,
        width,
        hidden,
        top_k,
        alpha,
        limit,
        CLAMPED=clamped is not None,
        BIASED=expand[1] is not None,
        **shape,
    )
    _contract[(tokens * top_k, triton.cdiv(width, COLUMNS))](
        h,
        contract[0].contiguous(),
        x if contract[1] is None else contract[1],
        chosen,
        weights,
        y,
        width,
        hidden,
        BIASED=contract[1] is not None,
        **shape,
    )
    _add_visits[(tokens, triton.cdiv(width, ADDED))](y, output, width, top_k, COLUMNS=ADDED)
    return output
