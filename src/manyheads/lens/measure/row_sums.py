"""Sums over the attention weights of each query, without storing a pattern.

The weights of a few queries are computed over all visible keys, every sum is taken at once, and the
weights are discarded: memory is linear in the number of tokens. One pass costs about as much as
one call of the fused kernel. On CUDA a Triton kernel streams over the keys instead.
"""

import math
from concurrent.futures import wait
from dataclasses import dataclass, fields
from importlib.util import find_spec
from itertools import pairwise
from typing import Literal, Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.measure.score_tiles import (
    HIDDEN_SCORE,
    Tile,
    TiledPart,
    TiledScores,
    TiledWeights,
)
from manyheads.parts.masks import exact_band
from manyheads.parts.positions.alibi import AlibiBias

# Queries of a tile: enough rows to keep matrix products busy, few enough that a causal mask hides
# little of it.
ROWS = {"cpu": 128, "cuda": 1024}
# Weights in memory at once, unless a single key head has more.
CHUNK_WEIGHTS = {"cpu": 2**20, "cuda": 2**26}
LOG2_E = math.log2(math.e)
# The share of the weight within the memory of a mixer.
REMEMBERED = 0.9


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowSumSpec:
    """Which weights to sum: keys at offsets from the query, marked keys, repeated tokens.

    `marks` are columns over the keys. `ids` are the tokens where queries and keys are the same.
    Without `spread`, on a CPU, squares, distance and variance stay zero.
    """

    offsets: tuple[int, ...]
    marks: Float[Tensor, "m marks"]
    ids: Int[Tensor, " n"] | None
    spread: bool = True


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class RowSums:
    """One number per query and head; `variance` is that of the attended position.

    With a learned sink the weights on keys sum to a `mass` below 1, and the variance is that of the
    weights divided by it. `score` is the largest score, 0 where a query gives no key any weight.
    `memory`, of causal mixers only, counts the latest tokens that have `REMEMBERED` of the weight.
    """

    visible: Float[Tensor, " n"]
    mass: Float[Tensor, "n h"]
    entropy: Float[Tensor, "n h"]
    squares: Float[Tensor, "n h"]
    largest: Float[Tensor, "n h"]
    score: Float[Tensor, "n h"]
    distance: Float[Tensor, "n h"]
    variance: Float[Tensor, "n h"]
    first: Float[Tensor, "n h"]
    duplicate: Float[Tensor, "n h"]
    induction: Float[Tensor, "n h"]
    offsets: Float[Tensor, "n h offsets"]
    marks: Float[Tensor, "n h marks"]
    memory: Float[Tensor, "n h"] | None = None

    @classmethod
    def empty(cls, tiled: TiledScores, spec: RowSumSpec) -> "RowSums":
        queries, heads = tiled.query.shape[:2]
        zeros = torch.zeros(queries, heads, device=tiled.query.device)
        shapes = {"offsets": len(spec.offsets), "marks": spec.marks.shape[1]}
        tensors = {field.name: zeros.clone() for field in fields(cls)}
        tensors["visible"] = zeros.new_zeros(queries)
        if not (isinstance(tiled, TiledWeights) and tiled.weights.causal):
            del tensors["memory"]
        tensors |= {name: zeros.new_zeros(queries, heads, last) for name, last in shapes.items()}
        return cls(**tensors)


def sum_rows(tiled: TiledScores, spec: RowSumSpec, reader: "TileReader | None" = None) -> RowSums:
    """All sums of one attention, by tiles of a few queries and heads, which `reader` sees too."""
    sums = RowSums.empty(tiled, spec)
    for sequence, length in enumerate(tiled.request.queries.each):
        if length == 0 or tiled.request.keys.each[sequence] == 0:
            continue
        step = _rows_at_once(tiled, tiled.request.keys.each[sequence])
        keys = tiled.keys_of(sequence)
        for start, stop in pairwise((*range(0, length, step), length)):
            tile = tiled.tile(sequence, range(start, stop))
            if tile.keys:
                _sum_tile(tiled, spec, tile, keys, sums, reader)
    return sums


