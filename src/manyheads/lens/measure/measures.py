"""The measures of a head: their values from the sums of each row, and sums over all texts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.lens.measure.row_sums import RowSums, RowSumSpec
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.results.addresses import Block
from manyheads.ragged import ContextShard, Lengths


@dataclass(frozen=True, slots=True, eq=False)
class SequenceGroups:
    """To which of `sequences` sequences each value belongs, and which values are `valid`.

    With a `shard` other processes have the other values of the sequences.
    """

    owner: Int[Tensor, " n"]
    sequences: int
    valid: Bool[Tensor, " n"] | Bool[Tensor, "n h"] | None = None
    shard: ContextShard | None = None

    @classmethod
    def of(
        cls, lengths: Lengths, valid: Bool[Tensor, " n"] | Bool[Tensor, "n h"] | None = None
    ) -> "SequenceGroups":
        """Of one value per token."""
        return cls(lengths.sequence_of_token, len(lengths), valid, lengths.shard)


@dataclass(slots=True, eq=False)
class MeasureSums:
    """Sums by attention and measure that give means and standard errors; batches can be merged.

    For the values x of N queries in sequences b with sums S_b of N_b values, these are in float64
    N, sum x, sum x^2, the number of sequences, sum S_b^2, sum S_b N_b and sum N_b^2.
    """

    sums: dict[tuple[Block, str], Float[Tensor, "7 h"]] = field(default_factory=dict)

    def add(
        self, block: Block, name: str, values: Float[Tensor, "n h"], groups: SequenceGroups
    ) -> None:
        """Add the values of one batch, one per query and head."""
        x = values.double()
        if groups.valid is None:
            weight = torch.ones_like(x)
        else:
            valid = groups.valid if groups.valid.dim() == 2 else groups.valid[:, None]
            weight = valid.double().expand_as(x)
            x = torch.where(valid, x, 0.0)
        if groups.shard is None:
            by, number = sum_by_sequence(x, groups), sum_by_sequence(weight, groups)
            squares = x.square().sum(0)
        else:
            # All at once: each sum is a message.
            joined = torch.cat((x, weight, x.square()), dim=1)
            by, number, by_square = sum_by_sequence(joined, groups).chunk(3, dim=1)
            squares = by_square.sum(0)
        parts = (
            number.sum(0),
            by.sum(0),
            squares,
            (number > 0).double().sum(0),
            by.square().sum(0),
            (by * number).sum(0),
            number.square().sum(0),
        )
        self._add((block, name), torch.stack(parts))

    def add_columns(
        self,
        block: Block,
        names: Sequence[str],
        values: Float[Tensor, "n h columns"],
        groups: SequenceGroups,
    ) -> None:
        """The same for several measures at once; `valid` has a column for each."""
        assert groups.valid is not None, "each measure counts for queries of its own"
        valid = groups.valid[:, None].expand(values.shape).flatten(1)
        heads = MeasureSums()
        wide = Block(block.layer, values.shape[1] * len(names), block.stack, block.sublayer)
        heads.add(wide, "", values.flatten(1), replace(groups, valid=valid))
        columns = heads.sums[wide, ""].unflatten(1, (values.shape[1], len(names)))
        for name, sums in zip(names, columns.unbind(2), strict=True):
            self._add((block, name), sums)

    def merge(self, other: "MeasureSums") -> None:
        for key, sums in other.sums.items():
            self._add(key, sums)

    def _add(self, key: tuple[Block, str], sums: Float[Tensor, "7 h"]) -> None:
        self.sums[key] = self.sums[key] + sums if key in self.sums else sums

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for _, name in self.sums))

    def means(self, blocks: tuple[Block, ...], name: str) -> Float[np.ndarray, " h"]:
        """Means over all valid values; NaN for heads without any."""
        return _concatenate([_mean(self._get(block, name)) for block in blocks])

    def errors(
        self, blocks: tuple[Block, ...], name: str, *, over_sequences: bool
    ) -> Float[np.ndarray, " h"]:
        """Standard errors of the means.

        Over sequences, the queries of a sequence may depend on each other (the ratio estimator for
        clusters); over queries, all are taken as independent.
        """
        error = _error_over_sequences if over_sequences else _error_over_queries
        sums = [self._get(block, name) for block in blocks]
        return error(torch.cat(sums, dim=1)).numpy() if sums else _concatenate([])

    def _get(self, block: Block, name: str) -> Float[Tensor, "7 h"]:
        none = torch.zeros(7, block.heads, dtype=torch.float64)
        return self.sums.get((block, name), none).cpu()


def sum_by_sequence(values: Float[Tensor, "n h"], groups: SequenceGroups) -> Float[Tensor, "b h"]:
    """Sum the values of each sequence."""
    if groups.sequences == 1:
        # On a GPU, adding all rows to the same index would serialize them.
        summed = values.sum(0, keepdim=True)
    else:
        zeros = values.new_zeros(groups.sequences, values.shape[1])
        summed = zeros.index_add(0, groups.owner, values)
    return summed if groups.shard is None else groups.shard.reduce(summed)


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


def _concatenate(parts: list[Float[Tensor, " _"]]) -> Float[np.ndarray, " h"]:
    joined = torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
    return joined.numpy()


# The first token is a sink of a head whose mean weight on it exceeds this (arXiv 2410.10781).
SINK_ABOVE = 0.3
# A gate below this counts as closed.
GATE_CLOSED_BELOW = 0.1
NEIGHBORS = {-1: "previous_token", 0: "self", 1: "next_token"}

# Offsets whose values are added in one go.
OFFSETS_AT_ONCE = 8
# The smallest weight on keys that is more than rounding error.
LEAST_MASS = 1e-6

MeasureValues = tuple[str, Float[Tensor, "n h"], Bool[Tensor, " n"] | Bool[Tensor, "n h"] | None]


# Those of the spread of each row, which cost more than any others.
OF_SPREAD = frozenset({"effective_keys", "distance", "spread"})
# What is NaN where no head of a model has a pattern.
OF_PATTERNS = (
    "entropy",
    "normalized_entropy",
    "effective_keys",
    "max_weight",
    "distance",
    "spread",
    "first_token",
    "sink",
    "previous_token_all_queries",
    "duplicate_token",
    "induction",
    "induction_score",
    "induction_score_without_first",
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class MeasureScope:
    """What to measure: the names of the marked classes, and which queries repeat a token.

    `same` says that queries and keys are the same tokens, so that distances are defined. Measures
    other than `only` these are left out (None: none is).
    """

    classes: tuple[str, ...]
    repeats: Bool[Tensor, " n"] | None
    same: bool
    sink_above: float = SINK_ABOVE
    only: frozenset[str] | None = None

    def wants(self, name: str) -> bool:
        return self.only is None or name in self.only


def offset_name(offset: int) -> str:
    """
    >>> offset_name(-1), offset_name(-4), offset_name(2)
    ('previous_token', 'offset-4', 'offset+2')
    """
    return NEIGHBORS.get(offset, f"offset{offset:+d}")


def has_earlier_copy(ids: Int[Tensor, " n"], lengths: Lengths) -> Bool[Tensor, " n"]:
    """Which tokens have an earlier copy in their sequence."""
    owner = lengths.sequence_of_token
    unique_ids = owner * (int(ids.max()) + 1 if len(ids) else 1) + ids
    _, kind = unique_ids.unique(return_inverse=True)
    index = torch.arange(len(ids), device=ids.device)
    first = torch.full_like(index, len(ids)).scatter_reduce(0, kind, index, "amin")
    return index > first[kind]


def add_measures(
    totals: MeasureSums,
    block: Block,
    tiled: TiledScores,
    spec: RowSumSpec,
    sums: RowSums,
    scope: MeasureScope,
) -> None:
    """Add every measure of one attention on one batch."""
    lengths = tiled.request.queries
    for name, values, valid in _query_measures(tiled, spec, sums, scope):
        if scope.wants(name):
            totals.add(block, name, values, SequenceGroups.of(lengths, valid))
    if scope.same and spec.offsets:
        _add_offsets(totals, block, spec.offsets, sums, lengths)
    for name, values, valid in _sequence_measures(sums, scope, lengths):
        if not scope.wants(name):
            continue
        owner = torch.arange(len(lengths), device=values.device)
        totals.add(block, name, values, SequenceGroups(owner, len(lengths), valid))


def _query_measures(
    tiled: TiledScores, spec: RowSumSpec, sums: RowSums, scope: MeasureScope
) -> Iterator[MeasureValues]:
    """One value per query and head, and the queries for which it counts."""
    sees_key = sums.visible > 0
    # Queries that attend to keys at all, and do not give everything to a learned sink.
    attends = sees_key[:, None] & (sums.mass > LEAST_MASS)
    yield "entropy", sums.entropy, sees_key
    yield "normalized_entropy", sums.entropy / sums.visible.log()[:, None], sums.visible > 1
    yield "effective_keys", sums.mass.square() / sums.squares, attends
    yield "max_weight", sums.largest, sees_key
    yield "first_token", sums.first, sees_key
    if tiled.request.sink is not None:
        yield "on_no_key", 1 - sums.mass, sees_key
    for column, name in enumerate(scope.classes):
        yield f"on_{name}", sums.marks[..., column], sees_key
    if not scope.same:
        return
    yield "distance", sums.distance, sees_key
    yield "spread", sums.variance.sqrt(), attends
    if sums.memory is not None:
        yield "memory_length", sums.memory, attends
    if -1 in spec.offsets:
        # arXiv 1906.04341 divides by all queries, including the first.
        previous = sums.offsets[..., spec.offsets.index(-1)]
        yield "previous_token_all_queries", previous, sees_key
    if scope.repeats is not None:
        yield "duplicate_token", sums.duplicate, scope.repeats
        yield "induction", sums.induction, scope.repeats


def _text_lengths(lengths: Lengths) -> Int[Tensor, " b"]:
    if lengths.shard is None:
        return lengths.offsets.diff().long()
    return torch.tensor(lengths.shard.lengths, device=lengths.offsets.device)


def _add_offsets(
    totals: MeasureSums,
    block: Block,
    offsets: tuple[int, ...],
    sums: RowSums,
    lengths: Lengths,
) -> None:
    """The weight at each offset, which counts for queries that have a token there."""
    length = _text_lengths(lengths)[lengths.sequence_of_token]
    key = lengths.positions[:, None] + torch.tensor(offsets, device=lengths.positions.device)
    valid = (key >= 0) & (key < length[:, None])
    # In float64 they would take much memory all at once.
    for columns in range(0, len(offsets), OFFSETS_AT_ONCE):
        part = slice(columns, columns + OFFSETS_AT_ONCE)
        totals.add_columns(
            block,
            list(map(offset_name, offsets[part])),
            sums.offsets[..., part],
            SequenceGroups.of(lengths, valid[:, part]),
        )


def _sequence_measures(
    sums: RowSums, scope: MeasureScope, lengths: Lengths
) -> Iterator[tuple[str, Float[Tensor, "b h"], Bool[Tensor, "b h"]]]:
    """One value per sequence: whether its first token is a sink, and the detector's scores."""
    every_query = SequenceGroups.of(lengths)
    number = sum_by_sequence((sums.visible > 0).double()[:, None], every_query)
    first, mass = (sum_by_sequence(x.double(), every_query) for x in (sums.first, sums.mass))
    has_queries = (number > 0).expand_as(first)
    yield "sink", (first / number > scope.sink_above).double(), has_queries
    if scope.same and scope.repeats is not None:
        induction = sum_by_sequence(sums.induction.double(), every_query)
        yield "induction_score", induction / mass, has_queries & (mass > 0)
        rest = mass - first
        # Per head: a text counts for the heads that have weight left. So little is rounding error.
        has_rest = has_queries & (rest > LEAST_MASS * mass)
        yield "induction_score_without_first", induction / rest, has_rest
