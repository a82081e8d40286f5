"""The watcher behind the statistics: it measures each attention during the forward pass."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib.util import find_spec

import torch
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.attention import Attention
from manyheads.kernels.contract import Request
from manyheads.lens.inputs.cached_run import layer_output_site
from manyheads.lens.measure import measures, score_tiles
from manyheads.lens.measure.row_sums import (
    RowSums,
    RowSumSpec,
    cannot,
    cannot_mix,
    row_sums,
    stream_rows_and_output,
)
from manyheads.lens.measure.shared_row_sums import shared_row_sums
from manyheads.lens.results.addresses import Block, heads_at, output_weight
from manyheads.mixers.mixer import Mixer
from manyheads.models.stack import Stack
from manyheads.parts.gates import GATE_TAPS
from manyheads.ragged import ContextShard, Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

# Integers of a size, whose order is that of non-negative floats of that size.
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def find_peak(value: Ragged, ids: Ragged | None) -> Float[Tensor, "6"]:
    """The largest value, the median of its text, its sequence, position, channel and token or -1.

    >>> value = Ragged.from_list([torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.ones(1, 2)])
    >>> find_peak(value, None).tolist()
    [2.0, 0.5, 0.0, 0.0, 1.0, -1.0]
    """
    sizes, lengths = value.values.abs(), value.lengths
    largest, channel = sizes.max(-1)
    # Indexed by tensors: converting to a number would synchronise the device.
    token = largest.argmax(0, keepdim=True)
    sequence = lengths.sequence_of_token[token]
    parts = (
        largest[token],
        masked_median(sizes, lengths.sequence_of_token == sequence).unsqueeze(0),
        sequence,
        lengths.positions[token],
        channel[token],
        torch.full_like(token, -1) if ids is None else ids.values[token],
    )
    return torch.cat([part.double() for part in parts])


def masked_median(sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """The lower median of non-negative values over some rows.

    On CUDA torch selects with one multiprocessor: bisection by counting the values below a limit,
    once per bit, is many times faster.

    >>> sizes = torch.tensor([[3.0, 1.0], [2.0, 4.0], [9.0, 9.0]])
    >>> masked_median(sizes, torch.tensor([1, 1, 0]) > 0)
    tensor(2.)
    """
    if sizes.device.type == "cpu":
        return sizes[rows].float().median()
    return _bisect_median(sizes, rows)


def find_shared_peak(value: Ragged, ids: Ragged | None) -> Float[Tensor, "6"]:
    """The same as `find_peak` where processes share the texts, of which `ids` are the whole ones.

    The median is found by bisection, in which the processes add up what they count.
    """
    shard, sizes = value.lengths.shard, value.values.abs()
    assert shard is not None, "the caller has checked that texts are shared"
    peak = torch.full((5,), -1.0, dtype=torch.float64, device=value.device)
    if value.values.numel():
        local = None if ids is None else ids.shard(shard)
        largest, _, *places = find_peak(value, local).unbind()
        peak = torch.stack((largest, *places))
    peaks = shard.gather(peak).tolist()
    # As in one process, the first of equal ones.
    largest, sequence, *places = min(peaks, key=lambda row: (-row[0], row[1], row[2]))
    of_text = value.lengths.sequence_of_token == int(sequence)
    median = float(_bisect_median(sizes, of_text, shard))
    return torch.tensor([largest, median, sequence, *places], dtype=torch.float64)


def _bisect_median(
    sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], shard: ContextShard | None = None
) -> Float[Tensor, ""]:
    """The largest value with at most half of all values below it."""
    integer = INTEGERS[sizes.element_size()]
    count = rows.sum() if shard is None else shard.reduce(rows.sum())
    rank = (count * sizes.shape[1] - 1) // 2
    median = torch.zeros((), dtype=integer, device=sizes.device)
    for bit in reversed(range(8 * sizes.element_size() - 1)):
        tried = median | 2**bit
        below = _count_below(sizes, rows, tried.view(sizes.dtype))
        below = below if shard is None else shard.reduce(below)
        median = torch.where(below <= rank, tried, median)
    return median.view(sizes.dtype).float()


def _count_below(
    sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    if sizes.device.type != "cuda" or find_spec("triton") is None:
        return torch.where(rows, (sizes < limit).sum(-1), 0).sum()
    from manyheads.lens.measure.triton_row_sums import count_below

    # Triton runs on the current device, not on that of the tensors.
    with torch.cuda.device_of(sizes):
        return count_below(sizes, rows, limit)


GATES = {tap: gate for gate, tap in GATE_TAPS.items()}
ATTENTION_TAPS = {Tap.BEFORE, Tap.HEAD_OUTPUT, *GATES}
# Tokens whose head outputs are projected at once.
CHUNK_TOKENS = 4096

AttentionSums = Callable[[Block, score_tiles.TiledScores, RowSumSpec], RowSums]


@dataclass(frozen=True, slots=True, kw_only=True)
class Activation:
    """The largest value of the residual stream after a layer, and its position.

    It is massive (arXiv 2402.17762) if it exceeds 100 and 1000 times the median of its text.
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
class MeasurementPlan:
    """What all batches of a model share: token classes over the vocabulary, offsets, Gram matrices.

    A Gram matrix G of a head gives the squared norm of its projected output o as o G o. Of the
    measures `only` these are taken, and then no activations; None takes all.
    """

    stacks: dict[str, Stack]
    classes: dict[str, Float[Tensor, " v"]]
    offsets: tuple[int, ...]
    sink_above: float
    only: frozenset[str] | None = None
    grams: dict[Site, Float[Tensor, "h d d"]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class _PendingScores:
    """An attention whose weights are still to be summed."""

    site: Site
    tiled: score_tiles.TiledScores
    spec: RowSumSpec


class StatisticsWatcher:
    """Measures one batch into `sums`; of each attention it stores no more than the queries.

    With `sum_attention` another function than `row_sums` sums the weights of an attention.
    """

    def __init__(
        self,
        plan: MeasurementPlan,
        ids: dict[str, Ragged],
        texts: list[int],
        sums: measures.MeasureSums | None = None,
        sum_attention: AttentionSums | None = None,
    ) -> None:
        self._sum_attention = sum_attention
        self.sums = measures.MeasureSums() if sums is None else sums
        # The largest score of each head before the softmax.
        self.scores: dict[Block, Float[Tensor, " h"]] = {}
        self._plan, self._ids, self._texts = plan, ids, texts
        self._reader = score_tiles.ScoreReader(plan.stacks)
        self._patches = 0
        self._residual: Float[Tensor, " n"] | None = None
        self._peaks: dict[tuple[str, int], Float[Tensor, "6"]] = {}
        self._pending: _PendingScores | None = None
        # See `_mark`: all layers of a stack share them.
        self._shared: dict[str, tuple[Float[Tensor, "n marks"], Bool[Tensor, " n"]]] = {}

    @property
    def activations(self) -> dict[tuple[str, int], Activation]:
        """The largest value after each layer, read from the device all at once."""
        if not self._peaks:
            return {}
        peaks = torch.stack(list(self._peaks.values())).tolist()
        activations = {}
        for (stack, layer), (largest, median, *places) in zip(self._peaks, peaks, strict=True):
            sequence, position, channel, token = map(int, places)
            activations[stack, layer] = Activation(
                stack=stack,
                layer=layer,
                largest=largest,
                median=median,
                text=self._texts[sequence],
                position=position,
                channel=channel,
                token=None if token < 0 else token,
            )
        return activations

    @property
    def tokens(self) -> int:
        """The number of tokens, or of patches where the inputs are images."""
        return sum(ids.lengths.total for ids in self._ids.values()) or self._patches

    @property
    def class_counts(self) -> dict[str, float]:
        """The number of tokens of each class."""
        return {
            name: sum(float(column.to(ids.device)[ids.values].sum()) for ids in self._ids.values())
            for name, column in self._plan.classes.items()
        }

    def wants(self, site: Site) -> bool:
        if site.tap is Tap.AFTER:
            last = layer_output_site(self._plan.stacks[site.stack], site.layer)
            return self._plan.only is None and site == last
        if site.tap in ATTENTION_TAPS:
            return site.sublayer in (Sublayer.ATTENTION, Sublayer.CROSS)
        return self._reader.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        if self._reader.wants(site):
            tiled = self._reader.see(site, value)
            if tiled is not None:
                self._sum_pending()
                spec = self._spec(site, tiled)
                self._pending = _PendingScores(site, tiled, spec)
                # Attentions that are not ours do not ask for their output.
                ours = isinstance(self._heads_at(site), Attention)
                if not ours or self._sum_attention is not None or cannot(tiled, spec) is not None:
                    self._sum_pending()
            return
        self._sum_pending()
        assert isinstance(value, Ragged), "no other patterns are watched"
        match site.tap:
            case Tap.BEFORE:
                norms = torch.linalg.vector_norm(value.values, dim=-1, dtype=torch.float32)
                self._residual = norms
            case Tap.HEAD_OUTPUT:
                self._see_output(site, value)
            case Tap.AFTER if value.lengths.shard is not None:
                ids = self._ids.get(site.stack)
                self._peaks[site.stack, site.layer] = find_shared_peak(value, ids)
            case Tap.AFTER if value.values.numel():
                ids = self._ids.get(site.stack)
                self._peaks[site.stack, site.layer] = find_peak(value, ids)
            case Tap.AFTER:
                pass
            case _:
                self._see_gate(site, value)

    def mix(
        self,
        site: Site,  # noqa: ARG002, that of the scores which were seen last
        query: Float[Tensor, "n h d"],
        key: Float[Tensor, "m g d"],
        value: Float[Tensor, "m g e"],
        request: Request,
    ) -> Float[Tensor, "n h e"] | None:
        """The output of the heads from the pass that sums their weights, where it can give it."""
        pending = self._pending
        if pending is None or request.groups is not None:
            return None
        if pending.tiled.query is not query or pending.tiled.key is not key:
            return None
        if request.dropout or (torch.is_grad_enabled() and value.requires_grad):
            return None
        if cannot_mix(pending.tiled, pending.spec, value) is not None:
            return None
        self._pending = None
        # Triton runs on the current device, not on that of the tensors.
        with torch.cuda.device_of(value):
            sums, output = stream_rows_and_output(pending.tiled, pending.spec, value)
        self._add_sums(pending, sums)
        return output

    def _sum_pending(self) -> None:
        """Sum the weights of an attention whose output is computed elsewhere."""
        pending, self._pending = self._pending, None
        if pending is None:
            return
        if pending.tiled.request.keys.shard is not None:
            sums = shared_row_sums(pending.tiled, pending.spec)
        elif self._sum_attention is None:
            sums = row_sums(pending.tiled, pending.spec)
        else:
            sums = self._sum_attention(self._block(pending.site), pending.tiled, pending.spec)
        self._add_sums(pending, sums)

    def _heads_at(self, site: Site) -> Attention | Mixer:
        return heads_at(self._plan.stacks[site.stack], site.layer, site.sublayer)

    def _block(self, site: Site) -> Block:
        heads = self._heads_at(site).config.heads
        return Block(site.layer, heads, site.stack, site.sublayer)

    def _ids_of(self, site: Site, tiled: score_tiles.TiledScores) -> Ragged | None:
        """The tokens that are the keys of an attention, where they are known."""
        ids = self._ids.get(site.stack if site.sublayer is Sublayer.ATTENTION else "encoder")
        keys = tiled.request.keys
        lengths = keys.each if keys.shard is None else keys.shard.lengths
        # A wrapped model may have other tokens between those that it reads.
        return None if ids is None or ids.lengths.each != lengths else ids

    def _spec(self, site: Site, tiled: score_tiles.TiledScores) -> RowSumSpec:
        same, keys = site.sublayer is Sublayer.ATTENTION, tiled.request.keys
        ids = self._ids_of(site, tiled)
        if ids is None:
            marks = torch.zeros(keys.total, 0, device=keys.offsets.device)
        else:
            marks, _ = self._marks_of(site, ids)
        return RowSumSpec(
            offsets=self._plan.offsets if same else (),
            marks=marks,
            ids=ids.values if same and ids is not None else None,
            spread=self._plan.only is None or bool(self._plan.only & measures.OF_SPREAD),
        )

    def _add_sums(self, pending: "_PendingScores", sums: RowSums) -> None:
        site, tiled, plan = pending.site, pending.tiled, self._plan
        same, ids = site.sublayer is Sublayer.ATTENTION, self._ids_of(site, tiled)
        self._patches, shard = tiled.request.queries.total, tiled.request.keys.shard
        repeats = self._marks_of(site, ids)[1] if same and ids is not None else None
        scope = measures.MeasureScope(
            classes=() if ids is None else tuple(plan.classes),
            repeats=repeats if repeats is None or shard is None else shard.take(repeats),
            same=same,
            sink_above=plan.sink_above,
            only=plan.only,
        )
        block = self._block(site)
        measures.add_measures(self.sums, block, tiled, pending.spec, sums, scope)
        # Mixers, and attentions that only return their weights, have no scores.
        scored = getattr(self._heads_at(site), "has_scores", True)
        if not scored or isinstance(tiled, score_tiles.TiledWeights):
            return
        scores = sums.score.masked_fill(sums.largest == 0, -math.inf)
        if shard is not None:
            lowest = scores.new_full((1, block.heads), -math.inf)
            self.scores[block] = shard.reduce(torch.cat((scores, lowest)).amax(0), largest=True)
        elif len(scores):
            self.scores[block] = scores.amax(0)

    def _marks_of(
        self, site: Site, ids: Ragged
    ) -> tuple[Float[Tensor, "n marks"], Bool[Tensor, " n"]]:
        """Those of `_mark`, which all layers of a stack share."""
        stack = site.stack if site.sublayer is Sublayer.ATTENTION else "encoder"
        if stack not in self._shared:
            self._shared[stack] = self._mark(ids)
        return self._shared[stack]

    def _mark(self, ids: Ragged) -> tuple[Float[Tensor, "n marks"], Bool[Tensor, " n"]]:
        """Which tokens belong to each class, and which have an earlier copy."""
        columns = [column.to(ids.device)[ids.values] for column in self._plan.classes.values()]
        none = torch.zeros(ids.lengths.total, 0, device=ids.device)
        marks = torch.stack(columns, dim=1) if columns else none
        return marks, measures.has_earlier_copy(ids.values, ids.lengths)

    def _see_gate(self, site: Site, value: Ragged) -> None:
        """One number per token and head; heads that share a gate share its number."""
        block, name = self._block(site), GATES[site.tap]
        gate, config = value.values.float(), self._heads_at(site).config
        gates = gate.shape[1]
        # The gate of each head; a gate over the width is divided evenly among the heads.
        owners = [head * gates // config.heads for head in range(config.heads)]
        if gates == config.key_heads and site.tap in (Tap.GATE_KEY, Tap.GATE_VALUE):
            owners = list(config.owners)
        groups = measures.SequenceGroups.of(value.lengths)
        closed = (gate < measures.GATE_CLOSED_BELOW).float()
        for ending, values in (("", gate), ("_closed", closed)):
            self.sums.add(block, f"gate_{name}{ending}", values.mean(-1)[:, owners], groups)

    def _see_output(self, site: Site, value: Ragged) -> None:
        """The norm of what each head writes, and its ratio to that of the residual stream."""
        inner = self._heads_at(site)
        if inner.output is None or not getattr(inner.config, "heads", 0):
            # A wrapped attention whose output projection was not found, or a mixer without heads.
            return
        grams = self._grams(site)
        norms = []
        for chunk in value.values.split(CHUNK_TOKENS):
            read = rearrange(chunk.float(), "n h d -> h n d").contiguous()
            norms.append((read @ grams.mT).mul_(read).sum(-1).clamp_(min=0).sqrt().T)
        norm = torch.cat(norms) if norms else value.values.new_zeros(value.values.shape[:2]).float()
        block = self._block(site)
        self.sums.add(block, "output_norm", norm, measures.SequenceGroups.of(value.lengths))
        if self._residual is None or len(self._residual) != len(norm):
            return
        residual = self._residual[:, None]
        groups = measures.SequenceGroups.of(value.lengths, self._residual > 0)
        self.sums.add(block, "output_share", norm / residual, groups)
        self._residual = None

    def _grams(self, site: Site) -> Float[Tensor, "h d d"]:
        if site not in self._plan.grams:
            heads = self._heads_at(site).config.heads
            stack = self._plan.stacks[site.stack]
            weight = output_weight(stack, site.layer, site.sublayer).float()
            slices = rearrange(weight, "c (h d) -> h d c", h=heads).contiguous()
            # |W o|^2 = o W'W o: a d x d matrix instead of the whole width.
            self._plan.grams[site] = slices @ slices.mT
        return self._plan.grams[site]