def _rows_at_once(tiled: TiledScores, keys: int) -> int:
    """Fewer where many heads share long keys, but not fewer than rows of all of them."""
    kind, share = _device_kind(tiled), tiled.group_size
    least = max(1, ROWS[kind] // share)
    return max(least, min(ROWS[kind], CHUNK_WEIGHTS[kind] // (share * keys)))


def _device_kind(tiled: TiledScores) -> Literal["cpu", "cuda"]:
    return "cpu" if tiled.query.device.type == "cpu" else "cuda"


def _sum_tile(
    tiled: TiledScores,
    spec: RowSumSpec,
    tile: Tile,
    keys: Float[Tensor, "g s d"],
    sums: RowSums,
    reader: "TileReader | None",
) -> None:
    weights_per_head = tiled.group_size * len(tile.rows) * len(tile.keys)
    groups, step = keys.shape[0], max(1, CHUNK_WEIGHTS[_device_kind(tiled)] // weights_per_head)
    repeats = None if spec.ids is None else _find_repeats(tiled, spec.ids, tile)
    columns = _columns(tiled, spec, tile)
    for start, stop in pairwise((*range(0, groups, step), groups)):
        weights = _tile_weights(tiled, tile, keys, range(start, stop), columns)
        first = tiled.request.queries.starts[tile.sequence]
        rows = slice(first + tile.rows.start, first + tile.rows.stop)
        heads = slice(start * tiled.group_size, stop * tiled.group_size)
        sums.visible[rows] = weights.visible
        if reader is not None:
            reader.see_tile(tile, heads, weights, repeats)
        by_row = _plain_sums(weights)
        if spec.spread:
            by_row |= _spread_sums(tiled, tile, weights, by_row["mass"])
        for name, values in by_row.items():
            getattr(sums, name)[rows, heads] = values.T
        if tile.keys.start == 0:
            sums.first[rows, heads] = (weights.powers[..., 0] * weights.factor).T
        if spec.offsets:
            sums.offsets[rows, heads] = _offset_sums(tiled, spec.offsets, tile, weights)
        marked = weights.columns[..., 2:] * weights.factor[..., None]
        sums.marks[rows, heads] = rearrange(marked, "h t marks -> t h marks")
        if sums.memory is not None:
            sums.memory[rows, heads] = _memory(weights).T
        if repeats is not None:
            for further, summed in enumerate((sums.duplicate, sums.induction)):
                summed[rows, heads] = _repeat_sum(weights, *repeats, further).T


@dataclass(frozen=True, slots=True, eq=False)
class TileWeights:
    """`powers` are exp(score - row maximum); times `factor` they are the weights.

    `rest` is the log-sum-exp of each row, the sink included, minus the row maximum, `largest`.
    `columns` are sums of powers, of powers times positions, and of powers over marked keys.
    """

    scores: Float[Tensor, "h t w"]
    powers: Float[Tensor, "h t w"]
    factor: Float[Tensor, "h t"]
    rest: Float[Tensor, "h t"]
    largest: Float[Tensor, "h t"]
    visible: Float[Tensor, " t"]
    columns: Float[Tensor, "h t columns"]


# Rows of a tile, and for each the column of an earlier copy of its token; -1 before the tile.
Repeats = tuple[Int[Tensor, " pairs"], Int[Tensor, " pairs"]]


@runtime_checkable
class TileReader(Protocol):
    """Sees the weights of every tile on the way; it must not change them."""

    def see_tile(
        self, tile: Tile, heads: slice, weights: TileWeights, repeats: Repeats | None
    ) -> None: ...


def _tile_weights(
    tiled: TiledScores,
    tile: Tile,
    keys: Float[Tensor, "g s d"],
    heads: range,
    columns: Float[Tensor, "w columns"],
) -> TileWeights:
    scores, visible = tiled.scores(tile, keys, heads)
    largest = scores.amax(-1, keepdim=True).clamp_(min=HIDDEN_SCORE / 10)
    scores.sub_(largest)
    # On a CPU, exp takes thirty times as long where the result is zero or nearly so; exp2 does not.
    powers = (scores * LOG2_E).exp2_()
    summed = powers @ columns
    total = summed[..., 0]
    rest = total.log()
    if tiled.request.sink is not None:
        share = tiled.group_size
        sink = tiled.request.sink[heads.start * share : heads.stop * share].float()
        rest = torch.logaddexp(rest, sink[:, None] - largest.squeeze(-1))
    factor = torch.where(total > 0, (-rest).exp(), 0.0)
    return TileWeights(scores, powers, factor, rest, largest.squeeze(-1), visible, summed)


def _plain_sums(weights: TileWeights) -> dict[str, Float[Tensor, "h t"]]:
    """The entropy of each row, its largest weight and score; the scores are overwritten."""
    factor = weights.factor
    mass = factor * weights.columns[..., 0].clamp(min=1e-30)
    surprise = weights.scores.mul_(weights.powers).sum(-1)
    return {
        "mass": mass,
        "entropy": torch.where(factor > 0, weights.rest * mass, 0.0) - factor * surprise,
        "largest": factor,
        "score": weights.largest.masked_fill(factor == 0, 0.0),
    }


def _spread_sums(
    tiled: TiledScores, tile: Tile, weights: TileWeights, mass: Float[Tensor, "h t"]
) -> dict[str, Float[Tensor, "h t"]]:
    """How the weights of each row are spread: over how many keys, and at what distance."""
    factor, powers, spare = weights.factor, weights.powers, weights.scores
    total = weights.columns[..., 0].clamp(min=1e-30)
    # Positions are relative to a key near the center, which avoids cancellation far away.
    near = (weights.columns[..., 1] / total).round()
    key = torch.arange(len(tile.keys), device=powers.device, dtype=torch.float32)
    away = torch.sub(key, near[..., None], out=spare)
    moment = away * powers
    center = moment.sum(-1) / total
    variance = moment.mul_(away).sum(-1) / total - center.square()
    position = tiled.positions(tile)
    far = (position - tile.keys.start - near) - center
    if tiled.request.mask.reach.after:
        # Later keys, which a causal head does not see, count the other way round.
        start = max(0, tile.rows.start + tiled.query_offset(tile.sequence) - tile.keys.start)
        start = min(start, len(tile.keys))
        later = tile.keys.start + torch.arange(start, len(tile.keys), device=powers.device)
        distance = (later - position[:, None]).clamp(min=0).float()
        far = far + 2 * (powers[..., start:] * distance).sum(-1) / total
    return {
        "squares": (factor * torch.linalg.vector_norm(powers, dim=-1)).square(),
        "distance": mass * far,
        "variance": variance.clamp(min=0),
    }


def _offset_sums(
    tiled: TiledScores, offsets: tuple[int, ...], tile: Tile, weights: TileWeights
) -> Float[Tensor, "t h offsets"]:
    """The weight on the key at each offset from the query."""
    away = torch.tensor(offsets, device=weights.powers.device)
    column = tiled.positions(tile)[:, None] + away - tile.keys.start
    inside = (column >= 0) & (column < len(tile.keys))
    index = column.clamp(0, len(tile.keys) - 1).expand(len(weights.powers), -1, -1)
    gathered = weights.powers.gather(-1, index) * inside * weights.factor[..., None]
    return rearrange(gathered, "h t offsets -> t h offsets")


def _memory(weights: TileWeights) -> Float[Tensor, "h t"]:
    """How many of the latest tokens together have `REMEMBERED` of the weight, or more."""
    earlier = weights.powers.cumsum(-1)
    later = weights.powers.shape[-1] - weights.visible
    return (earlier > (1 - REMEMBERED) * earlier[..., -1:]).sum(-1) - later


def _columns(tiled: TiledScores, spec: RowSumSpec, tile: Tile) -> Float[Tensor, "w columns"]:
    """The right-hand side that the weights are multiplied with: ones, positions, marks."""
    start = tiled.request.keys.starts[tile.sequence]
    marks = spec.marks[start + tile.keys.start : start + tile.keys.stop]
    position = torch.arange(len(tile.keys), device=marks.device, dtype=torch.float32)
    return torch.cat((torch.ones_like(position)[:, None], position[:, None], marks), dim=1)


def _find_repeats(tiled: TiledScores, ids: Int[Tensor, " n"], tile: Tile) -> Repeats:
    """Pairs of a row and an earlier copy of its token."""
    text, query, key = tiled.token_rows(tile.sequence)
    # The token after a copy may be in the tile even if the copy itself is not.
    before = max(text - key, tile.keys.start - 1)
    earlier = range(before, max(before, min(tile.keys.stop, tile.rows.stop + query - key)))
    own = ids[query + tile.rows.start : query + tile.rows.stop, None]
    same: Bool[Tensor, "t s"] = own == ids[None, key + earlier.start : key + earlier.stop]
    # Copies lie before the row itself.
    same = same.tril(tile.rows.start + query - key - earlier.start - 1)
    rows, copies = same.nonzero(as_tuple=True)
    return rows, copies + (earlier.start - tile.keys.start)


def _repeat_sum(
    weights: TileWeights, rows: Int[Tensor, " _"], copies: Int[Tensor, " _"], further: int
) -> Float[Tensor, "h t"]:
    """The weight on earlier copies of a query's token, or on the tokens `further` behind them."""
    columns = copies + further
    inside = (columns >= 0) & (columns < weights.powers.shape[-1])
    rows, columns = rows[inside], columns[inside]
    summed = torch.zeros_like(weights.factor)
    return summed.index_add_(1, rows, weights.powers[:, rows, columns]) * weights.factor


MAX_HEAD_SIZE = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
# Of queries and values, where the output is computed in the same pass.
MAX_MIXED_SIZE, MAX_MIXED_MARKS = 128, 12
# Marks take shared memory beside the products; by default texts have five classes.
MAX_MARKS = 64
# Larger than any distance between two tokens, and far from the limit of 32 bits.
UNLIMITED = 2**29


def row_sums(tiled: TiledScores, spec: RowSumSpec) -> RowSums:
    """All sums of one attention: streamed by Triton where it can be, else tile by tile."""
    if cannot(tiled, spec):
        return sum_rows(tiled, spec)
    # Triton runs on the current device, not on that of the tensors.
    with torch.cuda.device_of(tiled.query):
        return stream_rows(tiled, spec)


def cannot_mix(tiled: TiledScores, spec: RowSumSpec, value: Float[Tensor, "m g e"]) -> str | None:
    """Why the pass that sums the weights cannot give the output too; None if it can."""
    if (reason := cannot(tiled, spec)) is not None:
        return reason
    if value.dtype == torch.float32:
        return "it takes several products of tensor cores for each of float32"
    if max(tiled.query.shape[2], value.shape[2]) > MAX_MIXED_SIZE:
        return f"heads of more than {MAX_MIXED_SIZE} channels do not fit"
    if spec.marks.shape[1] > MAX_MIXED_MARKS:
        return f"there are {spec.marks.shape[1]} marks, at most {MAX_MIXED_MARKS} fit"
    if torch.cuda.get_device_capability(value.device) < (9, 0):
        return "older devices have less shared memory, and no copies of blocks"
    return None


def cannot(tiled: TiledScores, spec: RowSumSpec) -> str | None:
    """Why this attention cannot be streamed; None if it can."""
    request, size = tiled.request, tiled.query.shape[2]
    if isinstance(tiled, TiledWeights):
        return "the weights of a mixer are not the softmax of products"
    if isinstance(tiled, TiledPart):
        return "the keys are only a part of the text"
    if tiled.query.device.type != "cuda":
        return f"streaming needs CUDA, got {tiled.query.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if tiled.query.dtype not in MAX_HEAD_SIZE:
        return f"tensor cores do not support {tiled.query.dtype}"
    if exact_band(request.mask) is None:
        return "the mask is not a band around the diagonal"
    if request.bias is not None and not isinstance(request.bias, AlibiBias):
        return f"{type(request.bias).__name__} has a value for each pair"
    if size > (largest := MAX_HEAD_SIZE[tiled.query.dtype]):
        return f"head size {size} is larger than {largest}"
    if spec.marks.shape[1] > MAX_MARKS:
        return f"there are {spec.marks.shape[1]} marks, at most {MAX_MARKS} are supported"
    if request.softcap is not None:
        return "it has no soft cap"
    if request.scale <= 0:
        return f"scale={request.scale} must be positive"
    return None


def stream_rows(tiled: TiledScores, spec: RowSumSpec) -> RowSums:
    """All sums of one attention in one pass over its keys; needs CUDA and Triton."""
    return stream_rows_and_output(tiled, spec, None)[0]


def stream_rows_and_output(
    tiled: TiledScores, spec: RowSumSpec, value: Float[Tensor, "m g e"] | None
) -> tuple[RowSums, Float[Tensor, "n h e"] | None]:
    """All sums, and from the same pass what the heads mix of the values, if they are given."""
    from manyheads.lens.measure import triton_pair_weights as pairs
    from manyheads.lens.measure import triton_row_sums as kernels

    request = tiled.request
    queries, keys = request.queries, request.keys
    if queries.longest == 0:
        output = None if value is None else value.new_zeros(0, tiled.query.shape[1], value.shape[2])
        return RowSums.empty(tiled, spec), output
    band = exact_band(request.mask)
    assert band is not None, "checked by `cannot`"
    before, after = (int(min(side, UNLIMITED)) for side in (band.before, band.after))
    inputs = kernels.StreamInputs(
        query=_channels_last(tiled.query),
        key=_channels_last(tiled.key),
        query_starts=queries.offsets,
        key_starts=keys.offsets,
        key_position=keys.positions,
        longest=queries.longest,
        reach=(before, after),
        scale=request.scale,
        marks=spec.marks,
        value=None if value is None else _channels_last(value),
        slopes=request.bias.slopes.float() if isinstance(request.bias, AlibiBias) else None,
        sink=None if request.sink is None else request.sink.float(),
    )
    owner = queries.sequence_of_token
    count = keys.offsets.diff()[owner]
    position = (queries.positions + (count - queries.offsets.diff()[owner])).int()
    at = pairs.QueryPositions(position, keys.offsets[owner], count)
    others = pairs.compile_in_background(inputs, at)
    streamed = kernels.stream(inputs)
    wait(others)
    fields = dict(streamed.fields)
    level = fields.pop("level")
    gathered = pairs.offset_weights(inputs, at, level, spec.offsets)
    repeats = torch.zeros(2, *level.shape, device=level.device)
    if spec.ids is not None:
        repeats = pairs.repeat_weights(inputs, at, level, *_sort_by_token(spec.ids, owner))
    # The log-sum-exp is to base 2.
    score = (level + fields["largest"].log2()) * math.log(2)
    low, high = (position - before).clamp(min=0), torch.minimum(position + after + 1, count)
    sums = RowSums(
        visible=(high - low).clamp(min=0).float(),
        first=gathered[..., 0],
        offsets=gathered[..., 1:],
        duplicate=repeats[0],
        induction=repeats[1],
        marks=streamed.marks,
        score=score.masked_fill(fields["largest"] == 0, 0.0),
        **fields,
    )
    return sums, streamed.output


def _channels_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _sort_by_token(
    ids: Int[Tensor, " n"], owner: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Token positions sorted by sequence and id, and for each the start of its run of equal ids."""
    key, order = (owner.long() * 2**32 + ids).sort(stable=True)
    rank = torch.arange(len(ids), device=ids.device)
    new = F.pad(key.diff() != 0, (1, 0), value=True)[: len(ids)]
    return order.int(), torch.where(new, rank, 0).cummax(0).values.int()
