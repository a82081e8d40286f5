"""Triton kernels of the delta rule: the walk of the state over chunks.

Importing this file needs triton: import it inside a function that runs on CUDA.

With the letters of the WY form (arXiv 2406.06484, 2412.06464) and of fla, for each chunk:

    v_new = u - w h        h <- exp(g_chunk) h + k_decayed^T v_new

`h` is the state before a chunk, `h0` before and `ht` after a sequence. `u` is what the tokens write
if `h` is zero, `w` how `h` corrects that, `k_decayed` the keys times the decay up to the end of the
chunk, `g_chunk` the log decay of the chunk, and `d_x` the gradient of `x`. The loop over tokens is
`naive_delta_rule`; what a chunk needs is computed by `triton_delta_chunks`.

The columns of the state never meet, so a program carries some of them for one head through a whole
sequence. Few long sequences would leave most of a GPU idle; their chunks are walked over in
segments. All chunks of a segment together change the state as

    h <- transition h + written

`written` is where a walk from a zero state ends, `transition` where it ends from the unit matrix if
nothing is written. Both are computed for all segments at once, then the states before the segments
one after another, then those before the chunks in all segments at once. No product is ever
transposed: Triton 3.4 to 3.7 gets that wrong on Hopper.
"""

from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.mixers.kernels.triton_delta_tiles import load_tile, store_tile, tile_side
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths

# Columns of the state that one program carries.
COLUMNS = 64
# Chunks of a segment, and the programs from which on all sequences are walked over whole.
SEGMENT = 32
PROGRAMS = 256


