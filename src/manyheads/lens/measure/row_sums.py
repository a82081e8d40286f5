"""What the heads' weights add up to, query by query, without keeping a pattern.

A few queries meet all keys they can see, everything that is asked of their weights is summed up at
once, and the weights are let go: memory grows with the tokens, never with their square. One such
pass costs about what one call of the fused kernel costs, where the identities of the design would
need four.
"""

from dataclasses import dataclass, fields
from itertools import pairwise
from typing import Literal

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.measure.score_tiles import FAR, Meeting, Strip

# Queries, times the heads that share a key: enough rows to keep matrix products busy.
ROWS = {"cpu": 128, "cuda": 1024}
# Weights alive at once, where one head of keys alone does not have more.
LARGEST_CHUNK = {"cpu": 2**20, "cuda": 2**26}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Wanted:
    """What to sum up besides: keys at offsets from the query, marked keys, repeated tokens.

    `marks` are columns over the keys. `ids` name the tokens where queries and keys are the same.
    """

    offsets: tuple[int, ...]
    marks: Float[Tensor, "m marks"]
    ids: Int[Tensor, " n"] | None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Sums:
    """One number a query and head; `variance` is that of the place looked at.

    With a learned sink the weights on keys sum to a `mass` below 1; the variance is of the weights
    divided by it.
    """

    visible: Float[Tensor, " n"]
    mass: Float[Tensor, "n h"]
    entropy: Float[Tensor, "n h"]
    squares: Float[Tensor, "n h"]
    largest: Float[Tensor, "n h"]
    distance: Float[Tensor, "n h"]
    variance: Float[Tensor, "n h"]
    first: Float[Tensor, "n h"]
    duplicate: Float[Tensor, "n h"]
    induction: Float[Tensor, "n h"]
    offsets: Float[Tensor, "n h offsets"]
    marks: Float[Tensor, "n h marks"]

    @classmethod
    def empty(cls, meeting: Meeting, wanted: Wanted) -> "Sums":
        queries, heads = meeting.query.shape[:2]
        zeros = torch.zeros(queries, heads, device=meeting.query.device)
        shapes = {"offsets": len(wanted.offsets), "marks": wanted.marks.shape[1]}
        tensors = {field.name: zeros.clone() for field in fields(cls)}
        tensors["visible"] = zeros.new_zeros(queries)
        tensors |= {name: zeros.new_zeros(queries, heads, last) for name, last in shapes.items()}
        return cls(**tensors)


