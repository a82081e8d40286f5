"""Which heads do the same: by what they look at, what they write, and the weights they have."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.inputs.batches import gather
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.redundant.outputs import resemble_outputs
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.by_pair import ByPair
from manyheads.lens.results.files import Facts
from manyheads.lens.weights.composition import resemble
from manyheads.models.build import Model
from manyheads.taps import Head, Sublayer


@dataclass(frozen=True, slots=True)
class Merge:
    """Two groups that became one, and how alike they were: the mean over pairs across them."""

    one: tuple[int, ...]
    other: tuple[int, ...]
    likeness: float


def average_linkage(likeness: Float[np.ndarray, "h h"]) -> tuple[Merge, ...]:
    """Join the two groups most alike, again and again (UPGMA; Sokal and Michener 1958).

    Things that have no likeness (NaN) are never joined, nor groups that hold such a pair.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> [(merge.one, merge.other, round(merge.likeness, 3)) for merge in merges]
    [((0,), (1,), 0.9), ((0, 1), (2,), 0.2)]
    """
    count = len(likeness)
    if likeness.shape != (count, count):
        raise InputError(f"likeness of shape {likeness.shape} is of no pairs", "give h x h values")
    near = np.where(np.isnan(likeness), -np.inf, likeness).astype(np.float64)
    near = np.minimum(near, near.T)
    np.fill_diagonal(near, -np.inf)
    groups: dict[int, tuple[int, ...]] = {place: (place,) for place in range(count)}
    best = near.argmax(1) if count else np.zeros(0, dtype=int)
    merges = []
    while len(groups) > 1:
        left = int(near[np.arange(count), best].argmax())
        right = int(best[left])
        if near[left, right] == -np.inf:
            break
        left, right = sorted((left, right))
        merges.append(Merge(groups[left], groups[right], float(near[left, right])))
        sizes = len(groups[left]), len(groups[right])
        joined = (sizes[0] * near[left] + sizes[1] * near[right]) / sum(sizes)
        joined[left] = joined[right] = -np.inf
        near[left, :] = near[:, left] = joined
        near[right, :] = near[:, right] = -np.inf
        groups[left] = tuple(sorted(groups[left] + groups.pop(right)))
        # The joined group is to no other nearer than the nearer of its two: the rest keep theirs.
        stale = np.isin(best, (left, right)) | (np.arange(count) == left)
        best[stale] = near[stale].argmax(1)
    return tuple(merges)


def cut(merges: Sequence[Merge], above: float, count: int) -> tuple[tuple[int, ...], ...]:
    """The groups whose parts are at least so much alike, singles too, in order.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> cut(merges, 0.5, 3)
    ((0, 1), (2,))
    """
    groups: set[tuple[int, ...]] = {(place,) for place in range(count)}
    for merge in merges:
        if merge.likeness >= above and {merge.one, merge.other} <= groups:
            groups -= {merge.one, merge.other}
            groups.add(tuple(sorted(merge.one + merge.other)))
    return tuple(sorted(groups))


KIND = "redundancy"
By = Literal["joint", "patterns", "outputs", "weights"]
SIDES = ("patterns", "outputs", "weights")


@dataclass(frozen=True, slots=True)
class Double:
    """Two heads that look at the same and write the same, and how alike they are."""

    one: Address
    other: Address
    patterns: float
    outputs: float
    weights: float

    def __str__(self) -> str:
        return (
            f"{self.one} and {self.other}: patterns {self.patterns:.2f}, "
            f"outputs {self.outputs:.2f}, weights {self.weights:.2f}"
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Redundancy(Tabular):
    """Three likenesses of each two heads, the pairs that are doubled, and groups of like heads."""

    blocks: tuple[Block, ...]
    likeness: Mapping[str, Float[np.ndarray, "h h"]]
    double_above: float
    cluster_above: float
    by: By = "joint"
    facts: Facts = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def pairs(self, by: By | None = None) -> ByPair:
        """One likeness of all pairs; "joint" is the mean of the three, no cosine below 0."""
        by = by or self.by
        return ByPair(kind=f"likeness by {by}", blocks=self.blocks, values=self._values(by))

    def of(self, one: Head | Address, other: Head | Address) -> dict[str, float]:
        """Every likeness of two heads."""
        return {name: self.pairs(name).of(one, other) for name in (*SIDES, "joint")}  # type: ignore[arg-type]

    @property
    def doubles(self) -> tuple[Double, ...]:
        """Pairs whose patterns and outputs are both alike by `double_above`, most alike first."""
        patterns, outputs, weights = (self.likeness[side] for side in SIDES)
        # A head that writes nothing has no direction, and doubles nobody.
        lesser = np.nan_to_num(np.minimum(patterns, outputs), nan=-1.0)
        found = [
            (one, other)
            for one, other in np.argwhere(np.triu(lesser >= self.double_above, 1))
            if one != other
        ]
        names = self.addresses
        return tuple(
            Double(
                names[one],
                names[other],
                float(patterns[one, other]),
                float(outputs[one, other]),
                float(weights[one, other]),
            )
            for one, other in sorted(found, key=lambda pair: -lesser[pair])
        )

    @property
    def clusters(self) -> tuple[tuple[Address, ...], ...]:
        """Groups of two and more heads alike by `cluster_above`."""
        return self.cut(self.cluster_above)

    def cut(self, above: float, by: By | None = None) -> tuple[tuple[Address, ...], ...]:
        """Groups of two and more whose parts are on average so much alike, largest first."""
        values = self._values(by or self.by)
        groups = cut(average_linkage(values), above, len(values))
        names = self.addresses
        several = [tuple(names[place] for place in group) for group in groups if len(group) > 1]
        return tuple(sorted(several, key=lambda group: -len(group)))

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: the head most like it, how much, and the number of its cluster."""
        values = self._values(self.by).copy()
        np.fill_diagonal(values, np.nan)
        cluster = {head: place for place, group in enumerate(self.clusters) for head in group}
        records = []
        for place, address in enumerate(self.addresses):
            record: dict[str, Any] = {
                "head": str(address),
                "cluster": cluster.get(address),
                "nearest": None,
            }
            if not np.isnan(values[place]).all():
                nearest = int(np.nanargmax(values[place]))
                record["nearest"] = str(self.addresses[nearest])
                record["joint"] = float(self._values("joint")[place, nearest])
                record |= {side: float(self.likeness[side][place, nearest]) for side in SIDES}
            records.append(record)
        return records

    def table(self, max_rows: int = 40) -> Any:
        """A rich table of `rows`, heads most like another first."""
        from rich.table import Table

        table = Table("head", "nearest", box=None, pad_edge=False, title=KIND, title_justify="left")
        for name in ("joint", *SIDES, "cluster"):
            table.add_column(name, justify="right")
        rows = sorted(self.rows(), key=lambda row: -row.get("joint", -np.inf))
        for row in rows[:max_rows]:
            told = [f"{row[name]:.2f}" if name in row else "-" for name in ("joint", *SIDES)]
            group = "-" if row["cluster"] is None else str(row["cluster"])
            table.add_row(row["head"], row["nearest"] or "-", *told, group)
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        heads = len(self.addresses)
        yield f"{heads} heads: {len(self.doubles)} doubled pairs, {len(self.clusters)} clusters"
        for double in self.doubles[:10]:
            yield f"  {double}"
        for place, group in enumerate(self.clusters[:10]):
            yield f"  cluster {place}: {', '.join(map(str, group))}"

    def _values(self, by: By) -> Float[np.ndarray, "h h"]:
        if by in SIDES:
            return self.likeness[by]
        if by != "joint":
            raise InputError(f"by={by!r} is no likeness", f"use joint, {', '.join(SIDES)}")
        sides = [np.maximum(self.likeness[side], 0.0) for side in SIDES]
        return np.asarray(np.mean(sides, axis=0))


