"""Redundant heads: similar in what they attend to, what they write, and their weights."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jaxtyping import Float

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.inputs.texts import Inputs, read_inputs
from manyheads.lens.redundant.outputs import output_similarity
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import ByPair, OfBlocks, Tabular, titled_table
from manyheads.lens.weights.composition import weight_similarity
from manyheads.models.build import Model
from manyheads.taps import Head, Sublayer


@dataclass(frozen=True, slots=True)
class Merge:
    """Two clusters that were merged, and their similarity: the mean over pairs across them."""

    one: tuple[int, ...]
    other: tuple[int, ...]
    similarity: float


def average_linkage(similarity: Float[np.ndarray, "h h"]) -> tuple[Merge, ...]:
    """Average-linkage clustering (UPGMA; Sokal and Michener 1958).

    Items whose similarity is NaN are never merged, nor clusters that contain such a pair.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> [(merge.one, merge.other, round(merge.similarity, 3)) for merge in merges]
    [((0,), (1,), 0.9), ((0, 1), (2,), 0.2)]
    """
    count = len(similarity)
    if similarity.shape != (count, count):
        raise InputError(
            f"similarity must be square, got shape {similarity.shape}", "give h x h values"
        )
    near = np.where(np.isnan(similarity), -np.inf, similarity).astype(np.float64)
    near = np.minimum(near, near.T)
    np.fill_diagonal(near, -np.inf)
    groups: dict[int, tuple[int, ...]] = {index: (index,) for index in range(count)}
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
        # A merged cluster is never nearer than the nearer of its parts: other rows keep their best.
        stale = np.isin(best, (left, right)) | (np.arange(count) == left)
        best[stale] = near[stale].argmax(1)
    return tuple(merges)


def cut(merges: Sequence[Merge], above: float, count: int) -> tuple[tuple[int, ...], ...]:
    """The clusters at this similarity threshold, singletons included.

    >>> merges = average_linkage(np.array([[1, 0.9, 0.1], [0.9, 1, 0.3], [0.1, 0.3, 1]]))
    >>> cut(merges, 0.5, 3)
    ((0, 1), (2,))
    """
    groups: set[tuple[int, ...]] = {(index,) for index in range(count)}
    for merge in merges:
        if merge.similarity >= above and {merge.one, merge.other} <= groups:
            groups -= {merge.one, merge.other}
            groups.add(tuple(sorted(merge.one + merge.other)))
    return tuple(sorted(groups))


KIND = "redundancy"
By = Literal["joint", "patterns", "outputs", "weights"]
SIDES = ("patterns", "outputs", "weights")


@dataclass(frozen=True, slots=True)
class DuplicatePair:
    """Two heads with similar patterns and similar outputs."""

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
class Redundancy(OfBlocks, Tabular):
    """Three similarities of each two heads, the duplicate pairs, and clusters of similar heads."""

    blocks: tuple[Block, ...]
    similarity: Mapping[str, Float[np.ndarray, "h h"]]
    duplicate_above: float
    cluster_above: float
    by: By = "joint"
    metadata: Metadata = field(default_factory=dict)

    def pairs(self, by: By | None = None) -> ByPair:
        """One similarity of all pairs; "joint" is the mean of the three, clipped at 0."""
        by = by or self.by
        return ByPair(kind=f"similarity by {by}", blocks=self.blocks, values=self._values(by))

    def of(self, one: Head | Address, other: Head | Address) -> dict[str, float]:
        """All similarities of two heads."""
        return {name: self.pairs(name).of(one, other) for name in (*SIDES, "joint")}  # type: ignore[arg-type]

    @property
    def duplicates(self) -> tuple[DuplicatePair, ...]:
        """Pairs whose patterns and outputs both reach `duplicate_above`, most similar first."""
        patterns, outputs, weights = (self.similarity[side] for side in SIDES)
        # A head that writes nothing has no direction, and is no duplicate.
        lesser = np.nan_to_num(np.minimum(patterns, outputs), nan=-1.0)
        pairs = map(tuple, np.argwhere(np.triu(lesser >= self.duplicate_above, 1)))
        names = self.addresses
        return tuple(
            DuplicatePair(
                names[pair[0]],
                names[pair[1]],
                *(float(side[pair]) for side in (patterns, outputs, weights)),
            )
            for pair in sorted(pairs, key=lambda pair: -lesser[pair])
        )

    @property
    def clusters(self) -> tuple[tuple[Address, ...], ...]:
        """Clusters of two or more heads at the threshold `cluster_above`."""
        return self.cut(self.cluster_above)

    def cut(self, above: float, by: By | None = None) -> tuple[tuple[Address, ...], ...]:
        """Clusters of two or more heads at this average similarity, largest first."""
        values = self._values(by or self.by)
        groups = cut(average_linkage(values), above, len(values))
        names = self.addresses
        several = [tuple(names[index] for index in group) for group in groups if len(group) > 1]
        return tuple(sorted(several, key=lambda group: -len(group)))

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: its most similar head, the similarities, and its cluster."""
        values = self._values(self.by).copy()
        np.fill_diagonal(values, np.nan)
        cluster = {head: index for index, group in enumerate(self.clusters) for head in group}
        records = []
        for index, address in enumerate(self.addresses):
            record: dict[str, Any] = {
                "head": str(address),
                "cluster": cluster.get(address),
                "nearest": None,
            }
            if not np.isnan(values[index]).all():
                nearest = int(np.nanargmax(values[index]))
                record["nearest"] = str(self.addresses[nearest])
                record["joint"] = float(self._values("joint")[index, nearest])
                record |= {side: float(self.similarity[side][index, nearest]) for side in SIDES}
            records.append(record)
        return records

    def table(self, max_rows: int = 40) -> Any:
        """A rich table of `rows`, heads most similar to another first."""
        table = titled_table(KIND, ["head", "nearest"], ["joint", *SIDES, "cluster"])
        rows = sorted(self.rows(), key=lambda row: -row.get("joint", -np.inf))
        for row in rows[:max_rows]:
            cells = [f"{row[name]:.2f}" if name in row else "-" for name in ("joint", *SIDES)]
            group = "-" if row["cluster"] is None else str(row["cluster"])
            table.add_row(row["head"], row["nearest"] or "-", *cells, group)
        return table

    def _lines(self) -> Iterator[str]:
        pairs, clusters = self.duplicates, self.clusters
        counts = f"{len(pairs)} duplicate pairs, {len(clusters)} clusters"
        yield f"{len(self.addresses)} heads: {counts}"
        for pair in pairs[:10]:
            yield f"  {pair}"
        for index, group in enumerate(clusters[:10]):
            yield f"  cluster {index}: {', '.join(map(str, group))}"

    def _values(self, by: By) -> Float[np.ndarray, "h h"]:
        if by in SIDES:
            return self.similarity[by]
        if by != "joint":
            raise InputError(f"there is no similarity by {by!r}", f"use joint, {', '.join(SIDES)}")
        sides = [np.maximum(self.similarity[side], 0.0) for side in SIDES]
        return np.asarray(np.mean(sides, axis=0))


