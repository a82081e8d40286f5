"""How alike two heads look at a text, without keeping either's pattern."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.batches import lead
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.measure.score_tiles import FAR, Meeting, Strip, meet
from manyheads.lens.results.by_pair import ByPair
from manyheads.models.build import Model
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

Likeness = Literal["cosine", "jensen-shannon"]
Partners = Literal["all", "same layer"]

KIND = "pattern overlap"
# Queries that meet their keys at once, and weights of all heads that live at once.
ROWS = {"cpu": 128, "cuda": 1024}
LARGEST_CHUNK = {"cpu": 2**23, "cuda": 2**28}


def overlap(
    model: Model,
    texts: Any,
    measure: Likeness = "cosine",
    *,
    partners: Partners = "all",
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> ByPair:
    """How much of what one head looks at another looks at too: 1 for the same pattern, 0 for none.

    - "cosine": sum_j p_j q_j / sqrt(sum p^2 sum q^2), mean over queries
    - "jensen-shannon": 1 - JSD(p, q) / ln 2, mean over queries; what a learned sink takes counts as
      one more key. It costs a logarithm for each pair of heads and weight.

    Heads of layers with different masks have in common only the keys that both see. A query that
    sees no key in one of the layers does not count; one that sees a single key, as the first of a
    causal text, is alike for all heads. `partners="same layer"` leaves the rest NaN.

    A few queries of all heads are weighed at once, and one product of the heads' rows gives all
    pairs: the same number as exp(L([q;q'], [k;k']) - L - L'), for one multiplication a pair and
    weight where the longer dot product takes twice the head size. Memory grows with the tokens.

    >>> from manyheads.models.build import build
    >>> from manyheads.taps import Head
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = overlap(model, [[5, 6, 7, 8]])
    >>> round(found.of(Head(0, 0), Head(0, 0)), 4), found.values.shape
    (1.0, (4, 4))
    """
    if measure not in ("cosine", "jensen-shannon"):
        raise InputError(f"measure={measure!r} is not known", 'use "cosine" or "jensen-shannon"')
    part = part_of(model, stack, sublayer)
    found = _Summed.of(part, measure)

    def visit(given: Given, _: list[int]) -> None:
        watcher = _Meetings(part, found.anew(), partners)
        with torch.inference_mode():
            climb(model, given, watcher)
        found.add(watcher.finished())

    passed = lead(
        model, texts, visit, label="overlaying", batch_tokens=batch_tokens, progress=progress
    )
    facts = passed.facts | {"measure": measure, "partners": partners}
    return ByPair(kind=KIND, blocks=part.blocks, values=found.means(), facts=facts)


@dataclass(frozen=True, slots=True, eq=False)
class _Summed:
    """Likenesses added up over queries, and how many queries went into each pair of layers."""

    measure: Likeness
    places: dict[int, slice]
    likeness: Float[Tensor, "h h"]
    queries: Float[Tensor, "h h"]

    @classmethod
    def of(cls, part: Part, measure: Likeness) -> "_Summed":
        places, start = {}, 0
        for block in part.blocks:
            places[block.layer] = slice(start, start + block.heads)
            start += block.heads
        zeros = torch.zeros(start, start, dtype=torch.float64)
        device = next(part.model.parameters()).device
        return cls(measure, places, zeros.to(device), zeros.clone().to(device))

    def anew(self) -> "_Summed":
        nothing = torch.zeros_like(self.likeness), torch.zeros_like(self.queries)
        return _Summed(self.measure, self.places, *nothing)

    def add(self, other: "_Summed") -> None:
        self.likeness.add_(other.likeness)
        self.queries.add_(other.queries)

    def means(self) -> Float[np.ndarray, "h h"]:
        means = (self.likeness / self.queries).cpu().numpy()
        return np.asarray((means + means.T) / 2)


class _Meetings:
    """A watcher that keeps the queries and keys of a batch, or weighs each layer as it comes."""

    def __init__(self, part: Part, summed: _Summed, partners: Partners) -> None:
        self._part, self._summed, self._partners = part, summed, partners
        self._query: Ragged | None = None
        self._kept: dict[int, Meeting] = {}

    def wants(self, site: Site) -> bool:
        mine = site.stack == self._part.stack_name and site.sublayer is self._part.sublayer
        return mine and site.tap in (Tap.QUERY, Tap.KEY)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        assert self._query is not None
        meeting = meet(self._part.stack, site, self._query, value)
        self._query = None
        if self._partners == "all":
            self._kept[site.layer] = meeting
        else:
            _sum_meetings({site.layer: meeting}, self._summed)

    def finished(self) -> _Summed:
        if self._kept:
            with torch.inference_mode():
                _sum_meetings(self._kept, self._summed)
        return self._summed


def _sum_meetings(meetings: dict[int, Meeting], summed: _Summed) -> None:
    """All layers meet the same queries and the same keys, perhaps by different masks."""
    first = next(iter(meetings.values()))
    for sequence, length in enumerate(first.request.queries.each):
        if length == 0 or first.request.keys.each[sequence] == 0:
            continue
        keys = {layer: each.keys_of(sequence) for layer, each in meetings.items()}
        for rows in _runs(meetings, sequence, length):
            strips = {layer: each.strip(sequence, rows) for layer, each in meetings.items()}
            _sum_strips(meetings, strips, keys, summed)


def _runs(meetings: dict[int, Meeting], sequence: int, length: int) -> Iterator[range]:
    """As many queries at once as have room with the weights of all heads."""
    some = next(iter(meetings.values()))
    home = "cpu" if some.query.device.type == "cpu" else "cuda"
    heads = sum(each.query.shape[1] for each in meetings.values())
    for first in range(0, length, ROWS[home]):
        rows = range(first, min(first + ROWS[home], length))
        width = len(_union([each.strip(sequence, rows) for each in meetings.values()]))
        step = max(1, LARGEST_CHUNK[home] // max(1, heads * width))
        for start, stop in pairwise((*range(rows.start, rows.stop, step), rows.stop)):
            yield range(start, stop)


def _union(strips: Sequence[Strip]) -> range:
    seen = [strip.keys for strip in strips if strip.keys]
    if not seen:
        return range(0)
    return range(min(each.start for each in seen), max(each.stop for each in seen))


def _sum_strips(
    meetings: dict[int, Meeting],
    strips: dict[int, Strip],
    keys: dict[int, Float[Tensor, "g s d"]],
    summed: _Summed,
) -> None:
    """The weights of some queries by all heads of these layers, and each with each."""
    union = _union(list(strips.values()))
    if not union:
        return
    layers = list(meetings)
    some = meetings[layers[0]]
    rows = len(strips[layers[0]].rows)
    counts = [meetings[layer].query.shape[1] for layer in layers]
    # One more place for what a learned sink takes.
    weights = torch.zeros(sum(counts), rows, len(union) + 1, device=some.query.device)
    seen = torch.zeros(len(layers), rows, dtype=torch.bool, device=some.query.device)
    start = 0
    for place, layer in enumerate(layers):
        strip, heads = strips[layer], slice(start, start + counts[place])
        start += counts[place]
        if not strip.keys:
            continue
        met = slice(strip.keys.start - union.start, strip.keys.stop - union.start)
        powers, sink, seen[place] = _powers(meetings[layer], strip, keys[layer])
        weights[heads, :, met] = powers
        weights[heads, :, -1] = sink
    both = (seen.float() @ seen.float().T).double()
    owner = torch.repeat_interleave(torch.arange(len(layers)), torch.tensor(counts))
    owner = owner.to(some.query.device)
    if summed.measure == "cosine":
        found = _cosines(weights[..., :-1])
    else:
        found = _agreements(weights, seen[owner])
    mine = slice(summed.places[layers[0]].start, summed.places[layers[-1]].stop)
    summed.likeness[mine, mine] += found
    summed.queries[mine, mine] += both[owner][:, owner]


def _powers(
    meeting: Meeting, strip: Strip, keys: Float[Tensor, "g s d"]
) -> tuple[Float[Tensor, "h t w"], Float[Tensor, "h t"] | float, Bool[Tensor, " t"]]:
    """e to the scores below each row's largest, the sink's beside them, and who sees a key."""
    scores, visible = meeting.scores(strip, keys, range(keys.shape[0]))
    largest = scores.amax(-1, keepdim=True).clamp_(min=FAR / 10)
    powers = scores.sub_(largest).exp_()
    if meeting.request.sink is None:
        return powers, 0.0, visible > 0
    # Where a sink outweighs all keys by more than float32 can tell, it takes all there is.
    above = (meeting.request.sink.float()[:, None] - largest.squeeze(-1)).clamp(max=80.0)
    return powers, above.exp(), visible > 0


def _cosines(powers: Float[Tensor, "h t w"]) -> Float[Tensor, "h h"]:
    """Summed over queries; a row without a key has none. A sink changes no cosine."""
    norms = torch.linalg.vector_norm(powers, dim=-1, keepdim=True)
    rows = (powers / norms.clamp(min=torch.finfo(powers.dtype).tiny)).flatten(1)
    return (rows @ rows.T).double()


def _agreements(powers: Float[Tensor, "h t w"], seen: Bool[Tensor, "h t"]) -> Float[Tensor, "h h"]:
    """1 - JSD / ln 2, summed over the queries that see a key in both heads."""
    weights = powers / powers.sum(-1, keepdim=True).clamp(min=torch.finfo(powers.dtype).tiny)
    entropy = _entropy(weights)
    found = torch.zeros(len(weights), len(weights), dtype=torch.float64, device=weights.device)
    for head in range(len(weights)):
        mixed = _entropy((weights[head] + weights[head:]) / 2)
        divergence = (mixed - (entropy[head] + entropy[head:]) / 2).clamp(min=0)
        likeness = (1 - divergence / np.log(2)) * (seen[head] & seen[head:])
        found[head, head:] = found[head:, head] = likeness.double().sum(-1)
    return found


def _entropy(weights: Float[Tensor, "*h t w"]) -> Float[Tensor, "*h t"]:
    return -torch.xlogy(weights, weights).sum(-1)
