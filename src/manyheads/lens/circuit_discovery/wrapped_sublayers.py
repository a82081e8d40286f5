"""The sublayers of a wrapped model: its attentions by hooks, the rest by difference."""

from collections.abc import Mapping
from functools import cached_property
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge import residual_writes, structure, watched_run, wrapped_model, wrapped_parts
from manyheads.lens.circuit_discovery.graph import Graph, ResidualStep
from manyheads.lens.circuit_discovery.sublayers import Streams, Sublayers, another_view
from manyheads.lens.inputs.cached_run import (
    ActivationEditor,
    CachedRun,
    EditFunction,
    HeadScope,
    replace_by,
    run_until,
)
from manyheads.models.build import eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.ragged import Ragged
from manyheads.taps import Site, Sublayer, Tap

AnyRun = ActivationEditor | CachedRun


class WrappedSublayers(Sublayers):
    """What a layer adds besides its attention counts as its feed-forward."""

    def site(self, step: ResidualStep, tap: Tap) -> Site:
        return Site(step.layer, tap, Sublayer.ATTENTION, self.scope.stack_name)

    def output_gradient_site(self, step: ResidualStep) -> Site:
        return self.output_site(step) if step.heads else self.site(step, Tap.AFTER)

    def recorded_sites(self, step: ResidualStep) -> list[Site]:
        taps = [Tap.BEFORE, Tap.AFTER]
        if self._facts(step) is not None:
            taps.append(Tap.HEAD_OUTPUT)
        return [self.site(step, tap) for tap in taps]

    def entering(self, step: ResidualStep, record: AnyRun) -> Float[Tensor, "n c"]:
        before = record[self.site(step, Tap.BEFORE)].values
        return before if step.heads or step.early else before + self._attended(step, record)

    def after(self, step: ResidualStep, record: AnyRun) -> Float[Tensor, "n c"]:
        if not step.heads:
            return record[self.site(step, Tap.AFTER)].values
        return record[self.site(step, Tap.BEFORE)].values + self._attended(step, record)

    def written(self, step: ResidualStep, record: AnyRun) -> Float[Tensor, "w n c"]:
        if step.heads:
            return self.spread(step, record[self.output_site(step)].values)
        before, after = (record[self.site(step, tap)].values for tap in (Tap.BEFORE, Tap.AFTER))
        return (after - before - self._attended(step, record))[None]

    def _attended(self, step: ResidualStep, record: AnyRun) -> Float[Tensor, "n c"] | float:
        """What the attention of a layer added to the stream."""
        if self._facts(step) is None:
            return 0.0
        return self._add_heads(step, record[self.site(step, Tap.HEAD_OUTPUT)].values)

    def _add_heads(
        self, step: ResidualStep, outputs: Float[Tensor, "n h d"]
    ) -> Float[Tensor, "n c"]:
        weight, bias = self._projection(step)
        written = outputs.flatten(1) @ weight.T + (0 if bias is None else bias)
        return self._written(step, written)

    def add(
        self,
        step: ResidualStep,
        stream: Float[Tensor, "*#k n c"],
        written: Float[Tensor, "*#k n c"],
    ) -> Float[Tensor, "*#k n c"]:
        return stream + (self._written(step, written) if step.heads else written)

    def linear(self, step: ResidualStep) -> bool:
        return not step.heads or self._write(step).norm is None

    def run(
        self, step: ResidualStep, streams: Streams, watch: ActivationEditor, last: Site
    ) -> None:
        model = cast(wrapped_model.WrappedModel, self.scope.model)
        entry = watched_run.ResidualEntry(self.scope.stack_name, step.layer, self.pack(streams))
        inputs = self.inputs.repeat(len(streams))
        run_until(
            lambda watcher: model.run_inputs(inputs, watcher, logits=False, entry=entry),
            watch,
            last,
        )

    def raw_outputs(self, step: ResidualStep, streams: Streams) -> Tensor:
        """What a layer adds besides its attention, whose heads are silent."""
        after = self.site(step, Tap.AFTER)
        flat = streams.flatten(0, 1)
        silent: Tensor | float = 0.0
        edits: dict[Site, EditFunction] = {}
        if self._facts(step) is not None:
            # Silent heads add the same to every token, which is taken off the stream before.
            bias = self._projection(step)[1]
            silent = self._written(step, torch.zeros_like(flat[:1]) if bias is None else bias[None])
            edits = {self.site(step, Tap.HEAD_OUTPUT): torch.zeros_like}
        entering = streams if step.early else streams - silent
        record = ActivationEditor(edits, [after])
        self.run(step, entering, record, after)
        return record[after].values - entering.flatten(0, 1) - silent

    def go_on(self, step: ResidualStep, run: CachedRun, streams: Streams) -> Ragged:
        own = run[self.site(step, Tap.AFTER)].values - self.written(step, run)[0]
        after = self.raw_outputs(step, streams).unflatten(0, streams.shape[:2]) + own
        if step.layer + 1 == len(self.scope.stack.layers):
            return self.pack(self.finish(after))
        return run.continue_from(self.pack(after), step.layer + 1, None, len(streams))

    def moved(
        self, step: ResidualStep, part: float, clean: CachedRun, corrupted: CachedRun
    ) -> dict[Site, EditFunction]:
        if step.heads:
            return super().moved(step, part, clean, corrupted)
        difference = self.written(step, clean) - self.written(step, corrupted)
        after = clean[self.site(step, Tap.AFTER)].values - (1 - part) * difference[0]
        return {self.site(step, Tap.AFTER): replace_by(after.requires_grad_(part > 0))}

    def tracked(self, step: ResidualStep) -> tuple[dict[Site, EditFunction], list[Site]]:
        sites = [self.output_gradient_site(step)]
        if step.owners is not None:
            sites += self.input_sites(step).values()
        # A view, since hooks go on with what a watcher returns only if it is another tensor.
        return dict.fromkeys(sites, another_view), sites

    def pull(
        self, step: ResidualStep, stream: Float[Tensor, "n c"], gradients: Mapping[Site, Tensor]
    ) -> Float[Tensor, "r n c"]:
        if step.owners is not None:
            leaf, inputs = self._read_differentiably(step, stream)
            return self._pull_each(step, leaf, inputs, gradients)
        gradient = gradients.get(self.site(step, Tap.AFTER))
        if gradient is None:
            return torch.zeros_like(stream)[None]
        leaf = stream.detach().clone().requires_grad_()
        with torch.enable_grad():
            outputs = self.raw_outputs(step, leaf[None])
            return torch.autograd.grad(outputs, leaf, gradient)[0][None]

    def _facts(self, step: ResidualStep) -> structure.ProbedAttention | None:
        return self._by_layer.get(step.layer)

    @cached_property
    def _by_layer(self) -> dict[int, structure.ProbedAttention]:
        stack = cast(wrapped_parts.WrappedStack, self.scope.stack)
        return {layer: facts for facts, layer in stack.facts.attentions}

    def _projection(
        self, step: ResidualStep
    ) -> tuple[Float[Tensor, "c hd"], Float[Tensor, " c"] | None]:
        facts = self._by_layer[step.layer]
        assert facts.projection is not None, "check_edges() refuses the others"
        bias = facts.projection.bias
        weight = structure.linear_weight(facts.projection).detach()
        write = self._write(step)
        factor = write.factor if write.norm is None else 1.0
        return weight * factor, bias.detach() * factor if isinstance(bias, Tensor) else None

    def _write(self, step: ResidualStep) -> residual_writes.ResidualWrite:
        write = self._by_layer[step.layer].write
        assert write is not None, "check_edges() refuses the others"
        return write

    def _written(self, step: ResidualStep, written: Tensor) -> Tensor:
        """What heads write together, normed and scaled as the stream gets it."""
        write = self._write(step)
        return written if write.norm is None else write.norm(written) * write.factor


def make_sublayers(scope: HeadScope, inputs: ModelInputs) -> Sublayers:
    return (Sublayers if scope.model.native else WrappedSublayers)(scope, inputs)


def make_graph(scope: HeadScope, inputs: ModelInputs) -> Graph:
    """The graph of a model; of a wrapped one, after looking what its feed-forwards read."""
    serial = Graph(scope)
    attending = [step for step in serial.steps if step.heads]
    if scope.model.native or not attending:
        return serial
    step = next(
        step for step in serial.steps if step.layer == attending[0].layer and not step.heads
    )
    text = inputs.select(range(1))
    sublayers = WrappedSublayers(scope, text)
    record = ActivationEditor({}, sublayers.recorded_sites(step))
    with eval_mode(scope.model), torch.no_grad():
        scope.model.run_hidden(text, record)
        outputs = sublayers.raw_outputs(step, sublayers.entering(step, record)[None])
    reads_sum = residual_writes.close(outputs, sublayers.written(step, record)[0])
    return serial if reads_sum else Graph(scope, parallel=True)