def redundancy(
    model: Model,
    texts: Any,
    *,
    double_above: float = 0.9,
    cluster_above: float = 0.7,
    by: By = "joint",
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Redundancy:
    """Heads that do the same, in one layer and across layers.

    Of each two heads: the cosine of their patterns ("patterns", see `overlap`), the cosine of what
    they write ("outputs", see `resemble_outputs`), and how far they write to the same subspace
    ("weights", see `resemble`). Two heads are doubled where patterns and outputs are both alike by
    `double_above`; groups come from average linkage of the likeness `by`, cut at `cluster_above`
    (Clark et al., arXiv 1906.04341, and Voita et al., arXiv 1905.09418, on heads that repeat each
    other).

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> redundancy(model, [[5, 6, 7, 8, 9]]).doubles
    ()
    """
    for name, value in (("double_above", double_above), ("cluster_above", cluster_above)):
        if not 0 < value <= 1:
            raise InputError(f"{name}={value} is no likeness", "use one above 0 and up to 1")
    given = gather(model, texts)
    seen = overlap(
        model,
        given,
        stack=stack,
        sublayer=sublayer,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    written = resemble_outputs(
        model,
        given,
        stack=stack,
        sublayer=sublayer,
        batch_tokens=batch_tokens,
        progress=progress,
    )
    weights = resemble(model, "writes", stack=stack, sublayer=sublayer)
    facts = seen.facts | {"complete": seen.facts["complete"] and written.facts["complete"]}
    return Redundancy(
        blocks=seen.blocks,
        likeness={"patterns": seen.values, "outputs": written.values, "weights": weights.values},
        double_above=double_above,
        cluster_above=cluster_above,
        by=by,
        facts={name: facts[name] for name in ("texts", "tokens", "complete")},
    )
