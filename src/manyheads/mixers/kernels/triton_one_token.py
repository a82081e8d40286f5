"""A Triton kernel for one more token of recurrences with a matrix as state.

The state is read and written once, which is all the time that a step takes. With h a state of key
size times value size, g the log decay, and u what is written under the key:

    h_t = exp(g_t) h_{t-1} + k_t u_t^T        o_t = q_t^T h_t

where u is the value v, or by the delta rule beta_t (v_t - k_t^T exp(g_t) h_{t-1}).

Importing this file needs triton: import it inside a function that runs on CUDA.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# Channels of a value per program.
COLUMNS = 32


@triton.jit
def _one_token(
    q_at,
    k_at,
    v_at,
    g_at,
    beta_at,
    h0_at,
    o_at,
    ht_at,
    heads,
    keys,
    size,
    columns,
    SIZE: tl.constexpr,
    COLUMNS: tl.constexpr,
    DELTA: tl.constexpr,
    DECAY: tl.constexpr,
):
    """Some channels of the values of one head. DECAY is 0 without, 1 by head, 2 by channel."""
    token = (tl.program_id(0) // heads).to(tl.int64)
    head = tl.program_id(0) % heads
    key_head = head // (heads // keys)
    row, column = tl.arange(0, SIZE), tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row, in_column = row < size, column < columns
    inside = in_row[:, None] & in_column[None, :]
    state = ((token * heads + head) * size + row[:, None]) * columns + column[None, :]
    h = tl.load(h0_at + state, mask=inside, other=0.0)
    q = tl.load(q_at + (token * keys + key_head) * size + row, mask=in_row, other=0.0)
    k = tl.load(k_at + (token * keys + key_head) * size + row, mask=in_row, other=0.0)
    q, k = q.to(tl.float32), k.to(tl.float32)
    value = (token * heads + head) * columns + column
    u = tl.load(v_at + value, mask=in_column, other=0.0).to(tl.float32)
    if DECAY == 1:
        h *= tl.exp(tl.load(g_at + token * heads + head).to(tl.float32))
    if DECAY == 2:
        g = tl.load(g_at + (token * heads + head) * size + row, mask=in_row, other=0.0)
        h *= tl.exp(g.to(tl.float32))[:, None]
    if DELTA:
        beta = tl.load(beta_at + token * heads + head).to(tl.float32)
        u = (u - tl.sum(k[:, None] * h, 0)) * beta
    h += k[:, None] * u[None, :]
    tl.store(ht_at + state, h, mask=inside)
    output = tl.sum(q[:, None] * h, 0)
    tl.store(o_at + value, output.to(o_at.dtype.element_ty), mask=in_column)


def one_token(
    q: Float[Tensor, "b g d"],
    k: Float[Tensor, "b g d"],
    v: Float[Tensor, "b h e"],
    decay: Float[Tensor, "b h"] | Float[Tensor, "b h d"] | None,
    beta: Float[Tensor, "b h"] | None,
    state: Float[Tensor, "b h d e"],
) -> tuple[Float[Tensor, "b h e"], Float[Tensor, "b h d e"]]:
    """The outputs and the new states; with `beta` by the delta rule."""
    (batch, heads, columns), (keys, size) = v.shape, q.shape[1:]
    q, k, v, state = (x.contiguous() for x in (q, k, v, state))
    output, new_state = torch.empty_like(v), torch.empty_like(state)
    _one_token[(batch * heads, triton.cdiv(columns, COLUMNS))](
        q,
        k,
        v,
        q if decay is None else decay.contiguous(),
        q if beta is None else beta.contiguous(),
        state,
        output,
        new_state,
        heads,
        keys,
        size,
        columns,
        SIZE=triton.next_power_of_2(size),
        COLUMNS=COLUMNS,
        DELTA=beta is not None,
        DECAY=0 if decay is None else decay.ndim - 1,
        num_warps=4,
    )
    return output, new_state