@triton.jit
def _walk(
    u_at,
    w_at,
    k_decayed_at,
    g_chunk_at,
    h0_at,
    starts_at,
    ends_at,
    h_at,
    v_new_at,
    ht_at,
    heads,
    size,
    d,
    e,
    segment,
    channels,
    SUMMARY: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(starts_at + group).to(tl.int64)
    count = tl.minimum(tl.load(ends_at + group) - start, segment).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_chunk, exists, own = token < size, channel < d, group * heads + head
    column = tl.program_id(2) * E + tl.arange(0, E)
    if SUMMARY:
        # The columns of the transition, then those of what is written.
        columns, value = d + e, column - d
        h = tl.where(channel[:, None] == column[None, :], 1.0, tl.zeros([D, E], dtype=tl.float32))
    else:
        columns, value = e, column
        h = load_tile(h0_at + own * d * e, channel, column, e, 1, exists, column < e)
    in_value = (value >= 0) & (value < e)
    for index in range(count):
        of_head = (start + index) * heads + head
        key_start, value_start = of_head * size * d, of_head * size * e
        w = load_tile(w_at + key_start, token, channel, d, 1, in_chunk, exists)
        k_decayed = load_tile(k_decayed_at + key_start, channel, token, 1, d, exists, in_chunk)
        u = load_tile(u_at + value_start, token, value, e, 1, in_chunk, in_value)
        g_chunk = tl.load(g_chunk_at + of_head * channels + channel % channels)
        v_new = u - tl.dot(w, h, input_precision=PRECISION)
        if not SUMMARY:
            store_tile(h_at + of_head * d * e, h, channel, column, e, exists, in_value)
            store_tile(v_new_at + value_start, v_new, token, column, e, in_chunk, in_value)
        kv = tl.dot(k_decayed, v_new, input_precision=PRECISION)
        h = h * tl.exp(g_chunk)[:, None] + kv
    store_tile(ht_at + own * d * columns, h, channel, column, columns, exists, column < columns)


@triton.jit
def _walk_back(
    d_h_at,
    d_v_new_at,
    d_ht_at,
    w_at,
    k_decayed_at,
    g_chunk_at,
    starts_at,
    ends_at,
    d_h_after_at,
    d_u_at,
    d_h0_at,
    heads,
    size,
    d,
    e,
    segment,
    channels,
    SUMMARY: tl.constexpr,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    group, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(starts_at + group).to(tl.int64)
    count = tl.minimum(tl.load(ends_at + group) - start, segment).to(tl.int32)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    column = tl.program_id(2) * E + tl.arange(0, E)
    in_chunk, exists, below = token < size, channel < d, column < e
    own = (group * heads + head) * d * e
    d_state = tl.zeros([D, E], dtype=tl.float32)
    if not SUMMARY:
        d_state = load_tile(d_ht_at + own, channel, column, e, 1, exists, below)
    for index in range(count):
        of_head = (start + count - 1 - index) * heads + head
        key_start, value_start = of_head * size * d, of_head * size * e
        w = load_tile(w_at + key_start, channel, token, 1, d, exists, in_chunk)
        k_decayed = load_tile(k_decayed_at + key_start, token, channel, d, 1, in_chunk, exists)
        d_v_new = load_tile(d_v_new_at + value_start, token, column, e, 1, in_chunk, below)
        d_h = load_tile(d_h_at + of_head * d * e, channel, column, e, 1, exists, below)
        g_chunk = tl.load(g_chunk_at + of_head * channels + channel % channels)
        d_u = d_v_new + tl.dot(k_decayed, d_state, input_precision=PRECISION)
        if not SUMMARY:
            store_tile(d_h_after_at + of_head * d * e, d_state, channel, column, e, exists, below)
            store_tile(d_u_at + value_start, d_u, token, column, e, in_chunk, below)
        d_read = tl.dot(w, d_u, input_precision=PRECISION)
        d_state = d_state * tl.exp(g_chunk)[:, None] + d_h - d_read
    store_tile(d_h0_at + own, d_state, channel, column, e, exists, below)


@triton.jit
def _chunks_back(
    h_at,
    d_h_after_at,
    d_u_at,
    v_new_at,
    g_chunk_at,
    d_w_at,
    d_k_decayed_at,
    d_g_chunk_at,
    heads,
    size,
    d,
    e,
    channels,
    SIZE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The gradients of what a chunk brings to the walk, for all chunks at once."""
    of_head = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    token, channel = tl.arange(0, SIZE), tl.arange(0, D)
    in_chunk, exists = token < size, channel < d
    keys, values, states = of_head * size * d, of_head * size * e, of_head * d * e
    d_w = tl.zeros([SIZE, D], dtype=tl.float32)
    d_k_decayed = tl.zeros([SIZE, D], dtype=tl.float32)
    d_g_chunk = tl.zeros([D], dtype=tl.float32)
    for begin in range(0, e, E):
        column = begin + tl.arange(0, E)
        below = column < e
        h = load_tile(h_at + states, column, channel, 1, e, below, exists)
        d_h_after = load_tile(d_h_after_at + states, column, channel, 1, e, below, exists)
        d_u = load_tile(d_u_at + values, token, column, e, 1, in_chunk, below)
        v_new = load_tile(v_new_at + values, token, column, e, 1, in_chunk, below)
        d_w -= tl.dot(d_u, h, input_precision=PRECISION)
        d_k_decayed += tl.dot(v_new, d_h_after, input_precision=PRECISION)
        d_g_chunk += tl.sum(d_h_after * h, 0)
    store_tile(d_w_at + keys, d_w, token, channel, d, in_chunk, exists)
    store_tile(d_k_decayed_at + keys, d_k_decayed, token, channel, d, in_chunk, exists)
    g_at = of_head * channels + channel % channels
    d_g_chunk *= tl.exp(tl.load(g_chunk_at + g_at))
    if channels == 1:
        tl.store(d_g_chunk_at + of_head, tl.sum(d_g_chunk, 0))
    else:
        tl.store(d_g_chunk_at + g_at, d_g_chunk, mask=exists)


@triton.jit
def _join(
    transition_at,
    written_at,
    h0_at,
    offsets_at,
    h_at,
    ht_at,
    transition_stride,
    written_stride,
    heads,
    d,
    e,
    REVERSE: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """The state before each segment of a sequence; for gradients that after it, from the end."""
    sequence, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    start = tl.load(offsets_at + sequence).to(tl.int64)
    count = (tl.load(offsets_at + sequence + 1) - start).to(tl.int32)
    channel, column = tl.arange(0, D), tl.program_id(2) * E + tl.arange(0, E)
    exists, in_value = channel < d, column < e
    own = (sequence * heads + head) * d * e
    h = load_tile(h0_at + own, channel, column, e, 1, exists, in_value)
    for index in range(count):
        place = start + index
        if REVERSE:
            place = start + count - 1 - index
        of_head = place * heads + head
        at = transition_at + of_head * d * transition_stride
        if REVERSE:
            transition = load_tile(at, channel, channel, 1, transition_stride, exists, exists)
        else:
            transition = load_tile(at, channel, channel, transition_stride, 1, exists, exists)
        at = written_at + of_head * d * written_stride
        written = load_tile(at, channel, column, written_stride, 1, exists, in_value)
        store_tile(h_at + of_head * d * e, h, channel, column, e, exists, in_value)
        h = tl.dot(transition, h, input_precision=PRECISION) + written
    store_tile(ht_at + own, h, channel, column, e, exists, in_value)


class _Walk(torch.autograd.Function):
    """The state before each chunk, what each chunk writes, and the state after each sequence.

    These are `h`, `v_new` and `ht`; `counts` is the number of chunks of each sequence.
    """

    @staticmethod
    def forward(
        ctx: Any,
        u: Tensor,
        w: Tensor,
        k_decayed: Tensor,
        g_chunk: Tensor,
        h0: Tensor,
        counts: Lengths,
        precision: str,
    ) -> tuple[Tensor, Tensor, Tensor]:
        u, w, k_decayed, g_chunk, h0 = (x.contiguous() for x in (u, w, k_decayed, g_chunk, h0))
        d, e = h0.shape[2:]
        route = _Route(counts, heads=h0.shape[1], size=w.shape[2], d=d, e=e, precision=precision)
        h, v_new, ht = (
            h0.new_empty(len(u), *h0.shape[1:]),
            torch.empty_like(u),
            torch.empty_like(h0),
        )
        inputs, transition = (u, w, k_decayed, g_chunk), h0
        if route.segments is None:
            route.walk(_walk, (*inputs, h0, *route.ends, h, v_new, ht), g_chunk)
        else:
            before = h0.new_empty(route.segments.counts.total, *h0.shape[1:])
            summary = before.new_empty(*before.shape[:3], d + e)
            places = (*inputs, before, *route.ends)
            route.walk(_walk, (*places, h, v_new, summary), g_chunk, summary=d + e)
            transition, written = summary.split([d, e], dim=3)
            route.join(transition, written, h0, before, ht)
            route.walk(_walk, (*places, h, v_new, torch.empty_like(before)), g_chunk)
        ctx.save_for_backward(w, k_decayed, g_chunk, h, v_new, transition)
        ctx.route = route
        return h, v_new, ht

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_h: Tensor, d_v_new: Tensor, d_ht: Tensor) -> tuple[Tensor | None, ...]:
        w, k_decayed, g_chunk, h, v_new, transition = ctx.saved_tensors
        d_h, d_v_new, d_ht = (tensor.contiguous() for tensor in (d_h, d_v_new, d_ht))
        d_h_after, d_u, d_h0 = (torch.empty_like(tensor) for tensor in (d_h, d_v_new, d_ht))
        route, inputs = ctx.route, (w, k_decayed, g_chunk, *ctx.route.ends, d_h_after, d_u)
        if route.segments is None:
            route.walk(_walk_back, (d_h, d_v_new, d_ht, *inputs, d_h0), g_chunk)
        else:
            after = d_ht.new_empty(route.segments.counts.total, *d_ht.shape[1:])
            written = torch.empty_like(after)
            tensors = (d_h, d_v_new, after, *inputs, written)
            route.walk(_walk_back, tensors, g_chunk, summary=d_ht.shape[3])
            route.join(transition, written, d_ht, after, d_h0, reverse=True)
            route.walk(_walk_back, tensors, g_chunk)
        gradients = tuple(torch.empty_like(tensor) for tensor in (w, k_decayed, g_chunk))
        route.differentiate((h, d_h_after, d_u, v_new, g_chunk, *gradients))
        return d_u, *gradients, d_h0, None, None


class _Route:
    """Which programs walk over which chunks: one for each sequence, or one for each segment."""

    def __init__(
        self, counts: Lengths, *, heads: int, size: int, d: int, e: int, precision: str
    ) -> None:
        self.counts, self.segments = counts, None
        self.sizes = (heads, size, d, e)
        self.wide = max(d, size) > 64
        # So many columns of a state, and the products of the tokens, fit into registers.
        columns = COLUMNS // 2 if self.wide or precision == "tf32x3" else COLUMNS
        self.tiles = {"D": tile_side(d), "E": min(columns, tile_side(e)), "PRECISION": precision}
        self.ends = counts.offsets[:-1], counts.offsets[1:]
        programs = counts.count * heads * triton.cdiv(e, self.tiles["E"])
        if counts.longest > 2 * SEGMENT and programs < PROGRAMS:
            self.segments = ChunkLayout.of(counts, SEGMENT)
            self.ends = self.segments.starts, self.segments.ends

    def walk(
        self, kernel: Any, tensors: tuple[Tensor, ...], g_chunk: Tensor, *, summary: int = 0
    ) -> None:
        """Run a walk for every head and block of columns; of a `summary` there are so many."""
        heads, size, d, e = self.sizes
        limit = self.counts.longest if self.segments is None else SEGMENT
        channels = 1 if g_chunk.ndim == 2 else d
        kernel[(len(self.ends[0]), heads, triton.cdiv(summary or e, self.tiles["E"]))](
            *tensors,
            *(heads, size, d, e, limit, channels),
            SUMMARY=summary > 0,
            SIZE=tile_side(size),
            **self.tiles,
            num_warps=8 if self.wide else 4,
            # The next chunk is loaded during the products of this one, where there is room for it.
            num_stages=1 if self.wide else 2,
        )

    def join(
        self,
        transition: Tensor,
        written: Tensor,
        h0: Tensor,
        h: Tensor,
        ht: Tensor,
        *,
        reverse: bool = False,
    ) -> None:
        """The states before all segments, one after another."""
        heads, _, d, e = self.sizes
        assert self.segments is not None
        # One program after another: the fewer columns, the less each has to wait for.
        tiles = {**self.tiles, "E": 16}
        _join[(self.counts.count, heads, triton.cdiv(e, 16))](
            *(transition, written, h0, self.segments.counts.offsets, h, ht),
            *(transition.stride(2), written.stride(2), heads, d, e),
            REVERSE=reverse,
            **tiles,
            num_warps=4,
            num_stages=1 if self.wide else 2,
        )

    def differentiate(self, tensors: tuple[Tensor, ...]) -> None:
        """Compute the gradients of what each chunk brings to the walk."""
        heads, size, d, e = self.sizes
        h, g_chunk = tensors[0], tensors[4]
        _chunks_back[(len(h), heads)](
            *tensors,
            *(heads, size, d, e, 1 if g_chunk.ndim == 2 else d),
            SIZE=tile_side(size),
            **self.tiles,
            num_warps=8 if self.wide else 4,
            num_stages=1,
        )


walk_over_chunks: Callable[..., tuple[Tensor, Tensor, Tensor]] = _Walk.apply
