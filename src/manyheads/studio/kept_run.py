"""One run of a model, kept so that any window of any head's pattern can be formed from it."""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field
from threading import Lock

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import Change
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.measure.score_tiles import FAR, Meeting, Strip, meet
from manyheads.lens.results.addresses import stacks_of
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.ragged import Ragged
from manyheads.studio.requests import LeftError
from manyheads.taps import Head, Patterns, Site, Sublayer, Tap

# Whether whoever asked has gone; asked at every layer and at every strip of a pattern.
Stopped = Callable[[], bool]

# Weights that are formed at once.
WEIGHTS_AT_ONCE = 2**22
# Scores of all words held at once.
SCORES_AT_ONCE = 2**25


def nobody_stops() -> bool:
    return False


@dataclass(slots=True, eq=False, kw_only=True)
class Reading:
    """Queries and keys of every layer, what the readout gets, and each head's mean output.

    Memory is linear in tokens: weights are formed window by window, as they are asked for. What
    a row of scores sums up to is computed once for a head and kept.
    """

    model: Model
    given: Given
    meetings: dict[int, Meeting]
    hidden: Ragged
    means: dict[int, Float[Tensor, "_ _"]]
    outputs: dict[int, Float[Tensor, "_ _ _"]] = field(default_factory=dict)
    _sums: dict[tuple[int, int], Float[Tensor, "_ t"]] = field(default_factory=dict)
    _losses: Float[Tensor, " _"] | None = None

    @property
    def length(self) -> int:
        return self.hidden.lengths.total

    @property
    def bytes(self) -> int:
        """What it holds, about."""
        kept = [each for one in self.meetings.values() for each in (one.query, one.key)]
        kept += [self.hidden.values, *self.outputs.values(), *self._sums.values()]
        return sum(each.numel() * each.element_size() for each in kept)

    def check(self, heads: tuple[Head, ...]) -> tuple[Head, ...]:
        """The heads, each of which the model has."""
        for head in heads:
            meeting = self.meetings.get(head.layer)
            if meeting is None or head.head >= meeting.query.shape[1]:
                layer = max(self.meetings)
                last = Head(layer, self.meetings[layer].query.shape[1] - 1)
                raise InputError(f"there is no head {head}", f"use L0H0 to {last}")
        return heads

    def weights(
        self, head: Head, rows: range, keys: range, stopped: Stopped = nobody_stops
    ) -> Float[Tensor, "t s"]:
        """A window of a head's pattern: what queries of `rows` give to keys of `keys`."""
        meeting = self.meetings[head.layer]
        group, place = divmod(head.head, meeting.share)
        sums = self._summed(meeting, head, rows, stopped)[place, :, None]
        scored, _ = meeting.scores(
            Strip(0, rows, keys), meeting.keys_of(0), range(group, group + 1)
        )
        window = scored[place]
        shown = (window > FAR / 10) & (sums > -torch.inf)
        return torch.where(shown, (window - sums.clamp(min=FAR)).exp(), 0.0)

    def strips(self, rows: range) -> list[range]:
        """Runs of queries that may meet all keys at once."""
        step = max(1, WEIGHTS_AT_ONCE // max(1, self.length))
        starts = range(rows.start, rows.stop, step)
        return [range(start, min(start + step, rows.stop)) for start in starts]

    def logits(self, rows: Int[Tensor, " m"]) -> Float[Tensor, "m v"] | None:
        """The scores of words or of each token's classes at some places."""
        readout = self.model.readout
        if readout is None:
            return None
        table = getattr(self.model, "table", None)
        features = readout.features(self.hidden.values[rows])
        return F.linear(features, readout.vectors(table), readout.bias).float()

    def losses(self) -> Float[Tensor, " t"]:
        """How surprised a model that writes is at every token but the first, in nats."""
        if self._losses is not None:
            return self._losses
        assert self.given.ids is not None
        ids = self.given.ids.values
        vocabulary = max(1, int(self.model.config.embedding.vocabulary))  # type: ignore[union-attr]
        places = torch.arange(len(ids) - 1, device=ids.device)
        found = []
        for some in places.split(max(1, SCORES_AT_ONCE // vocabulary)):
            scores = self.logits(some)
            assert scores is not None
            found.append(F.cross_entropy(scores, ids[some + 1], reduction="none"))
        self._losses = torch.cat(found) if found else ids.new_zeros(0, dtype=torch.float32)
        return self._losses

    def _summed(
        self, meeting: Meeting, head: Head, rows: range, stopped: Stopped
    ) -> Float[Tensor, "r t"]:
        """The log-sum-exp of some rows, for the heads that share one of keys; each made once."""
        group = head.head // meeting.share
        where = head.layer, group
        if where not in self._sums:
            unknown = torch.full((meeting.share, self.length), torch.nan)
            self._sums[where] = unknown.to(meeting.query.device)
        sums = self._sums[where]
        missing = sums[0, rows.start : rows.stop].isnan().nonzero().flatten().tolist()
        if missing:
            keys = meeting.keys_of(0)
            for some in self.strips(range(rows.start + missing[0], rows.start + missing[-1] + 1)):
                if stopped():
                    raise LeftError
                sums[:, some.start : some.stop] = _sum(meeting, some, keys, group)
        return sums[:, rows.start : rows.stop]


def _sum(
    meeting: Meeting, rows: range, keys: Float[Tensor, "g s d"], group: int
) -> Float[Tensor, "r t"]:
    strip = meeting.strip(0, rows)
    if strip.keys:
        scored, _ = meeting.scores(strip, keys, range(group, group + 1))
        found = scored.masked_fill_(scored <= FAR / 10, -torch.inf).logsumexp(-1)
    else:
        found = torch.full((meeting.share, len(rows)), -torch.inf, device=keys.device)
    if meeting.request.sink is None:
        return found
    served = slice(group * meeting.share, (group + 1) * meeting.share)
    return torch.logaddexp(found, meeting.request.sink[served].float()[:, None])


def take(
    model: Model,
    given: Given,
    changes: Mapping[Site, Change] | None = None,
    *,
    keep: frozenset[int] = frozenset(),
    stopped: Stopped = nobody_stops,
) -> Reading:
    """Run a model over one text or image, with heads changed as asked.

    `keep` are layers whose heads' outputs are kept whole, to be put into another run.
    """
    watcher = _Keeping(model, {} if changes is None else changes, keep, stopped)
    with resting(model), torch.inference_mode():
        climb(model, given, watcher)
    assert watcher.hidden is not None
    return Reading(
        model=model,
        given=given,
        meetings=watcher.meetings,
        hidden=watcher.hidden,
        means=watcher.means,
        outputs=watcher.outputs,
    )


class _Keeping:
    """A watcher that changes heads where it is told, and keeps what the page may ask for."""

    def __init__(
        self, model: Model, changes: Mapping[Site, Change], keep: frozenset[int], stopped: Stopped
    ) -> None:
        self.meetings: dict[int, Meeting] = {}
        self.means: dict[int, Tensor] = {}
        self.outputs: dict[int, Tensor] = {}
        self.hidden: Ragged | None = None
        self._stack = stacks_of(model)["main"]
        self._changes, self._keep, self._stopped = changes, keep, stopped
        self._query: Ragged | None = None

    def wants(self, site: Site) -> bool:
        here = site.sublayer is Sublayer.ATTENTION
        return here and site.tap in (Tap.QUERY, Tap.KEY, Tap.HEAD_OUTPUT, Tap.FINAL)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if self._stopped():
            raise LeftError
        match site.tap:
            case Tap.QUERY:
                self._query = value
            case Tap.KEY:
                assert self._query is not None
                self.meetings[site.layer] = meet(self._stack, site, self._query, value)
            case Tap.HEAD_OUTPUT:
                return self._heads(site, value)
            case _:
                self.hidden = value
        return None

    def _heads(self, site: Site, value: Ragged) -> Ragged | None:
        self.means[site.layer] = value.values.double().mean(0).to(value.values.dtype)
        if site.layer in self._keep:
            self.outputs[site.layer] = value.values
        change = self._changes.get(site)
        return None if change is None else value.map(change)


class Memory:
    """Readings by what they were made of; the longest unused go first.

    One thread makes them, while others may look.

    >>> Memory(most_bytes=10).used
    0
    """

    def __init__(self, most_bytes: int) -> None:
        self.most_bytes = most_bytes
        self._kept: OrderedDict[Hashable, Reading] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, make: Callable[[], Reading]) -> Reading:
        """The reading of this key, made where there is none; the newest always stays."""
        with self._lock:
            found = self._kept.get(key)
            if found is not None:
                self._kept.move_to_end(key)
                return found
        found = make()
        with self._lock:
            self._kept[key] = found
            while len(self._kept) > 1 and self.used > self.most_bytes:
                self._kept.popitem(last=False)
        return found

    @property
    def used(self) -> int:
        return sum(reading.bytes for reading in self._kept.values())
