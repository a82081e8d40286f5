"""The measures of a head by name, each as one number per query, from what its weights add up to."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.addresses import Block
from manyheads.lens.meeting import Meeting
from manyheads.lens.rows import Sums, Wanted
from manyheads.lens.tally import Counted, Tally, summed_by
from manyheads.ragged import Lengths

__all__ = [
    "CLOSED",
    "NEIGHBOURS",
    "SINK_ABOVE",
    "Scope",
    "offset_name",
    "repeated",
    "tally_heads",
]

# A first token is a sink for a head that gives it more than this on average (arXiv 2410.10781).
SINK_ABOVE = 0.3
# A gate below this is closed.
CLOSED = 0.1
NEIGHBOURS = {-1: "previous_token", 0: "self", 1: "next_token"}

Measure = tuple[str, Float[Tensor, "n h"], Bool[Tensor, " n"] | None]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scope:
    """What is measured: names of the marked classes, and which queries repeat a token.

    `same` says that queries and keys are the same tokens, so that distances mean something.
    """

    classes: tuple[str, ...]
    repeats: Bool[Tensor, " n"] | None
    same: bool
    sink_above: float = SINK_ABOVE


def offset_name(offset: int) -> str:
    """
    >>> offset_name(-1), offset_name(-4), offset_name(2)
    ('previous_token', 'offset-4', 'offset+2')
    """
    return NEIGHBOURS.get(offset, f"offset{offset:+d}")


def repeated(ids: Int[Tensor, " n"], lengths: Lengths) -> Bool[Tensor, " n"]:
    """Which tokens have an earlier copy in their sequence."""
    owner = lengths.sequence_of_token
    spread = owner * (int(ids.max()) + 1 if len(ids) else 1) + ids
    _, kind = spread.unique(return_inverse=True)
    place = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(place, len(ids)).scatter_reduce(0, kind, place, "amin")
    return place > first[kind]


def tally_heads(
    tally: Tally, block: Block, meeting: Meeting, wanted: Wanted, sums: Sums, scope: Scope
) -> None:
    """Add every measure of one attention on one batch."""
    lengths = meeting.request.queries
    seen = sums.visible > 0
    measures = [*_of_weights(meeting, sums, seen), *_on_marks(sums, scope, seen)]
    if scope.same:
        measures += [*_by_place(meeting, wanted, sums, seen), *_of_repeats(sums, scope)]
    for name, values, kept in measures:
        counted = Counted(lengths.sequence_of_token, len(lengths), kept)
        tally.add(block, name, values, counted)
    for name, values, kept in _by_sequence(sums, scope, lengths, seen):
        owner = torch.arange(len(lengths), device=values.device)
        tally.add(block, name, values, Counted(owner, len(lengths), kept))


def _of_weights(meeting: Meeting, sums: Sums, seen: Bool[Tensor, " n"]) -> Iterator[Measure]:
    """How sharply a head looks, over queries that see a key."""
    yield "entropy", sums.entropy, seen
    most = sums.visible.log()[:, None]
    yield "normalized_entropy", sums.entropy / most, sums.visible > 1
    yield "effective_keys", sums.mass.square() / sums.squares, seen
    yield "max_weight", sums.largest, seen
    yield "first_token", sums.first, seen
    if meeting.request.sink is not None:
        yield "on_no_key", 1 - sums.mass, seen


def _by_place(
    meeting: Meeting, wanted: Wanted, sums: Sums, seen: Bool[Tensor, " n"]
) -> Iterator[Measure]:
    """How far a head looks; a weight at an offset counts where the sequence has such a place."""
    yield "distance", sums.distance, seen
    yield "spread", sums.variance.sqrt(), seen
    lengths = meeting.request.queries
    room = lengths.offsets.diff().long()[lengths.sequence_of_token]
    for column, offset in enumerate(wanted.offsets):
        place = lengths.positions + offset
        yield offset_name(offset), sums.offsets[..., column], (place >= 0) & (place < room)
        if offset == -1:
            # arXiv 1906.04341 divides by all queries, the first too.
            yield "previous_token_all_queries", sums.offsets[..., column], seen


def _on_marks(sums: Sums, scope: Scope, seen: Bool[Tensor, " n"]) -> Iterator[Measure]:
    for column, name in enumerate(scope.classes):
        yield f"on_{name}", sums.marks[..., column], seen


def _of_repeats(sums: Sums, scope: Scope) -> Iterator[Measure]:
    """Over the queries whose token was there before."""
    if scope.repeats is not None:
        yield "duplicate_token", sums.duplicate, scope.repeats
        yield "induction", sums.induction, scope.repeats


def _by_sequence(
    sums: Sums, scope: Scope, lengths: Lengths, seen: Bool[Tensor, " n"]
) -> Iterator[tuple[str, Float[Tensor, "b h"], Bool[Tensor, "b h"]]]:
    """One value a sequence: whether its first token is a sink, and the detector's "mul" scores."""
    all_of_them = Counted(lengths.sequence_of_token, len(lengths))
    number = summed_by(seen.double()[:, None], all_of_them)
    first, mass = (summed_by(x.double(), all_of_them) for x in (sums.first, sums.mass))
    some = (number > 0).expand_as(first)
    yield "sink", (first / number > scope.sink_above).double(), some
    if scope.same and scope.repeats is not None:
        found = summed_by(sums.induction.double(), all_of_them)
        yield "induction_score", found / mass, some & (mass > 0)
        rest = mass - first
        # What rounding leaves of nothing is nothing.
        yield "induction_score_without_first", found / rest, some & (rest > 1e-6 * mass)
