"""The watcher behind the statistics: it measures each attention as the forward comes past it."""

from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.attention import Attention
from manyheads.lens.measure.measures import CLOSED, Counted, Scope, Tally, repeated, tally_heads
from manyheads.lens.measure.row_sums import Sums, Wanted, sum_rows
from manyheads.lens.measure.score_tiles import Meeting, meet
from manyheads.lens.results.addresses import Block, attention_at
from manyheads.models.stack import Stack
from manyheads.parts.gates import GATE_TAPS
from manyheads.parts.masks import exact_band
from manyheads.parts.positions.alibi import AlibiBias
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

# The whole numbers that order the floats of a size, where none is negative.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def peak_of(value: Ragged, ids: Ragged | None) -> Float[Tensor, "6"]:
    """Largest value, median of its text, sequence, position, channel and token, -1 for none.

    >>> value = Ragged.from_list([torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.ones(1, 2)])
    >>> peak_of(value, None).tolist()
    [2.0, 0.5, 0.0, 0.0, 1.0, -1.0]
    """
    sizes, lengths = value.values.abs(), value.lengths
    largest, channel = sizes.max(-1)
    # Indexed by tensors: a plain number would make the device wait for its reader.
    token = largest.argmax(0, keepdim=True)
    sequence = lengths.sequence_of_token[token]
    parts = (
        largest[token],
        median_of(sizes, lengths.sequence_of_token == sequence).unsqueeze(0),
        sequence,
        lengths.positions[token],
        channel[token],
        torch.full_like(token, -1) if ids is None else ids.values[token],
    )
    return torch.cat([part.double() for part in parts])


