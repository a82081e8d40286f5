"""Causal scrubbing: a stated circuit, tested by replacing all that it says does not matter."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, check_int
from manyheads.formatting import pluralise
from manyheads.lens.circuit_discovery.circuit_pairs import CircuitPairs, fraction_kept
from manyheads.lens.circuit_discovery.graph import Edge, Graph, Mask
from manyheads.lens.inputs import metrics
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.lens.results.files import Metadata, Result
from manyheads.lens.results.tables import format_change
from manyheads.models.build import Model
from manyheads.progress import Progress

EdgeName = Edge | str | tuple[str, str]


@dataclass(frozen=True, slots=True, kw_only=True)
class Hypothesis:
    """What a circuit is said to be: its edges, or its nodes with all edges between them.

    `depends` says for some edges what they carry: one value per text. Such an edge may carry what
    its writer writes on any text with the same value; other edges carry their own text.
    """

    edges: tuple[EdgeName, ...] = ()
    nodes: tuple[str, ...] = ()
    depends: Mapping[EdgeName, Sequence[Any]] = field(default_factory=dict)

    def mask(self, graph: Graph) -> Mask:
        """All its edges in the graph of a model."""
        mask = graph.mask((*self.edges, *self.depends))
        if not self.nodes:
            return mask
        names = {*graph.writers, *graph.readers}
        if unknown := [node for node in self.nodes if node not in names]:
            raise InputError(f"this model has no node {unknown[0]!r}", "write L3H1, L3 mlp, logits")
        writers = np.isin(graph.writers, self.nodes)
        readers = np.array([_owners(reader) & set(self.nodes) != set() for reader in graph.readers])
        between: Mask = graph.possible & writers & readers[:, None]
        return mask | between


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Scrub(Result):
    """How much of the metric a hypothesis keeps when all that it leaves out is resampled.

    1 is the model itself and 0 a model in which every part reads another text. `random` are
    circuits of as many edges drawn at random, `better` the fraction of them that keep as much.
    """

    faithfulness: float
    error: float
    random: Float[np.ndarray, " circuits"]
    better: float
    edges: int
    clean: float
    scrubbed: float
    resampled: float
    metric: str
    metadata: Metadata = field(default_factory=dict)

    def __str__(self) -> str:
        lines = [
            f"the hypothesis of {pluralise(self.edges, 'edge')} keeps "
            f"{format_change(self.faithfulness, self.error)} of the {self.metric}: "
            f"{self.clean:.4f} of the model, {self.scrubbed:.4f} scrubbed, "
            f"{self.resampled:.4f} with everything resampled"
        ]
        if len(self.random):
            lines.append(
                f"{pluralise(len(self.random), 'random circuit')} of this size: "
                f"{self.random.mean():+.4f} on average, {self.random.max():+.4f} at most; "
                f"{100 * self.better:.0f} % keep as much"
            )
        return "\n".join(lines)

    __repr__ = __str__


@wrapping_models
def scrub(
    model: Model,
    texts: Inputs,
    hypothesis: Hypothesis,
    metric: metrics.Metric = "loss",
    *,
    targets: Targets | None = None,
    draws: int = 4,
    random_circuits: int = 20,
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Scrub:
    """Test a stated circuit by resampling, beside random circuits of the same size.

    Every edge outside the hypothesis carries what its writer writes on another text of the same
    length; edges that `depends` describes carry another text with the same value. A hypothesis that
    says enough keeps the metric (causal scrubbing, Chan et al. 2022). Values inside the circuit are
    computed from what they read; those of described edges are of whole runs.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=16, heads=2, vocabulary=20, seed=0)
    >>> everything = Hypothesis(nodes=("embeddings", "L0H0", "L0H1", "L0 mlp", "logits"))
    >>> rows = [[1, 2, 3, 4], [5, 2, 7, 4], [8, 9, 3, 1]]
    >>> result = scrub(model, rows, everything, random_circuits=2, progress=False)
    >>> round(result.faithfulness, 4)
    1.0
    """
    check_int("draws", draws, minimum=1)
    check_int("random_circuits", random_circuits, minimum=0)
    inputs = read_inputs(model, texts)
    generator = np.random.default_rng(seed)
    whole = CircuitPairs.of(model, inputs, inputs, metric, targets, batch_tokens)
    graph = whole.graph
    mask = hypothesis.mask(graph)
    described = {_only(graph, edge): list(values) for edge, values in hypothesis.depends.items()}
    for values in described.values():
        if len(values) != len(inputs):
            raise InputError(f"{len(values)} values for {len(inputs)} texts", "give one per text")
    masks = [mask, np.zeros_like(mask)]
    masks += [random_mask(graph, int(mask.sum()), generator) for _ in range(random_circuits)]
    sizes = inputs.sizes(model)
    totals = torch.zeros(len(masks), len(inputs), dtype=torch.float64)
    bar = Progress("scrubbing", total=draws * len(masks), unit="runs", enabled=progress)
    with bar:
        for _ in range(draws):
            others = inputs.select(_resample(sizes, [0] * len(inputs), generator, apart=True))
            pairs = replace(whole, corrupted=others, _ends={}, _cached={})
            alike = {
                place: inputs.select(_resample(sizes, values, generator))
                for place, values in described.items()
            }
            for number, edges in enumerate(masks):
                fixed = alike if number == 0 else {}
                totals[number] += _evaluate(pairs, edges, fixed) / draws
                bar.advance()
    clean = whole.ends[0]
    weights = whole.ends[2]
    fractions = [fraction_kept(row, totals[1], clean, weights) for row in totals]
    random = np.array([value for value, _ in fractions[2:]])
    means = [float(metrics.weighted_mean(row, weights)[0]) for row in (clean, totals[0], totals[1])]
    return Scrub(
        faithfulness=fractions[0][0],
        error=fractions[0][1],
        random=random,
        better=float((random >= fractions[0][0]).mean()) if len(random) else float("nan"),
        edges=int(mask.sum()),
        clean=means[0],
        scrubbed=means[1],
        resampled=means[2],
        metric=metrics.metric_name(metric),
        metadata={"texts": len(inputs), "draws": draws},
    )


def _evaluate(
    pairs: CircuitPairs, mask: Mask, alike: Mapping[tuple[int, int], Any]
) -> Float[Tensor, " b"]:
    """The metric of each text; described edges carry the texts in `alike`."""
    columns = []
    computed = mask.copy()
    for place in alike:
        computed[place] = False
    for batch in pairs.run_batches():
        with pairs.ready():
            fixed: dict[int, dict[int, Tensor]] = {}
            for (reader, writer), texts in alike.items():
                written = batch.written_on(texts.select(batch.metric.texts), writer)
                fixed.setdefault(reader, {})[writer] = written - batch.base_by(writer)
            columns.append(batch.evaluate(computed, fixed))
    return torch.cat(columns)


def _resample(
    sizes: Sequence[int],
    values: Sequence[Any],
    generator: np.random.Generator,
    *,
    apart: bool = False,
) -> list[int]:
    """For each text another one with as many tokens and the same value, or itself if none is."""
    chosen = []
    for text, (size, value) in enumerate(zip(sizes, values, strict=True)):
        alike = [
            candidate
            for candidate, (length, label) in enumerate(zip(sizes, values, strict=True))
            if length == size and label == value and candidate != text
        ]
        if not alike and apart:
            raise InputError(
                f"text {text} has {size} tokens, and no other text has as many",
                "give several texts of each length",
            )
        chosen.append(int(generator.choice(alike)) if alike else text)
    return chosen


def random_mask(graph: Graph, count: int, generator: np.random.Generator) -> Mask:
    """So many of the possible edges, drawn at random."""
    places = np.argwhere(graph.possible)
    mask = np.zeros_like(graph.possible)
    chosen = places[generator.choice(len(places), size=min(count, len(places)), replace=False)]
    mask[tuple(chosen.T)] = True
    return mask


def _only(graph: Graph, edge: EdgeName) -> tuple[int, int]:
    ((reader, writer),) = np.argwhere(graph.mask([edge])).tolist()
    return reader, writer


def _owners(reader: str) -> set[str]:
    """The nodes that a reader belongs to: "L3H0-2 key" to three heads."""
    name = reader.rsplit(" ", 1)[0] if reader.endswith((" query", " key", " value")) else reader
    if "H" not in name or "-" not in name:
        return {name}
    layer, heads = name.split("H")
    first, last = map(int, heads.split("-"))
    return {f"{layer}H{head}" for head in range(first, last + 1)}
