"""A clean and a corrupted run, and circuits between them: each reader has its own stream."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Literal

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.lens.circuit_discovery.graph import Graph, Mask, ResidualStep
from manyheads.lens.circuit_discovery.sublayers import Inputs, Streams
from manyheads.lens.circuit_discovery.wrapped_sublayers import make_sublayers
from manyheads.lens.inputs.cached_run import ActivationEditor, CachedRun, HeadScope
from manyheads.lens.inputs.metrics import BoundMetric
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Site, Tap

# What takes the place of the parts outside a circuit.
Replacement = Literal["corrupted", "mean", "zero"]
# What the embeddings and the writers of each step write, the same for every token.
Outputs = Sequence[Float[Tensor, "w 1 c"]]
# What some writers write for one reader, as differences from the base, by the place of the writer.
FixedInputs = Mapping[int, Float[Tensor, "n c"]]


class PairBatch:
    """A batch of pairs: its clean run, and what the writers write outside a circuit, the base.

    The base is that of the corrupted run unless `base` has other outputs: those of the embeddings
    first, then of each step.
    """

    def __init__(
        self,
        scope: HeadScope,
        graph: Graph,
        clean: ModelInputs,
        corrupted: ModelInputs,
        metric: BoundMetric,
        base: Outputs | None = None,
    ) -> None:
        self.scope, self.graph, self.metric = scope, graph, metric
        self.sublayers = make_sublayers(scope, clean)
        self.inputs = clean
        layers = range(len(scope.stack.layers))
        sites = [
            self.embeddings,
            *(site for step in graph.steps for site in self.sublayers.recorded_sites(step)),
        ]
        self.clean, self.corrupted = (
            CachedRun(scope, inputs, layers=layers, record=sites) for inputs in (clean, corrupted)
        )
        self._other_base = base

    @property
    def embeddings(self) -> Site:
        return Site(-1, Tap.EMBEDDINGS, stack=self.scope.stack_name)

    @property
    def tokens(self) -> int:
        return self.sublayers.lengths.total

    def base_of(self, step: ResidualStep) -> Float[Tensor, "w n c"]:
        """What each writer of a step writes outside the circuit."""
        if self._other_base is None:
            return self.sublayers.written(step, self.corrupted)
        steps = [own for own in self.graph.steps if own.writers]
        return self._other_base[1 + steps.index(step)].expand(-1, self.tokens, -1)

    @cached_property
    def base_embeddings(self) -> Float[Tensor, "n c"]:
        if self._other_base is None:
            return self.corrupted[self.embeddings].values
        return self._other_base[0][0].expand(self.tokens, -1)

    def corrupted_outputs(self) -> list[Float[Tensor, "w n c"]]:
        """What the embeddings and the writers of each step write in the corrupted run."""
        embedded = self.corrupted[self.embeddings].values[None]
        written = (
            self.sublayers.written(step, self.corrupted)
            for step in self.graph.steps
            if step.writers
        )
        return [embedded, *written]

    def base_by(self, writer: int) -> Float[Tensor, "n c"]:
        """What one writer writes outside the circuit."""
        if writer == 0:
            return self.base_embeddings
        step = self._step_of(writer)
        return self.base_of(step)[writer - step.writers.start]

    def written_on(self, texts: ModelInputs, writer: int) -> Float[Tensor, "n c"]:
        """What one writer writes on other texts of the same lengths."""
        step = None if writer == 0 else self._step_of(writer)
        sites = [self.embeddings] if step is None else self.sublayers.recorded_sites(step)
        record = ActivationEditor({}, sites)
        self.scope.model.run_hidden(texts, record)
        if step is None:
            return record[self.embeddings].values
        return self.sublayers.written(step, record)[writer - step.writers.start]

    def _step_of(self, writer: int) -> ResidualStep:
        return next(step for step in self.graph.steps if writer in step.writers)

    @cached_property
    def base_sums(self) -> list[Float[Tensor, "n c"]]:
        """What all writers of each step write together in the base."""
        sums = []
        for step in self.graph.steps:
            summed = (
                self.base_of(step).sum(0)
                if step.writers
                else torch.zeros_like(self.base_embeddings)
            )
            sums.append(summed + self.sublayers.bias(step))
        return sums

    @cached_property
    def base_streams(self) -> list[Float[Tensor, "n c"]]:
        """The residual stream of the base before each step, and after the last."""
        streams = [self.base_embeddings]
        for step, written in zip(self.graph.steps, self.base_sums, strict=True):
            streams.append(self.sublayers.add(step, streams[-1], written))
        return streams

    @cached_property
    def linear(self) -> bool:
        return all(self.sublayers.linear(step) for step in self.graph.steps)

    @cached_property
    def deltas(self) -> Float[Tensor, "writers n c"]:
        """How much each writer writes in the clean run and not in the base."""
        embedded = self.clean[self.embeddings].values - self.base_embeddings
        deltas = embedded.new_empty(len(self.graph.writers), *embedded.shape)
        deltas[0] = embedded
        for step in self.graph.steps:
            if step.writers:
                written = self.sublayers.written(step, self.clean)
                deltas[step.writers.start : step.writers.stop] = written - self.base_of(step)
        return deltas

    def stream(self, record: ActivationEditor | CachedRun, steps: int) -> Float[Tensor, "n c"]:
        """The residual stream of a run after some steps."""
        if steps == 0:
            return record[self.embeddings].values
        return self.sublayers.after(self.graph.steps[steps - 1], record)

    def streams(
        self,
        masks: Bool[np.ndarray, "k writers"],
        deltas: Float[Tensor, "writers n c"],
        steps: int,
        fixed: Sequence[FixedInputs] | None = None,
    ) -> Streams:
        """The residual stream after some steps if only the writers in a mask leave the base.

        `fixed` has for each stream what further writers write instead of the base.
        """
        used = np.flatnonzero(masks.any(0)).tolist()
        if self.linear:
            return self.base_streams[steps] + self._sum(masks, deltas, used, fixed, None)
        streams = self.base_embeddings + self._sum(masks, deltas, [0], fixed, range(1))
        for step, base in zip(self.graph.steps[:steps], self.base_sums, strict=False):
            own = [writer for writer in used if writer in step.writers]
            added = self._sum(masks, deltas, own, fixed, step.writers)
            streams = self.sublayers.add(step, streams, base + added)
        return streams

    def _sum(
        self,
        masks: Bool[np.ndarray, "k writers"],
        deltas: Tensor,
        used: list[int],
        fixed: Sequence[FixedInputs] | None,
        writers: range | None,
    ) -> Streams:
        summed = deltas.new_zeros(len(masks), *deltas.shape[1:])
        if used:
            weights = torch.from_numpy(masks[:, used]).to(deltas)
            chosen = deltas if len(used) == len(deltas) else deltas[used]
            summed = (weights @ chosen.flatten(1)).unflatten(1, deltas.shape[1:])
        for stream, inputs in zip(summed, fixed or (), strict=False):
            for writer, difference in inputs.items():
                if writers is None or writer in writers:
                    stream += difference
        return summed

    def hidden(self, mask: Mask, fixed: Mapping[int, FixedInputs] | None = None) -> Ragged:
        """What the readout receives in a circuit: all edges outside the mask carry the base.

        `fixed` has for some readers what some writers write, as differences from the base.
        """
        mask, fixed = self.graph.live(mask), fixed or {}
        needed = np.atleast_1d(mask.any(0))
        embedded = self.clean[self.embeddings].values - self.base_embeddings
        deltas = embedded.new_zeros(len(self.graph.writers), *embedded.shape)
        deltas[0] = embedded
        for step in self.graph.steps:
            if not needed[step.writers.start : step.writers.stop].any():
                continue
            inputs = [fixed.get(reader, {}) for reader in step.readers]
            rows = mask[step.readers.start : step.readers.stop]
            first, copies = _share_streams(inputs, rows)
            own = [inputs[place] for place in first]
            streams = self.streams(rows[first], deltas, step.reads, own)
            if step.owners is None:
                written = self.sublayers.outputs(step, streams)[:, 0]
            else:
                values = self._choose(step, self.sublayers.read(step, streams), copies)
                heads = self.sublayers.attend(step, streams[:1], values)
                written = self.sublayers.spread(step, heads[0])
            deltas[step.writers.start : step.writers.stop] = written - self.base_of(step)
        last = [fixed.get(len(mask) - 1, {})]
        final = self.streams(mask[-1:], deltas, len(self.graph.steps), last)
        return self.sublayers.pack(self.sublayers.finish(final))

    def _choose(self, step: ResidualStep, inputs: Inputs, copies: Sequence[int]) -> Inputs:
        """The inputs of heads, each taken from the copy of its own reader."""
        if len(set(copies)) == 1:
            return inputs
        own: dict[Tap, list[int]] = {}
        for (tap, _), copy in zip(step.inputs(), copies, strict=True):
            own.setdefault(tap, []).append(copy)
        own[Tap.GATE_OUTPUT] = own[Tap.QUERY]
        chosen = {}
        for tap, values in inputs.items():
            heads = range(values.shape[2])
            own_inputs = [
                values[copy, :, head] for copy, head in zip(own[tap], heads, strict=False)
            ]
            chosen[tap] = torch.stack(own_inputs, 1)[None]
        return chosen

    def evaluate(
        self, mask: Mask, fixed: Mapping[int, FixedInputs] | None = None
    ) -> Float[Tensor, " b"]:
        """The metric of each text in a circuit."""
        return self.metric(self.hidden(mask, fixed))[0].double().cpu()


def _share_streams(
    inputs: Sequence[FixedInputs], rows: Bool[np.ndarray, "r writers"]
) -> tuple[list[int], list[int]]:
    """The first reader of each stream, and the stream of each reader: equal readers share it."""
    streams: dict[tuple[int, bytes], int] = {}
    first: list[int] = []
    copies = []
    for place, (own, row) in enumerate(zip(inputs, rows, strict=True)):
        key = (place if own else -1, row.tobytes())
        if key not in streams:
            streams[key] = len(first)
            first.append(place)
        copies.append(streams[key])
    return first, copies