def sum_rows(meeting: Meeting, wanted: Wanted) -> Sums:
    """All sums of one attention, a few queries and heads at a time."""
    sums = Sums.empty(meeting, wanted)
    step = max(1, ROWS[_home(meeting)] // meeting.share)
    for sequence, length in enumerate(meeting.request.queries.each):
        if length == 0 or meeting.request.keys.each[sequence] == 0:
            continue
        keys = meeting.keys_of(sequence)
        for start, stop in pairwise((*range(0, length, step), length)):
            strip = meeting.strip(sequence, range(start, stop))
            if strip.keys:
                _sum_strip(meeting, wanted, strip, keys, sums)
    return sums


def _home(meeting: Meeting) -> Literal["cpu", "cuda"]:
    return "cpu" if meeting.query.device.type == "cpu" else "cuda"


def _sum_strip(
    meeting: Meeting, wanted: Wanted, strip: Strip, keys: Float[Tensor, "g s d"], sums: Sums
) -> None:
    weights_a_head = meeting.share * len(strip.rows) * len(strip.keys)
    groups, step = keys.shape[0], max(1, LARGEST_CHUNK[_home(meeting)] // weights_a_head)
    repeats = None if wanted.ids is None else _repeats(meeting, wanted.ids, strip)
    columns = _columns(meeting, wanted, strip)
    for start, stop in pairwise((*range(0, groups, step), groups)):
        weighed = _weigh(meeting, strip, keys, range(start, stop), columns)
        here = meeting.request.queries.starts[strip.sequence]
        rows = slice(here + strip.rows.start, here + strip.rows.stop)
        heads = slice(start * meeting.share, stop * meeting.share)
        sums.visible[rows] = weighed.visible
        for name, values in _spread(meeting, strip, weighed).items():
            getattr(sums, name)[rows, heads] = values.T
        _gather(meeting, wanted.offsets, strip, weighed, sums, (rows, heads))
        marked = weighed.columns[..., 2:] * weighed.factor[..., None]
        sums.marks[rows, heads] = rearrange(marked, "h t marks -> t h marks")
        if repeats is not None:
            duplicate, induction = _on_repeats(weighed, repeats)
            sums.duplicate[rows, heads], sums.induction[rows, heads] = duplicate.T, induction.T


@dataclass(frozen=True, slots=True, eq=False)
class _Weighed:
    """`powers` are e to the scores below each row's largest; times `factor` they are weights.

    `rest` is what the logarithm of the sum of all powers, the sink's too, lies above the largest.
    `columns` are sums of powers, of powers times places, and over marked keys.
    """

    scores: Float[Tensor, "h t w"]
    powers: Float[Tensor, "h t w"]
    factor: Float[Tensor, "h t"]
    rest: Float[Tensor, "h t"]
    visible: Float[Tensor, " t"]
    columns: Float[Tensor, "h t columns"]


def _weigh(
    meeting: Meeting,
    strip: Strip,
    keys: Float[Tensor, "g s d"],
    heads: range,
    columns: Float[Tensor, "w columns"],
) -> _Weighed:
    scores, visible = meeting.scores(strip, keys, heads)
    largest = scores.amax(-1, keepdim=True).clamp_(min=FAR / 10)
    scores.sub_(largest)
    powers = scores.exp()
    summed = powers @ columns
    total = summed[..., 0]
    rest = total.log()
    if meeting.request.sink is not None:
        share = meeting.share
        sink = meeting.request.sink[heads.start * share : heads.stop * share].float()
        rest = torch.logaddexp(rest, sink[:, None] - largest.squeeze(-1))
    factor = torch.where(total > 0, (-rest).exp(), 0.0)
    return _Weighed(scores, powers, factor, rest, visible, summed)


def _spread(meeting: Meeting, strip: Strip, weighed: _Weighed) -> dict[str, Float[Tensor, "h t"]]:
    """How the weights of each row are spread: over how many keys, and how far away."""
    factor, powers, spare = weighed.factor, weighed.powers, weighed.scores
    total = weighed.columns[..., 0].clamp(min=1e-30)
    mass = factor * total
    surprise = spare.mul_(powers).sum(-1)
    # Places are counted from a key close to the centre, so that far ones lose no digits.
    near = (weighed.columns[..., 1] / total).round()
    key = torch.arange(len(strip.keys), device=powers.device, dtype=torch.float32)
    away = torch.sub(key, near[..., None], out=spare)
    moment = away * powers
    centre = moment.sum(-1) / total
    variance = moment.mul_(away).sum(-1) / total - centre.square()
    row = torch.arange(strip.rows.start, strip.rows.stop, device=powers.device)
    place = row + meeting.shift(strip.sequence)
    back = (place - strip.keys.start - near) - centre
    far = back + 2 * _ahead(meeting, strip, powers, place) / total
    return {
        "mass": mass,
        "entropy": torch.where(factor > 0, weighed.rest * mass, 0.0) - factor * surprise,
        "squares": (factor * torch.linalg.vector_norm(powers, dim=-1)).square(),
        "largest": factor,
        "distance": mass * far,
        "variance": variance.clamp(min=0),
    }


def _ahead(
    meeting: Meeting, strip: Strip, powers: Float[Tensor, "h t w"], place: Int[Tensor, " t"]
) -> Float[Tensor, "h t"]:
    """The distances to later keys, weighed; a causal head has none."""
    if meeting.request.mask.reach.after == 0:
        return torch.zeros(powers.shape[:2], device=powers.device)
    start = max(0, strip.rows.start + meeting.shift(strip.sequence) - strip.keys.start)
    key = strip.keys.start + torch.arange(start, len(strip.keys), device=powers.device)
    distance = (key - place[:, None]).clamp(min=0).float()
    return (powers[..., start:] * distance).sum(-1)


def _gather(
    meeting: Meeting,
    offsets: tuple[int, ...],
    strip: Strip,
    weighed: _Weighed,
    sums: Sums,
    at: tuple[slice, slice],
) -> None:
    """The weight on the first key, and on the key at each offset from the query."""
    if strip.keys.start == 0:
        sums.first[at] = (weighed.powers[..., 0] * weighed.factor).T
    if not offsets:
        return
    device = weighed.powers.device
    row = torch.arange(strip.rows.start, strip.rows.stop, device=device)
    place = (row + meeting.shift(strip.sequence))[:, None] + torch.tensor(offsets, device=device)
    inside = (place >= strip.keys.start) & (place < strip.keys.stop)
    index = (
        (place - strip.keys.start).clamp(0, len(strip.keys) - 1).expand(len(weighed.powers), -1, -1)
    )
    found = weighed.powers.gather(-1, index) * inside * weighed.factor[..., None]
    sums.offsets[at] = rearrange(found, "h t offsets -> t h offsets")


def _columns(meeting: Meeting, wanted: Wanted, strip: Strip) -> Float[Tensor, "w columns"]:
    """What the weights of all rows are multiplied with: ones, places, marks."""
    start = meeting.request.keys.starts[strip.sequence]
    marks = wanted.marks[start + strip.keys.start : start + strip.keys.stop]
    place = torch.arange(len(strip.keys), device=marks.device, dtype=torch.float32)
    return torch.cat((torch.ones_like(place)[:, None], place[:, None], marks), dim=1)


@dataclass(frozen=True, slots=True, eq=False)
class _Repeats:
    """Pairs of a row and an earlier copy of its token, as a place of the strip; -1 before it."""

    rows: Int[Tensor, " pairs"]
    copies: Int[Tensor, " pairs"]


def _repeats(meeting: Meeting, ids: Int[Tensor, " n"], strip: Strip) -> _Repeats:
    start = meeting.request.queries.starts[strip.sequence]
    # The token after a copy may lie in the strip where the copy itself does not.
    before = max(0, strip.keys.start - 1)
    earlier = range(before, min(strip.keys.stop, strip.rows.stop))
    own = ids[start + strip.rows.start : start + strip.rows.stop, None]
    same: Bool[Tensor, "t s"] = own == ids[None, start + earlier.start : start + earlier.stop]
    # Row t may look back at all keys before its own place.
    same = same.tril(strip.rows.start - earlier.start - 1)
    rows, copies = same.nonzero(as_tuple=True)
    return _Repeats(rows, copies + (earlier.start - strip.keys.start))


def _on_repeats(
    weighed: _Weighed, repeats: _Repeats
) -> tuple[Float[Tensor, "h t"], Float[Tensor, "h t"]]:
    """The weight on earlier copies of a query's token, and on the tokens after them."""
    found = []
    for further in (0, 1):
        places = repeats.copies + further
        inside = (places >= 0) & (places < weighed.powers.shape[-1])
        rows, places = repeats.rows[inside], places[inside]
        summed = torch.zeros_like(weighed.factor)
        summed.index_add_(1, rows, weighed.powers[:, rows, places])
        found.append(summed * weighed.factor)
    return found[0], found[1]
