"""Heads that matter for a task: effects on held-out halves, and which are induction heads."""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Bool, Float

from manyheads.encoding.text_reader import require_text_model
from manyheads.formatting import listed, plain_table, pluralise, without_nan
from manyheads.lens.causal.gradient_importance import rank_correlation
from manyheads.lens.head_kinds import criteria, head_tests
from manyheads.lens.head_kinds.stored_tests import storable_fingerprint
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import ByHead
from manyheads.models import build
from manyheads.taps import Head

Scores = Float[np.ndarray, " h"]
RESAMPLES = 2000
# Sets of random heads that chosen ones are compared with.
RANDOM_SETS = 3
MAX_NAMES = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutEffect:
    """A mean over tasks or texts that did not choose the heads, with its 95% interval.

    The interval is that of a bootstrap over `samples` tasks or texts.

    >>> effect = HeldOutEffect.of([0.5, 0.7, 0.6])
    >>> round(effect.mean, 3), effect.low <= effect.mean <= effect.high, effect.samples
    (0.6, True, 3)
    """

    mean: float
    low: float
    high: float
    samples: int

    @classmethod
    def of(cls, values: Sequence[float] | np.ndarray) -> "HeldOutEffect":
        array = np.asarray(values, dtype=float)
        rows = np.random.default_rng(0).integers(len(array), size=(RESAMPLES, len(array)))
        low, high = np.quantile(array[rows].mean(1), (0.025, 0.975))
        return cls(mean=float(array.mean()), low=float(low), high=float(high), samples=len(array))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f} to {self.high:.3f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class InductionOverlap:
    """How many of the heads are induction heads, beside chance, and where both kinds are.

    `rank_correlation` is Spearman's, of both scores over all heads. Depths are means of
    layer / (layers - 1), 0 for the first layer and 1 for the last; NaN without heads.
    """

    heads: int
    induction: int
    both: int
    by_chance: float
    rank_correlation: float
    depth: float
    induction_depth: float


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class TaskHeads(ByHead):
    """The score of each head in a task, and its score as an induction head ("induction").

    `heads` are those chosen by all tasks or texts. For `held_out` they are chosen twice, by one
    half and by the other, and each half measures the heads that the other has chosen.
    """

    heads: tuple[Head, ...] = ()
    induction_heads: tuple[Head, ...] = ()
    held_out: dict[str, HeldOutEffect] = field(default_factory=dict)

    @property
    def overlap(self) -> InductionOverlap:
        """How the heads overlap with the induction heads of `lens.kinds`."""
        count = len(self.addresses)
        deepest = max(1, self.metadata["layers"] - 1)
        scores, induction = self[self.names[0]], self["induction"]

        def depth(heads: Sequence[Head]) -> float:
            return float(np.mean([head.layer / deepest for head in heads])) if heads else np.nan

        return InductionOverlap(
            heads=len(self.heads),
            induction=len(self.induction_heads),
            both=len(set(self.heads) & set(self.induction_heads)),
            by_chance=len(self.heads) * len(self.induction_heads) / count,
            rank_correlation=rank_correlation(scores.means, induction.means),
            depth=depth(self.heads),
            induction_depth=depth(self.induction_heads),
        )

    @property
    def problem(self) -> str:
        """Why there are no heads, if there are none."""
        return str(self.metadata.get("problem", ""))

    def held_out_table(self) -> Any:
        """A rich table of the effects on the halves that did not choose the heads."""
        rows = [
            [name, f"{effect.mean:.3f}", f"{effect.low:.3f} to {effect.high:.3f}"]
            for name, effect in self.held_out.items()
        ]
        return plain_table(["on held-out halves"], ["mean", "95%"], rows)

    def _lines(self) -> Iterator[str]:
        share = f"{len(self.heads)} of {len(self.addresses)} heads"
        yield f"{self.kind}: {share}" + (f" ({self.problem})" if self.problem else "")
        if self.heads:
            yield f"  {listed([*map(str, self.heads)], MAX_NAMES)}"
        overlap = self.overlap
        yield (
            f"  {pluralise(overlap.both, 'induction head')} among them, "
            f"{overlap.by_chance:.1f} by chance"
        )
        if self.held_out:
            yield f"  {self.metadata['measure']} on held-out halves:"
        for name, effect in self.held_out.items():
            yield f"    {name}  {effect}"

    def _summary(self) -> Metadata:
        return dict(without_nan({"overlap": asdict(self.overlap)}))


@dataclass(frozen=True, slots=True, eq=False)
class InductionScores:
    """The induction score of every head, and which pass the threshold of `lens.kinds`."""

    scores: Scores
    passes: Bool[np.ndarray, " h"]

    @classmethod
    def of(cls, model: build.Model, seed: int, progress: bool) -> "InductionScores":
        tests = head_tests.HeadTests(
            model, criteria.threshold_table(), progress, storable_fingerprint(model)
        )
        reader = require_text_model(model)
        head_tests.measure_repeats(tests, reader, head_tests.SEQUENCES, seed, positional=False)
        kind = next(kind for kind in tests.scores if kind.kind == "induction")
        passes = [not kind.refusal(index) for index in range(len(kind.scores))]
        return cls(kind.scores, np.array(passes))

    def strongest(self, count: int, without: Sequence[int]) -> list[int]:
        """The heads with the largest scores that are not among some."""
        order = np.argsort(-np.nan_to_num(self.scores), kind="stable").tolist()
        return [index for index in order if index not in set(without)][:count]


def random_sets(heads: int, size: int, without: Sequence[int], seed: int) -> list[list[int]]:
    """Sets of so many random heads that are not among some.

    >>> [len(chosen) for chosen in random_sets(10, 2, [0, 1], seed=0)]
    [2, 2, 2]
    """
    rest = np.setdiff1d(np.arange(heads), np.array(without, dtype=int))
    draw = np.random.default_rng(seed)
    size = min(size, len(rest))
    return [draw.choice(rest, size, replace=False).tolist() for _ in range(RANDOM_SETS)]
