"""The true edges of a compiled program, by its weights and by what passes along them."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, Int

from manyheads.lens.circuit_discovery.graph import EMBEDDINGS, LOGITS, Edge
from manyheads.lens.circuit_discovery.rasp_programs import BilinearHead, Matrix, ProgramWeights
from manyheads.taps import Head

# Messages are sums of a few weights times one-hot vectors, in float64.
DIFFERENT = 1e-6


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """What a reader takes from the residual stream: the stream times a matrix.

    `part` is what the reader belongs to: a head, a feed-forward, or the logits. `answers` says that
    a reader's rows matter only where there is an answer: not at padding.
    """

    reader: str
    part: str
    matrix: Matrix
    writers: tuple[str, ...]
    answers: bool = False


class NamedRun:
    """A program run in its own basis: what each part writes for every token of every input."""

    def __init__(
        self,
        weights: ProgramWeights,
        places: Sequence[Sequence[int]],
        ids: Int[np.ndarray, "b n"],
        *,
        causal: bool,
    ) -> None:
        x = weights.embed[ids] + weights.positions[: ids.shape[1]]
        self.writes: dict[str, Float[np.ndarray, "b n c"]] = {EMBEDDINGS: x}
        used = (weights.embed != 0).any(0) | (weights.positions != 0).any(0)
        self.directions: dict[str, Bool[np.ndarray, " c"]] = {EMBEDDINGS: used}
        self.readings: list[Reading] = []
        mask = np.tril(np.ones((ids.shape[1],) * 2)) if causal else np.ones((1, 1))
        for number, (heads, layer) in enumerate(weights.layers):
            below, added = tuple(self.writes), np.zeros_like(x)
            for slot, head in zip(places[number], heads, strict=True):
                name = str(Head(number, slot))
                for part, matrix in (("query", head.qk), ("key", head.qk.T), ("value", head.ov)):
                    answers = part == "query"
                    reading = Reading(f"{name} {part}", name, matrix, below, answers)
                    self.readings.append(reading)
                self._write(name, _attend(x, head, mask), head.ov)
                added += self.writes[name]
            x = x + added
            if layer is not None:
                name = f"L{number} mlp"
                self.readings.append(Reading(name, name, layer.expand, tuple(self.writes)))
                hidden = np.maximum(x @ layer.expand, 0)
                self._write(name, hidden @ layer.contract, layer.contract)
                x = x + self.writes[name]
        final = Reading(LOGITS, LOGITS, weights.unembed, tuple(self.writes), answers=True)
        self.readings.append(final)
        self.logits = x @ weights.unembed

    def _write(self, name: str, values: Float[np.ndarray, "b n c"], matrix: Matrix) -> None:
        self.writes[name], self.directions[name] = values, (matrix != 0).any(0)

    def wired(self) -> Iterator[Edge]:
        """Every edge whose reader reads a direction that its writer writes."""
        for reading in self.readings:
            reads = (reading.matrix != 0).any(1)
            for writer in reading.writers:
                if (reads & self.directions[writer]).any():
                    yield Edge(writer, reading.reader)

    def varies(self, edge: Edge, real: Bool[np.ndarray, "b n"]) -> bool:
        """Whether what passes along the edge at one position differs between the inputs."""
        reading = next(item for item in self.readings if item.reader == edge.reader)
        message = self.writes[edge.writer] @ reading.matrix
        counted = real[..., None] if reading.answers else np.ones((1, 1, 1), bool)
        largest = message.max(0, where=counted, initial=-np.inf)
        smallest = message.min(0, where=counted, initial=np.inf)
        return bool((largest - smallest > DIFFERENT).any())

    def leading_to_logits(self, edges: set[Edge]) -> tuple[Edge, ...]:
        """The edges from which others of them lead to the logits, from the embeddings upward."""
        needed, leading = {LOGITS}, list[Edge]()
        for reading in reversed(self.readings):
            if reading.part in needed:
                own = [
                    writer for writer in reading.writers if Edge(writer, reading.reader) in edges
                ]
                needed.update(own)
                leading += [Edge(writer, reading.reader) for writer in reversed(own)]
        return tuple(reversed(leading))


def _attend(
    x: Float[np.ndarray, "b n c"], head: BilinearHead, mask: Matrix
) -> Float[np.ndarray, "b n c"]:
    scores = np.where(mask > 0, x @ head.qk @ x.swapaxes(1, 2), -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return (weights / weights.sum(-1, keepdims=True)) @ (x @ head.ov)


def true_edges(
    weights: ProgramWeights,
    places: Sequence[Sequence[int]],
    ids: Int[np.ndarray, "b n"],
    real: Bool[np.ndarray, "b n"],
    *,
    causal: bool,
) -> tuple[tuple[Edge, ...], tuple[Edge, ...]]:
    """The edges by the weights, and those of them whose content differs between the inputs.

    The inputs have the same number of tokens; `real` marks those that are no padding.
    """
    run = NamedRun(weights, places, ids, causal=causal)
    wired = run.leading_to_logits(set(run.wired()))
    return wired, run.leading_to_logits({edge for edge in wired if run.varies(edge, real)})
