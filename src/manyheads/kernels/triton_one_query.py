"""Triton kernels for one query per sequence over a cache: soft caps, sinks, windows, shared keys.

Importing this file needs triton: import it inside a function that runs on CUDA.

A program computes all query heads that share a key head of one sequence, and reads its keys once.
Where such programs are few and the cache is long, several share its keys, and their parts are
merged by the largest score and the sum of the weights of each.
"""

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.devices import triton_precision

# Numbers of the keys of a block, and the fewest keys that are worth a program.
NUMBERS, FEWEST_KEYS = 8192, 256
# As many programs as a large device computes at once, the most that share a cache, and how many are
# few, which have to be quick.
PROGRAMS, MOST_PARTS, FEW_PROGRAMS = 256, 64, 64


@triton.jit
def _one_query(
    q_at,
    k_at,
    v_at,
    filled_at,
    sink_at,
    out_at,
    highest_at,
    total_at,
    capacity,
    rows,
    heads,
    kv_heads,
    q_row,
    q_head,
    k_row,
    k_head,
    v_row,
    v_head,
    reach,
    span,
    scale,
    cap,
    SIZE: tl.constexpr,
    SHARED: tl.constexpr,
    PADDED: tl.constexpr,
    KEYS: tl.constexpr,
    CAPPED: tl.constexpr,
    SINK: tl.constexpr,
    SINGLE: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """`span` of the last `reach` slots of a cache; SINGLE if there is one part alone."""
    sequence = (tl.program_id(0) // kv_heads).to(tl.int64)
    group, part = tl.program_id(0) % kv_heads, tl.program_id(1)
    member, channel = tl.arange(0, PADDED), tl.arange(0, SIZE)
    head = group * SHARED + tl.minimum(member, SHARED - 1)
    filled = tl.load(filled_at + sequence).to(tl.int32)
    q = tl.load(q_at + sequence * q_row + head[:, None] * q_head + channel[None, :])
    highest = tl.full((PADDED,), float("-inf"), tl.float32)
    total = tl.zeros((PADDED,), tl.float32)
    output = tl.zeros((PADDED, SIZE), tl.float32)
    k_at += sequence * capacity * k_row + group * k_head
    v_at += sequence * capacity * v_row + group * v_head
    start = tl.maximum(filled - reach, 0) + part * span
    end = tl.minimum(start + span, filled)
    for block in range(start, end, KEYS):
        slot = block + tl.arange(0, KEYS)
        visible = slot < end
        keys = k_at + slot[:, None].to(tl.int64) * k_row + channel[None, :]
        keys = tl.load(keys, mask=visible[:, None], other=0.0)
        values = v_at + slot[:, None].to(tl.int64) * v_row + channel[None, :]
        values = tl.load(values, mask=visible[:, None], other=0.0)
        scores = tl.dot(q, tl.trans(keys), input_precision=PRECISION) * scale
        if CAPPED:
            scores = cap * (2.0 * tl.sigmoid(2.0 * scores / cap) - 1.0)
        scores = tl.where(visible[None, :], scores, float("-inf"))
        new_highest = tl.maximum(highest, tl.max(scores, 1))
        weights = tl.exp(scores - new_highest[:, None])
        rescale = tl.exp(highest - new_highest)
        total = total * rescale + tl.sum(weights, 1)
        output = output * rescale[:, None]
        output = tl.dot(weights.to(values.dtype), values, output, input_precision=PRECISION)
        highest = new_highest
    if SINK:
        # A key without a value, which the first part has. In the loop a high one would leave
        # weights too small for half precision.
        sink = tl.load(sink_at + head).to(tl.float32)
        new_highest = tl.maximum(highest, tl.where(part == 0, sink, float("-inf")))
        level = tl.where(new_highest == float("-inf"), 0.0, new_highest)
        rescale = tl.exp(highest - level)
        total = total * rescale + tl.where(part == 0, tl.exp(sink - level), 0.0)
        output = output * rescale[:, None]
        highest = new_highest
    if SINGLE:
        # A sequence without keys gives zeros.
        output = output / tl.where(total > 0.0, total, 1.0)[:, None]
        highest += tl.log(total)
    at = part.to(tl.int64) * rows + sequence * heads + head
    mask = member < SHARED
    out_at += at[:, None] * SIZE + channel[None, :]
    tl.store(out_at, output.to(out_at.dtype.element_ty), mask=mask[:, None])
    tl.store(highest_at + at, highest, mask=mask)
    if not SINGLE:
        tl.store(total_at + at, total, mask=mask)


@triton.jit
def _merge(
    parts_at,
    highest_at,
    total_at,
    out_at,
    lse_at,
    parts,
    rows,
    PARTS: tl.constexpr,
    SIZE: tl.constexpr,
):
    row, channel = tl.program_id(0).to(tl.int64), tl.arange(0, SIZE)
    part = tl.arange(0, PARTS).to(tl.int64)
    mask = part < parts
    highest = tl.load(highest_at + part * rows + row, mask=mask, other=float("-inf"))
    total = tl.load(total_at + part * rows + row, mask=mask, other=0.0)
    top = tl.max(highest, 0)
    weight = tl.where(highest == float("-inf"), 0.0, tl.exp(highest - top))
    at = parts_at + (part * rows + row)[:, None] * SIZE + channel[None, :]
    output = tl.sum(tl.load(at, mask=mask[:, None], other=0.0) * weight[:, None], 0)
    total = tl.sum(total * weight, 0)
    output = output / tl.where(total > 0.0, total, 1.0)
    tl.store(out_at + row * SIZE + channel, output.to(out_at.dtype.element_ty))
    tl.store(lse_at + row, top + tl.log(total))


def one_query(
    q: Float[Tensor, "b h d"],
    k: Float[Tensor, "m g d"],
    v: Float[Tensor, "m g d"],
    filled: Int[Tensor, " b"],
    *,
    reach: int,
    scale: float,
    softcap: float | None,
    sink: Float[Tensor, " h"] | None,
) -> tuple[Float[Tensor, "b h d"], Float[Tensor, "b h"]]:
    """The outputs, and the log-sum-exp with the sink; a query sees the last `reach` keys.

    The keys of a sequence are in m / b rows, of which the first `filled` are there.
    """
    (batch, heads, size), kv_heads = q.shape, k.shape[1]
    q, k, v = (x if x.stride(2) == 1 else x.contiguous() for x in (q, k, v))
    output = torch.empty(batch, heads, size, dtype=q.dtype, device=q.device)
    lse = torch.empty(batch, heads, dtype=torch.float32, device=q.device)
    if batch == 0:
        return output, lse
    rows, capacity, shared = batch * heads, len(k) // batch, heads // kv_heads
    reach, programs = max(1, min(reach, capacity)), batch * kv_heads
    span = _span(reach, programs)
    parts = triton.cdiv(reach, span)
    out, highest, total = output, lse, lse
    if parts > 1:
        out = lse.new_empty(parts, batch, heads, size)
        highest, total = lse.new_empty(2, parts, batch, heads)
    _one_query[(programs, parts)](
        q,
        k,
        v,
        filled,
        q if sink is None else sink,
        out,
        highest,
        total,
        capacity,
        rows,
        heads,
        kv_heads,
        *(*q.stride()[:2], *k.stride()[:2], *v.stride()[:2]),
        reach,
        span,
        scale,
        1.0 if softcap is None else softcap,
        SIZE=size,
        SHARED=shared,
        PADDED=max(16, triton.next_power_of_2(shared)),
        KEYS=min(128, NUMBERS // size),
        CAPPED=softcap is not None,
        SINK=sink is not None,
        SINGLE=parts == 1,
        PRECISION=triton_precision(q),
        num_warps=8 if programs * parts <= FEW_PROGRAMS else 4,
        num_stages=2,
    )
    if parts > 1:
        _merge[(rows,)](
            out,
            highest,
            total,
            output,
            lse,
            parts,
            rows,
            PARTS=triton.next_power_of_2(parts),
            SIZE=size,
            num_warps=8 if size > 64 else 4,
        )
    return output, lse


def _span(reach: int, programs: int) -> int:
    """Keys per program: all within reach where there are enough sequences and key heads."""
    most = min(MOST_PARTS, max(1, PROGRAMS // programs))
    parts = min(triton.cdiv(reach, FEWEST_KEYS), most)
    return triton.cdiv(reach, parts)
