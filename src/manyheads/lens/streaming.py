"""Which way the sums of an attention are taken: streamed on CUDA, or by strips of queries."""

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from jaxtyping import Int
from torch import Tensor

from manyheads.lens.meeting import Meeting
from manyheads.lens.rows import Sums, Wanted, sum_rows
from manyheads.parts.masks.render import exact_band
from manyheads.parts.positions.alibi import AlibiBias

__all__ = ["cannot", "stream_rows", "sums_of"]

LARGEST_HEAD = {torch.float32: 128, torch.bfloat16: 256, torch.float16: 256}
# A column of marks takes room beside the products; texts have five classes unless told otherwise.
MOST_MARKS = 64
# Further than any two tokens lie apart, and far from the largest of 32 bits.
EVERYWHERE = 2**29


def sums_of(meeting: Meeting, wanted: Wanted) -> Sums:
    """All sums of one attention, the fastest way that can give them."""
    if cannot(meeting, wanted):
        return sum_rows(meeting, wanted)
    # Triton runs on the current device, whichever the tensors are on.
    with torch.cuda.device_of(meeting.query):
        return stream_rows(meeting, wanted)


def cannot(meeting: Meeting, wanted: Wanted) -> str | None:
    """Why this attention is not streamed; None if it is."""
    request, size = meeting.request, meeting.query.shape[2]
    if meeting.query.device.type != "cuda":
        return f"streaming runs on CUDA and this is {meeting.query.device.type}"
    if find_spec("triton") is None:
        return "triton is not installed"
    if meeting.query.dtype not in LARGEST_HEAD:
        return f"the tensor cores know no {meeting.query.dtype}"
    if exact_band(request.mask) is None:
        return "the mask is not a band around the diagonal"
    if request.bias is not None and not isinstance(request.bias, AlibiBias):
        return f"{type(request.bias).__name__} is looked up for each pair"
    if size > (largest := LARGEST_HEAD[meeting.query.dtype]):
        return f"a head of {size} channels is larger than {largest}"
    if wanted.marks.shape[1] > MOST_MARKS:
        return f"{wanted.marks.shape[1]} marks are more than {MOST_MARKS}"
    if request.scale <= 0:
        return f"scale={request.scale} turns the order of scores around"
    return None


def stream_rows(meeting: Meeting, wanted: Wanted) -> Sums:
    """All sums of one attention in one pass over its keys; needs triton."""
    from manyheads.lens.gathered import Standing, at_offsets, on_repeats
    from manyheads.lens.streamed import Streamed, stream

    request = meeting.request
    queries, keys = request.queries, request.keys
    if queries.longest == 0:
        return Sums.empty(meeting, wanted)
    before, after = _reach(meeting)
    of = Streamed(
        query=_channels_last(meeting.query),
        key=_channels_last(meeting.key),
        query_starts=queries.offsets,
        key_starts=keys.offsets,
        longest=queries.longest,
        reach=(before, after),
        scale=request.scale,
        marks=wanted.marks,
        slopes=request.bias.slopes.float() if isinstance(request.bias, AlibiBias) else None,
        sink=None if request.sink is None else request.sink.float(),
    )
    owner = queries.sequence_of_token
    count = keys.offsets.diff()[owner]
    place = (queries.positions + (count - queries.offsets.diff()[owner])).int()
    standing = Standing(place, keys.offsets[owner], count)
    fields, marks = stream(of)
    level = fields.pop("level")
    gathered = at_offsets(of, standing, level, wanted.offsets)
    repeats = torch.zeros(2, *level.shape, device=level.device)
    if wanted.ids is not None:
        repeats = on_repeats(of, standing, level, *_by_word(wanted.ids, owner))
    low, high = (place - before).clamp(min=0), torch.minimum(place + after + 1, count)
    return Sums(
        visible=(high - low).clamp(min=0).float(),
        first=gathered[..., 0],
        offsets=gathered[..., 1:],
        duplicate=repeats[0],
        induction=repeats[1],
        marks=marks,
        **fields,
    )


def _reach(meeting: Meeting) -> tuple[int, int]:
    band = exact_band(meeting.request.mask)
    assert band is not None
    return int(min(band.before, EVERYWHERE)), int(min(band.after, EVERYWHERE))


def _channels_last(x: Tensor) -> Tensor:
    return x if x.stride(-1) == 1 else x.contiguous()


def _by_word(
    ids: Int[Tensor, " n"], owner: Int[Tensor, " n"]
) -> tuple[Int[Tensor, " n"], Int[Tensor, " n"]]:
    """Tokens sorted by sequence and word, and where in that order each one's word begins."""
    word, order = (owner.long() * 2**32 + ids).sort(stable=True)
    place = torch.arange(len(ids), device=ids.device)
    new = F.pad(word.diff() != 0, (1, 0), value=True)[: len(ids)]
    return order.int(), torch.where(new, place, 0).cummax(0).values.int()