def median_of(sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """The lower median of values that are not negative, over the rows that count.

    On CUDA torch selects with one multiprocessor: counting how many lie below a value, once for
    each bit of it, is many times faster there.

    >>> median_of(torch.tensor([[3.0, 1.0], [2.0, 4.0], [9.0, 9.0]]), torch.tensor([1, 1, 0]) > 0)
    tensor(2.)
    """
    if sizes.device.type == "cpu":
        return sizes[rows].float().median()
    return _counted_median(sizes, rows)


def _counted_median(sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """The largest value that at most half of all lie below."""
    whole = BITS[sizes.element_size()]
    rank = (rows.sum() * sizes.shape[1] - 1) // 2
    found = torch.zeros((), dtype=whole, device=sizes.device)
    for bit in reversed(range(8 * sizes.element_size() - 1)):
        tried = found | 2**bit
        below = _below(sizes, rows, tried.view(sizes.dtype))
        found = torch.where(below <= rank, tried, found)
    return found.view(sizes.dtype).float()


def _below(
    sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    if sizes.device.type != "cuda" or find_spec("triton") is None:
        return torch.where(rows, (sizes < limit).sum(-1), 0).sum()
    from manyheads.lens.measure.triton_row_sums import below

    # Triton runs on the current device, whichever the tensors are on.
    with torch.cuda.device_of(sizes):
        return below(sizes, rows, limit)


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
    from manyheads.lens.measure.triton_pairs import Standing, at_offsets, on_repeats
    from manyheads.lens.measure.triton_row_sums import Streamed, stream

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


GATES = {tap: place for place, tap in GATE_TAPS.items()}
ATTENTION_TAPS = {Tap.BEFORE, Tap.QUERY, Tap.KEY, Tap.HEAD_OUTPUT, *GATES}
# Tokens whose writes to the residual stream are measured at once.
TOKENS_AT_ONCE = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The largest value of the residual stream after a layer, and where it stood.

    It is massive (arXiv 2402.17762) if it exceeds 100 and a thousand times the median of its text.
    """

    stack: str
    layer: int
    largest: float
    median: float
    text: int
    position: int
    channel: int
    token: int | None = None

    @property
    def massive(self) -> bool:
        return self.largest > 100 and self.largest > 1000 * self.median


@dataclass(slots=True, eq=False)
class Plan:
    """What all batches of a model share: classes as columns over the vocabulary, offsets, sizes.

    `writers` are d x d matrices, with which o G o is the squared norm of what a head writes.
    """

    stacks: dict[str, Stack]
    classes: dict[str, Float[Tensor, " v"]]
    offsets: tuple[int, ...]
    sink_above: float
    writers: dict[Site, Float[Tensor, "h d d"]] = field(default_factory=dict)


class Observer:
    """Measures one batch; of every attention it keeps the queries and no more until it is past."""

    def __init__(self, plan: Plan, ids: dict[str, Ragged], texts: list[int]) -> None:
        self.tally = Tally()
        self._plan, self._ids, self._texts = plan, ids, texts
        self._query: Ragged | None = None
        self._residual: Float[Tensor, " n"] | None = None
        self._peaks: dict[tuple[str, int], Float[Tensor, "6"]] = {}
        # What many layers ask alike: marks and repeats of a stack's tokens, measured once.
        self._known: dict[str, Any] = {}

    @property
    def activations(self) -> dict[tuple[str, int], Activation]:
        """The largest after each layer; all are read at once, after the forward."""
        if not self._peaks:
            return {}
        rows = torch.stack(list(self._peaks.values())).tolist()
        return {
            place: self._activation(place, row)
            for place, row in zip(self._peaks, rows, strict=True)
        }

    def _activation(self, place: tuple[str, int], peak: list[float]) -> Activation:
        sequence, position, channel, token = (int(number) for number in peak[2:])
        return Activation(
            stack=place[0],
            layer=place[1],
            largest=peak[0],
            median=peak[1],
            text=self._texts[sequence],
            position=position,
            channel=channel,
            token=None if token < 0 else token,
        )

    @property
    def tokens(self) -> int:
        """Tokens of all texts; a patch of an image is none."""
        return sum(each.lengths.total for each in self._ids.values())

    @property
    def members(self) -> dict[str, float]:
        """How many tokens each class has."""
        return {
            name: sum(float(column.to(ids.device)[ids.values].sum()) for ids in self._ids.values())
            for name, column in self._plan.classes.items()
        }

    def wants(self, site: Site) -> bool:
        if site.tap is Tap.AFTER:
            return site.sublayer is self._last(site)
        return site.tap in ATTENTION_TAPS and site.sublayer is not Sublayer.FEEDFORWARD

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        match site.tap:
            case Tap.BEFORE:
                norms = torch.linalg.vector_norm(value.values, dim=-1, dtype=torch.float32)
                self._residual = norms
            case Tap.QUERY:
                self._query = value
            case Tap.KEY:
                self._see_key(site, value)
            case Tap.HEAD_OUTPUT:
                self._see_output(site, value)
            case Tap.AFTER:
                self._see_residual(site, value)
            case _:
                self._see_gate(site, value)

    def _last(self, site: Site) -> Sublayer:
        layer = self._plan.stacks[site.stack].config.layers[site.layer]
        if layer.feedforward is not None:
            return Sublayer.FEEDFORWARD
        crosses = layer.cross is not None or layer.cross_rest is not None
        return Sublayer.CROSS if crosses else Sublayer.ATTENTION

    def _attention(self, site: Site) -> Attention:
        return attention_at(self._plan.stacks[site.stack], site.layer, site.sublayer)

    def _block(self, site: Site) -> Block:
        return Block(site.layer, self._attention(site).config.heads, site.stack, site.sublayer)

    def _see_key(self, site: Site, key: Ragged) -> None:
        assert self._query is not None
        meeting = meet(self._plan.stacks[site.stack], site, self._query, key)
        same = site.sublayer is Sublayer.ATTENTION
        read = site.stack if same else "encoder"
        wanted, scope = self._wanted(read, key), self._scope(read)
        if not same:
            wanted = replace(wanted, offsets=(), ids=None)
            scope = replace(scope, same=False, repeats=None)
        sums = sums_of(meeting, wanted)
        tally_heads(self.tally, self._block(site), meeting, wanted, sums, scope)
        self._query = None

    def _wanted(self, stack: str, key: Ragged) -> Wanted:
        ids = self._ids.get(stack)
        if ids is None:
            marks = torch.zeros(key.lengths.total, 0, device=key.device)
            return Wanted(offsets=self._plan.offsets, marks=marks, ids=None)
        if f"marks {stack}" not in self._known:
            columns = [column.to(ids.device)[ids.values] for column in self._plan.classes.values()]
            none = torch.zeros(ids.lengths.total, 0, device=ids.device)
            self._known[f"marks {stack}"] = torch.stack(columns, dim=1) if columns else none
        marks = self._known[f"marks {stack}"]
        return Wanted(offsets=self._plan.offsets, marks=marks, ids=ids.values)

    def _scope(self, stack: str) -> Scope:
        ids = self._ids.get(stack)
        if ids is not None and f"repeats {stack}" not in self._known:
            self._known[f"repeats {stack}"] = repeated(ids.values, ids.lengths)
        return Scope(
            classes=() if ids is None else tuple(self._plan.classes),
            repeats=self._known.get(f"repeats {stack}"),
            same=True,
            sink_above=self._plan.sink_above,
        )

    def _see_gate(self, site: Site, value: Ragged) -> None:
        """One number a token and head; heads that share a gate share its number."""
        block, place = self._block(site), GATES[site.tap]
        gate = value.values.float()
        of_head = {"": gate.mean(-1), "_closed": (gate < CLOSED).float().mean(-1)}
        for ending, values in of_head.items():
            values = values[:, self._gate_of_head(site, values.shape[1])]
            counted = Counted(value.lengths.sequence_of_token, len(value))
            self.tally.add(block, f"gate_{place}{ending}", values, counted)

    def _gate_of_head(self, site: Site, gates: int) -> list[int]:
        """Which gate stands before each head; a slice of the width where it would be the head's."""
        config = self._attention(site).config
        if gates == config.key_heads and site.tap in (Tap.GATE_KEY, Tap.GATE_VALUE):
            return list(config.owners)
        return [head * gates // config.heads for head in range(config.heads)]

    def _see_output(self, site: Site, value: Ragged) -> None:
        """How much each head writes, itself and beside the residual stream it is added to."""
        assert self._residual is not None
        writers = self._writers(site)
        norms = []
        for part in value.values.split(TOKENS_AT_ONCE):
            read = rearrange(part.float(), "n h d -> h n d").contiguous()
            norms.append((read @ writers.mT).mul_(read).sum(-1).clamp_(min=0).sqrt().T)
        norm = torch.cat(norms) if norms else value.values.new_zeros(value.values.shape[:2]).float()
        owner, block = value.lengths.sequence_of_token, self._block(site)
        residual = self._residual[:, None]
        self.tally.add(block, "output_norm", norm, Counted(owner, len(value)))
        counted = Counted(owner, len(value), self._residual > 0)
        self.tally.add(block, "output_share", norm / residual, counted)
        self._residual = None

    def _writers(self, site: Site) -> Float[Tensor, "h d d"]:
        if site not in self._plan.writers:
            attention = self._attention(site)
            weight = attention.output.weight.float()
            slices = rearrange(weight, "c (h d) -> h d c", h=attention.config.heads).contiguous()
            # |W o|^2 = o W'W o: a small matrix stands for the whole width.
            self._plan.writers[site] = slices @ slices.mT
        return self._plan.writers[site]

    def _see_residual(self, site: Site, value: Ragged) -> None:
        if value.values.numel():
            ids = self._ids.get(site.stack)
            self._peaks[site.stack, site.layer] = peak_of(value, ids)