@wrapping_models
def redundancy(
    model: Model,
    texts: Inputs,
    *,
    duplicate_above: float = 0.9,
    cluster_above: float = 0.7,
    by: By = "joint",
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Redundancy:
    """Heads that are redundant, within a layer and across layers.

    For each two heads: the cosine of their patterns ("patterns", see `overlap`), the cosine of what
    they write ("outputs", see `output_similarity`), and the overlap of the subspaces they write to
    ("weights", see `weight_similarity`). Two heads are duplicates if patterns and outputs both
    reach `duplicate_above`; clusters come from average linkage of the similarity `by`, cut at
    `cluster_above` (Clark et al., arXiv 1906.04341; Voita et al., arXiv 1905.09418).

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> redundancy(model, [[5, 6, 7, 8, 9]]).duplicates
    ()
    """
    for name, value in (("duplicate_above", duplicate_above), ("cluster_above", cluster_above)):
        if not 0 < value <= 1:
            raise InputError(
                f"{name} must be in (0, 1], got {value}", "use a value above 0, at most 1"
            )
    inputs = read_inputs(model, texts)
    shared: dict[str, Any] = {"stack": stack, "sublayer": sublayer, "progress": progress}
    seen = overlap(model, inputs, batch_tokens=batch_tokens, **shared)
    written = output_similarity(model, inputs, batch_tokens=batch_tokens, **shared)
    weights = weight_similarity(model, "writes", **shared)
    complete = seen.metadata["complete"] and written.metadata["complete"]
    return Redundancy(
        blocks=seen.blocks,
        similarity={"patterns": seen.values, "outputs": written.values, "weights": weights.values},
        duplicate_above=duplicate_above,
        cluster_above=cluster_above,
        by=by,
        metadata={
            "texts": seen.metadata["texts"],
            "tokens": seen.metadata["tokens"],
            "complete": complete,
        },
    )
