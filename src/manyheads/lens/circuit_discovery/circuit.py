"""Circuits: how much each edge between the parts of a model carries, and which of them suffice."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import require_native, wrapping_models
from manyheads.errors import InputError, check_int
from manyheads.formatting import pluralise
from manyheads.lens.causal.gradient_importance import rank_correlation
from manyheads.lens.circuit_discovery.circuit_pairs import CircuitPairs
from manyheads.lens.circuit_discovery.edge_scores import Level, Method, expected_runs, score_batch
from manyheads.lens.circuit_discovery.graph import Edge, Graph, Mask
from manyheads.lens.circuit_discovery.pair_runs import Replacement
from manyheads.lens.inputs import metrics
from manyheads.lens.inputs.texts import Inputs, Targets
from manyheads.lens.results.files import Metadata, Result
from manyheads.lens.results.tables import Tabular, format_change
from manyheads.models.build import Model
from manyheads.progress import Progress

# The fractions of all edges at which the benchmark MIB (arXiv 2504.13151) evaluates circuits.
FRACTIONS = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0)
# Standard errors that a difference must exceed to count, and the agreement of two halves.
MIN_ERRORS, MIN_AGREEMENT = 3.0, 0.2
Ranking = Literal["absolute", "signed"]
FloatTable = Float[np.ndarray, "readers writers"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class FaithfulnessCurve(Result):
    """How much of the metric circuits of growing size keep: 1 is the clean run, 0 the corrupted.

    `complements` are those of all edges that are not in the circuit: near 0 if it is complete.
    `cpr` is the area under the curve and `cmd` that between the curve and 1, as in MIB.
    """

    fractions: tuple[float, ...]
    counts: tuple[int, ...]
    faithfulness: Float[np.ndarray, " k"]
    errors: Float[np.ndarray, " k"]
    complements: Float[np.ndarray, " k"]
    complement_errors: Float[np.ndarray, " k"]
    cpr: float
    cmd: float

    def __str__(self) -> str:
        lines = [f"faithfulness by size: CPR {self.cpr:.3f}, CMD {self.cmd:.3f}"]
        for place, (fraction, count) in enumerate(zip(self.fractions, self.counts, strict=True)):
            whole = format_change(self.faithfulness[place], self.errors[place])
            rest = format_change(self.complements[place], self.complement_errors[place])
            lines.append(f"  {100 * fraction:5.1f} %  {count:7,}  {whole}  without them {rest}")
        return "\n".join(lines)

    __repr__ = __str__


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class Circuit(Tabular):
    """The score of each edge, or of each writer: how much worse the metric is without it.

    `scores` and `errors` have a row per reader and a column per writer, NaN where no edge is
    possible; at level "head" the only row is the output of the writers. A positive score helps the
    metric. `clean` and `corrupted` are its means in both runs.
    """

    writers: tuple[str, ...]
    readers: tuple[str, ...]
    scores: Float[np.ndarray, "readers writers"]
    errors: Float[np.ndarray, "readers writers"]
    method: Method
    level: Level
    metric: str
    clean: float
    corrupted: float
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        shape = len(self.readers), len(self.writers)
        if self.scores.shape != shape or self.errors.shape != shape:
            raise InputError(f"the scores have the shape {self.scores.shape}, not {shape}")

    # What was measured.

    @property
    def warning(self) -> str:
        """Why the scores may be noise; empty if nothing says so."""
        effect, error = self.metadata["effect"], self.metadata["effect_error"]
        if not np.isnan(error) and abs(effect) < MIN_ERRORS * error:
            return (
                f"the metric differs between both runs by {format_change(effect, error)}: this is "
                "not more than chance, and no circuit can be proved on it"
            )
        agreement = self.metadata["agreement"]
        if not np.isnan(agreement) and agreement < MIN_AGREEMENT:
            return (
                f"scores of one half of the pairs correlate with those of the other by "
                f"{agreement:.2f}: they do not separate from noise"
            )
        return ""

    def ranked(
        self, top_k: int | None = None, by: Ranking = "absolute"
    ) -> list[tuple[Edge, float, float]]:
        """Edges with their scores and errors, the strongest first."""
        return [
            (
                Edge(self.writers[column], self.readers[row]),
                float(self.scores[row, column]),
                float(self.errors[row, column]),
            )
            for row, column in self._order(by)[:top_k]
        ]

    def top(self, count: int, by: Ranking = "absolute") -> tuple[Edge, ...]:
        """The strongest edges."""
        return tuple(edge for edge, _, _ in self.ranked(count, by))

    def __getitem__(self, edge: Edge | str | tuple[str, str]) -> float:
        """The score of an edge, or of a writer at level "head"."""
        ends = Edge.parse(edge) if isinstance(edge, str) and self.level == "edge" else edge
        writer, reader = (
            (ends, self.readers[0])
            if isinstance(ends, str)
            else (ends.writer, ends.reader)
            if isinstance(ends, Edge)
            else ends
        )
        if writer not in self.writers or reader not in self.readers:
            raise InputError(f"there is no edge {writer} → {reader}", "see writers and readers")
        return float(self.scores[self.readers.index(reader), self.writers.index(writer)])

    def rows(self) -> list[dict[str, Any]]:
        """One record per edge."""
        return [
            {"writer": edge.writer, "reader": edge.reader, "score": score, "error": error}
            for edge, score, error in self.ranked()
        ]

    def compare(self, circuit: "Circuit", count: int = 100) -> dict[str, float]:
        """How far two circuits of one model agree: rank correlation, and shared top edges."""
        if (self.writers, self.readers) != (circuit.writers, circuit.readers):
            raise InputError("the circuits are of different models or levels", "compare like ones")
        mine, others = set(self.top(count)), set(circuit.top(count))
        both = ~np.isnan(self.scores)
        return {
            "rank_correlation": rank_correlation(self.scores[both], circuit.scores[both]),
            "correlation": float(np.corrcoef(self.scores[both], circuit.scores[both])[0, 1]),
            "shared_top": len(mine & others) / max(1, len(mine | others)),
        }

    def _order(self, by: Ranking) -> list[tuple[int, int]]:
        strength = np.abs(self.scores) if by == "absolute" else self.scores
        possible = np.argwhere(~np.isnan(self.scores))
        order = np.argsort(-strength[tuple(possible.T)], kind="stable")
        return [(int(row), int(column)) for row, column in possible[order]]

    # What suffices.

    def bind(
        self,
        model: Model,
        clean: Inputs,
        corrupted: Inputs,
        metric: metrics.Metric = "loss",
        *,
        targets: Targets | None = None,
        batch_tokens: int | None = None,
    ) -> "Circuit":
        """The same circuit, to be evaluated on this model and these pairs."""
        pairs = CircuitPairs.of(model, clean, corrupted, metric, targets, batch_tokens)
        expected = pairs.graph.writers, self._graph_readers(pairs.graph)
        if (self.writers, self.readers) != expected:
            raise InputError("this circuit belongs to another model", "use the model it is of")
        return self._bound(pairs)

    def _bound(self, pairs: CircuitPairs) -> "Circuit":
        circuit = replace(self)
        object.__setattr__(circuit, "_pairs", pairs)
        return circuit

    @property
    def pairs(self) -> CircuitPairs:
        pairs: CircuitPairs | None = getattr(self, "_pairs", None)
        if pairs is None:
            raise InputError(
                "a circuit from a file knows no model", "use circuit.bind(model, clean, corrupted)"
            )
        return pairs

    def _graph_readers(self, graph: Graph) -> tuple[str, ...]:
        return graph.readers if self.level == "edge" else OUTPUT

    def mask(self, edges: Iterable[Edge | str | tuple[str, str]]) -> Mask:
        """The edges, or at level "head" the writers, as a table of readers and writers."""
        graph = self.pairs.graph
        if self.level == "edge":
            return graph.mask(edges)
        names = {edge if isinstance(edge, str) else edge.writer for edge in edges}  # type: ignore[union-attr]
        if unknown := names - set(graph.writers):
            raise InputError(f"this model has no writer {min(unknown)!r}", "see circuit.writers")
        return graph.possible & np.isin(graph.writers, list(names))

    def evaluate(
        self,
        edges: Iterable[Edge | str | tuple[str, str]],
        replacement: Replacement = "corrupted",
        *,
        progress: bool = True,
    ) -> Float[Tensor, " b"]:
        """The metric of each text in the circuit of these edges alone, exactly.

        All other edges carry the corrupted run, the mean of what is written in it, or nothing.
        """
        return self.pairs.evaluate([self.mask(edges)], replacement, progress)[0]

    def faithfulness(
        self,
        fractions: Sequence[float] = FRACTIONS,
        *,
        by: Ranking = "absolute",
        replacement: Replacement = "corrupted",
        progress: bool = True,
    ) -> FaithfulnessCurve:
        """Evaluate the circuits of the strongest edges, a growing fraction of all."""
        order = self.top(self.scores.size, by)
        counts = [max(1, round(fraction * len(order))) for fraction in fractions]
        masks = [self.mask(order[:count]) for count in counts]
        rests = [self.mask(order[count:]) for count in counts]
        values = self.pairs.evaluate([*masks, *rests], replacement, progress)
        points = [self.pairs.faithfulness(value) for value in values]
        inside, outside = np.array(points[: len(masks)]), np.array(points[len(masks) :])
        return FaithfulnessCurve(
            fractions=tuple(fractions),
            counts=tuple(counts),
            faithfulness=inside[:, 0],
            errors=inside[:, 1],
            complements=outside[:, 0],
            complement_errors=outside[:, 1],
            cpr=_area(fractions, inside[:, 0]),
            cmd=_area(fractions, np.abs(1 - inside[:, 0])),
        )

    def minimal(
        self,
        faithfulness: float = 0.9,
        *,
        by: Ranking = "absolute",
        replacement: Replacement = "corrupted",
        progress: bool = True,
    ) -> tuple[Edge, ...]:
        """The fewest of the strongest edges that keep this much of the metric, dead ends left out.

        Found by bisection, so that fewer may suffice where more edges make a circuit worse.
        """
        order = self.top(self.scores.size, by)
        low, high = 0, len(order)
        while high - low > 1:
            middle = (
                (low + high) // 2 if high < 64 else max(low + 1, int((max(low, 1) * high) ** 0.5))
            )
            values = self.pairs.evaluate([self.mask(order[:middle])], replacement, progress)
            reached = self.pairs.faithfulness(values[0])[0] >= faithfulness
            low, high = (low, middle) if reached else (middle, high)
        chosen = order[:high]
        if self.level == "head":
            return chosen
        live = set(self.pairs.graph.edges(self.pairs.graph.live(self.mask(chosen))))
        return tuple(edge for edge in chosen if edge in live)

    def _lines(self) -> Iterator[str]:
        count = int((~np.isnan(self.scores)).sum())
        noun = "edge" if self.level == "edge" else "part"
        yield (
            f"{pluralise(count, noun)} by {self.method} on "
            f"{pluralise(self.metadata['texts'], 'pair')}: "
            f"{self.metric} {self.clean:.4f} clean, {self.corrupted:.4f} corrupted"
        )
        if self.warning:
            yield f"WARNING: {self.warning}"
        for edge, score, error in self.ranked(10):
            name = str(edge) if self.level == "edge" else edge.writer
            yield f"  {name:<28} {format_change(score, error)}"


OUTPUT = ("output",)


def _area(fractions: Sequence[float], values: Float[np.ndarray, " k"]) -> float:
    widths = np.diff(np.array(fractions))
    return float((widths * (values[1:] + values[:-1]) / 2).sum())


class _ScoreSums:
    """Weighted sums over texts, from which means, standard errors and halves are computed."""

    def __init__(self) -> None:
        self.forwards = self.backwards = 0
        self._weights: list[Tensor] = []
        self._halves: list[Tensor] = []
        self._squares = self._products = torch.zeros(())

    def add(
        self, values: Float[Tensor, "b r w"], weights: Float[Tensor, " b"], texts: range
    ) -> None:
        weighted = values * weights.view(-1, 1, 1)
        halves = [weighted[(-texts.start + half) % 2 :: 2].sum(0) for half in range(2)]
        self._halves = (
            [part + more for part, more in zip(self._halves, halves, strict=True)]
            if self._halves
            else halves
        )
        self._squares = self._squares + weighted.square().sum(0)
        self._products = self._products + (weighted * weights.view(-1, 1, 1)).sum(0)
        self._weights.append(weights)

    def result(self) -> tuple[FloatTable, FloatTable, Callable[[Mask], float]]:
        """Mean, standard error, and the correlation of both halves of the texts."""
        weights = torch.cat(self._weights)
        total, squared = weights.sum(), weights.square().sum()
        mean = (self._halves[0] + self._halves[1]) / total
        count = int((weights > 0).sum())
        spread = self._squares - 2 * mean * self._products + mean.square() * squared
        error = torch.full_like(mean, torch.nan)
        if count > 1:
            error = (spread.clamp(min=0) * (count / (count - 1))).sqrt() / total

        def agreement(possible: Mask) -> float:
            halves = [half.numpy()[possible] for half in self._halves]
            if count < 4 or any(half.std() == 0 for half in halves):
                return float("nan")
            return float(np.corrcoef(halves[0], halves[1])[0, 1])

        return mean.numpy(), error.numpy(), agreement


@wrapping_models
def circuit(
    model: Model,
    clean: Inputs,
    corrupted: Inputs,
    metric: metrics.Metric = "loss",
    method: Method = "eap-ig",
    level: Level = "edge",
    *,
    steps: int = 5,
    targets: Targets | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Circuit:
    """How much each edge between the parts of a model carries of what sets two texts apart.

    An edge leads from a writer of the residual stream (the embeddings, a head, a feed-forward) to
    a reader (the query, key or value of a head, a feed-forward, the logits). `clean` and
    `corrupted` texts match token by token. Methods: "eap" (arXiv 2310.10348), "eap-ig" over inputs
    and "eap-ig-activations" (arXiv 2403.17806) with `steps` gradients, "atp*" (softmax computed
    again for queries and keys, arXiv 2403.00745), "relp" (arXiv 2508.21258), and "exact", one
    forward per edge. With level="head" the writers are scored as a whole. Heads that share keys
    have one reader for them.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = circuit(model, [[1, 2, 3], [4, 5]], [[1, 9, 3], [8, 5]], progress=False)
    >>> len(result.writers), len(result.readers)
    (7, 15)
    """
    check_int("steps", steps, minimum=1)
    if method == "relp":
        require_native(model, 'method="relp"')
    pairs = CircuitPairs.of(model, clean, corrupted, metric, targets, batch_tokens)
    runs = expected_runs(pairs.graph, method, level, steps) * len(pairs.batches)
    sums = _ScoreSums()
    with Progress("scoring edges", total=runs, unit="runs", enabled=progress) as bar:
        for batch in pairs.run_batches():
            with pairs.ready():
                scores = score_batch(batch, method, level, steps, pairs.max_copies, bar.advance)
            sums.add(scores.values, batch.metric.weights.double().cpu(), batch.metric.texts)
            sums.forwards += scores.forwards
            sums.backwards += scores.backwards
    sign = -pairs.sign
    mean, error, agreement = sums.result()
    possible = (
        pairs.graph.possible if level == "edge" else np.ones((1, len(pairs.graph.writers)), bool)
    )
    ends = pairs.end_means
    return Circuit(
        writers=pairs.graph.writers,
        readers=pairs.graph.readers if level == "edge" else OUTPUT,
        scores=np.where(possible, sign * mean, np.nan),
        errors=np.where(possible, error, np.nan),
        method=method,
        level=level,
        metric=metrics.metric_name(metric),
        clean=ends[0],
        corrupted=ends[1],
        metadata={
            "texts": len(pairs.clean),
            "effect": ends[0] - ends[1],
            "effect_error": pairs.effect_error,
            "agreement": agreement(possible),
            "forwards": sums.forwards / len(pairs.batches),
            "backwards": sums.backwards / len(pairs.batches),
            "steps": steps if "ig" in method else 1,
        },
    )._bound(pairs)
