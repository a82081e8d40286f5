"""The measures of a head by name, each as one number per query, from what its weights add up to."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.measure.row_sums import Sums, Wanted
from manyheads.lens.measure.score_tiles import Meeting
from manyheads.lens.results.addresses import Block
from manyheads.ragged import Lengths


@dataclass(frozen=True, slots=True, eq=False)
class Counted:
    """Which values count, and to which of `sequences` sequences each belongs."""

    owner: Int[Tensor, " n"]
    sequences: int
    kept: Bool[Tensor, " n"] | Bool[Tensor, "n h"] | None = None


@dataclass(slots=True, eq=False)
class Tally:
    """Sums by attention and measure, from which means and errors follow; two tallies add up.

    Of the values x of N queries in sequences b with sums S_b of N_b values it keeps, in float64,
    N, sum x, sum x^2, the number of sequences, sum S_b^2, sum S_b N_b and sum N_b^2.
    """

    sums: dict[tuple[Block, str], Float[Tensor, "7 h"]] = field(default_factory=dict)

    def add(self, block: Block, name: str, values: Float[Tensor, "n h"], counted: Counted) -> None:
        """Values of one batch, one a query and head."""
        x = values.double()
        if counted.kept is None:
            weight = torch.ones_like(x)
        else:
            kept = counted.kept if counted.kept.dim() == 2 else counted.kept[:, None]
            weight = kept.double().expand_as(x)
            x = torch.where(kept, x, 0.0)
        by, number = summed_by(x, counted), summed_by(weight, counted)
        parts = (
            number.sum(0),
            by.sum(0),
            x.square().sum(0),
            (number > 0).double().sum(0),
            by.square().sum(0),
            (by * number).sum(0),
            number.square().sum(0),
        )
        self._put((block, name), torch.stack(parts))

    def merge(self, other: "Tally") -> None:
        for key, sums in other.sums.items():
            self._put(key, sums)

    def _put(self, key: tuple[Block, str], sums: Float[Tensor, "7 h"]) -> None:
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.sums))

    def means(self, blocks: tuple[Block, ...], name: str) -> Float[np.ndarray, " h"]:
        """Sum over number of all values that count; NaN for heads that have none."""
        return _joined([_mean(self._of(block, name)) for block in blocks])

    def errors(
        self, blocks: tuple[Block, ...], name: str, *, over_sequences: bool
    ) -> Float[np.ndarray, " h"]:
        """Standard errors of the means.

        Over sequences, queries of one sequence may depend on each other as they like (the ratio
        estimator for clusters); over queries, each is taken to be drawn by itself.
        """
        error = _error_over_sequences if over_sequences else _error_over_queries
        return _joined([error(self._of(block, name)) for block in blocks])

    def _of(self, block: Block, name: str) -> Float[Tensor, "7 h"]:
        none = torch.zeros(7, block.heads, dtype=torch.float64)
        return self.sums.get((block, name), none).cpu()


def summed_by(values: Float[Tensor, "n h"], counted: Counted) -> Float[Tensor, "b h"]:
    """The values of each sequence added up."""
    if counted.sequences == 1:
        # Adding row after row to one place, they would wait for each other on a GPU.
        return values.sum(0, keepdim=True)
    zeros = values.new_zeros(counted.sequences, values.shape[1])
    return zeros.index_add(0, counted.owner, values)


def _mean(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    return sums[1] / sums[0]


def _error_over_sequences(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    number, _, _, sequences, by, crossed, numbers = sums
    mean = _mean(sums)
    scatter = (by - 2 * mean * crossed + mean.square() * numbers).clamp(min=0)
    error = (scatter * sequences / (sequences - 1)).sqrt() / number
    return torch.where(sequences > 1, error, torch.nan)


def _error_over_queries(sums: Float[Tensor, "7 h"]) -> Float[Tensor, " h"]:
    number, _, squares = sums[:3]
    scatter = (squares / number - _mean(sums).square()).clamp(min=0)
    return torch.where(number > 1, (scatter / (number - 1)).sqrt(), torch.nan)


def _joined(each: list[Float[Tensor, " _"]]) -> Float[np.ndarray, " h"]:
    joined = torch.cat(each) if each else torch.zeros(0, dtype=torch.float64)
    return joined.numpy()


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
