"""Cached runs of a model, from which any window of any head's pattern can be computed."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from threading import Lock

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.lens.causal.attention_links import Link, LinkCutter
from manyheads.lens.inputs.cached_run import EditFunction
from manyheads.lens.measure.score_tiles import HIDDEN_SCORE, ScoreReader, Tile, TiledScores
from manyheads.models import build, model_interface
from manyheads.ragged import Ragged
from manyheads.studio.requests import DisconnectedError
from manyheads.taps import Head, Patterns, Site, Sublayer, Tap

# Whether the request was cancelled; checked in every layer and for every block of a pattern.
IsCancelled = Callable[[], bool]

# Weights and logits that are computed at once.
MAX_WEIGHTS = 2**22
MAX_LOGITS = 2**25


def never_cancelled() -> bool:
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class TracedRun:
    """The queries and keys of every layer, the final hidden states, and each head's mean output.

    Memory is linear in tokens: weights are computed window by window, as they are requested. The
    log-sum-exp of each row of scores is computed once per head and cached.
    """

    model: build.Model
    inputs: model_interface.ModelInputs
    layers: dict[int, TiledScores] = field(default_factory=dict)
    hidden: Ragged = field(init=False)
    means: dict[int, Float[Tensor, "_ _"]] = field(default_factory=dict)
    outputs: dict[int, Float[Tensor, "_ _ _"]] = field(default_factory=dict)
    # The keys that a query of a head does not read, because these links are cut.
    cuts: dict[tuple[Head, int], list[int]] = field(default_factory=dict)
    _sums: dict[tuple[int, int], Float[Tensor, "_ t"]] = field(default_factory=dict)
    _losses: Float[Tensor, " _"] | None = None

    @property
    def length(self) -> int:
        return self.hidden.lengths.total

    @property
    def bytes(self) -> int:
        """The size of its tensors."""
        tensors = [self.hidden.values, *self.outputs.values(), *self._sums.values()]
        scores = sum(layer.nbytes for layer in self.layers.values())
        return scores + sum(tensor.nbytes for tensor in tensors)

    def weights(
        self, head: Head, rows: range, keys: range, cancelled: IsCancelled = never_cancelled
    ) -> Float[Tensor, "t s"]:
        """A window of a head's pattern: the weights of the queries `rows` on `keys`.

        A head of a mixer without a pattern has none.
        """
        scores = self.layers.get(head.layer)
        if scores is None:
            return torch.zeros(len(rows), len(keys), device=self.hidden.device)
        group, member = divmod(head.head, scores.group_size)
        sums = self._row_sums(scores, head, rows, cancelled)[member, :, None]
        scored, _ = scores.scores(Tile(0, rows, keys), scores.keys_of(0), range(group, group + 1))
        window = scored[member]
        visible = (window > HIDDEN_SCORE / 10) & (sums > -torch.inf)
        weights = torch.where(visible, (window - sums.clamp(min=HIDDEN_SCORE)).exp(), 0.0)
        for row in rows:
            if (head, row) in self.cuts:
                weights[row - rows.start] = self._cut_row(head, row)[keys.start : keys.stop]
        return weights

    def _cut_row(self, head: Head, row: int) -> Float[Tensor, " s"]:
        """The weights of a query without the keys that it does not read."""
        scores = self.layers[head.layer]
        group, member = divmod(head.head, scores.group_size)
        tile = Tile(0, range(row, row + 1), range(self.length))
        scored = scores.scores(tile, scores.keys_of(0), range(group, group + 1))[0][member, 0]
        scored = scored.masked_fill(scored <= HIDDEN_SCORE / 10, -torch.inf)
        scored[self.cuts[head, row]] = -torch.inf
        if scores.request.sink is not None:
            scored = torch.cat((scored, scores.request.sink[head.head].float()[None]))
        return scored.softmax(-1).nan_to_num(0.0)[: self.length]

    def blocks(self, rows: range) -> list[range]:
        """Split queries into blocks whose weights on all keys fit into memory at once."""
        step = max(1, MAX_WEIGHTS // max(1, self.length))
        starts = range(rows.start, rows.stop, step)
        return [range(start, min(start + step, rows.stop)) for start in starts]

    def logits(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m v"] | None:
        """Logits of the vocabulary or of token classes at some positions."""
        if self.model.readout is None:
            return None
        table = self.model.table
        return self.model.readout.logits(self.hidden.values[rows], table).float()

    def losses(self) -> Float[Tensor, " t"]:
        """The loss of a generative model at every token but the first, in nats."""
        if self._losses is not None:
            return self._losses
        assert self.inputs.ids is not None
        ids = self.inputs.ids.values
        vocabulary = max(1, int(self.model.config.embedding.vocabulary))  # type: ignore[union-attr]
        positions = torch.arange(len(ids) - 1, device=ids.device)
        losses = []
        for rows in positions.split(max(1, MAX_LOGITS // vocabulary)):
            logits = self.logits(rows)
            assert logits is not None
            losses.append(F.cross_entropy(logits, ids[rows + 1], reduction="none"))
        self._losses = torch.cat(losses) if losses else ids.new_zeros(0, dtype=torch.float32)
        return self._losses

    def _row_sums(
        self, scores: TiledScores, head: Head, rows: range, cancelled: IsCancelled
    ) -> Float[Tensor, "r t"]:
        """The log-sum-exp of some rows for the heads of one key head, each computed once."""
        group = head.head // scores.group_size
        key = head.layer, group
        if key not in self._sums:
            unknown = torch.full((scores.group_size, self.length), torch.nan)
            self._sums[key] = unknown.to(scores.query.device)
        sums = self._sums[key]
        missing = sums[0, rows.start : rows.stop].isnan().nonzero().flatten().tolist()
        if missing:
            keys = scores.keys_of(0)
            for block in self.blocks(range(rows.start + missing[0], rows.start + missing[-1] + 1)):
                if cancelled():
                    raise DisconnectedError
                sums[:, block.start : block.stop] = _log_sum_exp(scores, block, keys, group)
        return sums[:, rows.start : rows.stop]


def _log_sum_exp(
    scores: TiledScores, rows: range, keys: Float[Tensor, "g s d"], group: int
) -> Float[Tensor, "r t"]:
    strip = scores.tile(0, rows)
    if strip.keys:
        scored, _ = scores.scores(strip, keys, range(group, group + 1))
        sums = scored.masked_fill_(scored <= HIDDEN_SCORE / 10, -torch.inf).logsumexp(-1)
    else:
        sums = torch.full((scores.group_size, len(rows)), -torch.inf, device=keys.device)
    if scores.request.sink is None:
        return sums
    served = slice(group * scores.group_size, (group + 1) * scores.group_size)
    return torch.logaddexp(sums, scores.request.sink[served].float()[:, None])


def trace_run(
    model: build.Model,
    inputs: model_interface.ModelInputs,
    changes: Mapping[Site, EditFunction] | None = None,
    *,
    links: Sequence[Link] = (),
    keep: frozenset[int] = frozenset(),
    cancelled: IsCancelled = never_cancelled,
) -> TracedRun:
    """Run a model on one text or image, with the outputs of some heads changed or links cut.

    `keep` are the layers whose head outputs are stored, for patching another run.
    """
    run = TracedRun(model=model, inputs=inputs)
    for link in links:
        assert isinstance(link.query, int), "links of the page have positions"
        assert isinstance(link.key, int), "links of the page have positions"
        run.cuts.setdefault((link.head.head, link.query), []).append(link.key)
    cutter = LinkCutter(model, links, range(1), renormalize=True)
    with build.eval_mode(model), torch.inference_mode():
        model.run_hidden(inputs, _RunRecorder(run, changes or {}, cutter, keep, cancelled))
    return run


@dataclass(slots=True, eq=False)
class _RunRecorder:
    """A watcher that edits heads and fills a run."""

    run: TracedRun
    changes: Mapping[Site, EditFunction]
    cutter: LinkCutter
    keep: frozenset[int]
    cancelled: IsCancelled
    reader: ScoreReader = field(init=False)

    def __post_init__(self) -> None:
        self.reader = ScoreReader(self.run.model.stacks())

    def wants(self, site: Site) -> bool:
        recorded = site.tap in (Tap.HEAD_OUTPUT, Tap.FINAL) or self.reader.wants(site)
        return (site.sublayer is Sublayer.ATTENTION and recorded) or self.cutter.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        if self.cancelled():
            raise DisconnectedError
        cut = self.cutter.see(site, value) if self.cutter.wants(site) else None
        if self.reader.wants(site):
            tiled = self.reader.see(site, value)
            if tiled is not None:
                self.run.layers[site.layer] = tiled
            return None
        assert isinstance(value, Ragged), "no other pattern is requested"
        if site.tap is Tap.FINAL:
            self.run.hidden = value
        if site.tap is not Tap.HEAD_OUTPUT:
            return cut
        self.run.means[site.layer] = value.values.double().mean(0).to(value.values.dtype)
        change = self.changes.get(site)
        edited = value if change is None else value.map(change)
        if site.layer in self.keep:
            self.run.outputs[site.layer] = edited.values
        return edited


class RunCache:
    """Runs by model, input and edits; the least recently used are dropped first.

    One thread adds runs while others may read.

    >>> RunCache(max_bytes=10).used_bytes
    0
    """

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self._runs: OrderedDict[Hashable, TracedRun] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, compute: Callable[[], TracedRun]) -> TracedRun:
        """Return the cached run of a key, or compute it; the newest run is never dropped."""
        with self._lock:
            run = self._runs.get(key)
            if run is not None:
                self._runs.move_to_end(key)
                return run
        run = compute()
        with self._lock:
            self._runs[key] = run
            while len(self._runs) > 1 and self.used_bytes > self.max_bytes:
                self._runs.popitem(last=False)
        return run

    @property
    def used_bytes(self) -> int:
        return sum(run.bytes for run in self._runs.values())
