"""Sublayers on their own: what they read from any residual stream, and what they add to it."""

from collections.abc import Callable, Mapping
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge import wrapped_parts
from manyheads.errors import InputError
from manyheads.lens.attribution import direct_logits
from manyheads.lens.circuit_discovery.graph import ResidualStep
from manyheads.lens.inputs.cached_run import (
    ActivationEditor,
    CachedRun,
    EditFunction,
    HeadScope,
    replace_by,
    run_until,
)
from manyheads.lens.results import addresses
from manyheads.mixers.mixer import Mixer
from manyheads.models.layer import Layer, Residual
from manyheads.models.model_interface import ModelInputs
from manyheads.parts import norms
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Site, Sublayer, Tap, WatchContext, Watcher

Streams = Float[Tensor, "copies n c"]
Inputs = dict[Tap, Float[Tensor, "_ n _ _"]]
REMEDY = "use lens.patch or lens.ablate"


class Sublayers:
    """The sublayers of a native model, run one at a time on copies of a batch."""

    def __init__(self, scope: HeadScope, inputs: ModelInputs) -> None:
        self.scope, self.inputs = scope, inputs
        self.lengths = inputs.lengths(scope.model)
        self._lengths: dict[int, Lengths] = {}

    def site(self, step: ResidualStep, tap: Tap) -> Site:
        return Site(step.layer, tap, step.sublayer, self.scope.stack_name)

    def output_site(self, step: ResidualStep) -> Site:
        """Where what the writers of a step write is seen."""
        return self.site(step, Tap.HEAD_OUTPUT if step.heads else Tap.OUTPUT)

    def input_sites(self, step: ResidualStep) -> dict[Tap, Site]:
        """Where the inputs of the heads of an attention are seen, in the order of the run."""
        taps = [Tap.QUERY, Tap.KEY, Tap.VALUE]
        config = self.scope.config(step.layer)
        gates = () if config is None else config.gates
        if any(gate.at == "output" and gate.reads == "input" for gate in gates):
            # What closes the output of a head belongs to its query.
            taps.append(Tap.GATE_OUTPUT)
        return {tap: self.site(step, tap) for tap in taps}

    def recorded_sites(self, step: ResidualStep) -> list[Site]:
        """What a run has to record for `entering` and `written`."""
        return [self.site(step, Tap.BEFORE), self.output_site(step), self.site(step, Tap.AFTER)]

    def entering(
        self, step: ResidualStep, record: ActivationEditor | CachedRun
    ) -> Float[Tensor, "n c"]:
        """The residual stream that a step read in a run."""
        return record[self.site(step, Tap.BEFORE)].values

    def written(
        self, step: ResidualStep, record: ActivationEditor | CachedRun
    ) -> Float[Tensor, "w n c"]:
        """What each writer of a step wrote in a run."""
        outputs = record[self.output_site(step)].values
        return self.spread(step, outputs) if step.heads else outputs[None]

    def spread(self, step: ResidualStep, outputs: Float[Tensor, "n h d"]) -> Float[Tensor, "h n c"]:
        """The outputs of heads as they are added to the residual stream."""
        weight = self._projection(step)[0].unflatten(1, outputs.shape[1:])
        return torch.einsum("nhd,chd->hnc", outputs, weight.to(outputs.dtype))

    def bias(self, step: ResidualStep) -> Float[Tensor, " c"] | float:
        """What a step adds that no writer writes."""
        if step.heads:
            bias = self._projection(step)[1]
            return 0.0 if bias is None else bias
        rest = cast(Layer, self.scope.stack.layers[step.layer]).attention_rest
        return rest.vector if step.sublayer is Sublayer.ATTENTION and rest is not None else 0.0

    def linear(self, step: ResidualStep) -> bool:
        """Whether what a step adds is simply the sum of what its writers write."""
        return self._after_norm(step) is None and (self._head_norm(step) is None or not step.heads)

    def add(
        self,
        step: ResidualStep,
        stream: Float[Tensor, "*#k n c"],
        written: Float[Tensor, "*#k n c"],
    ) -> Float[Tensor, "*#k n c"]:
        """The residual stream after a step whose writers wrote this together."""
        within, after = self._head_norm(step), self._after_norm(step)
        if within is not None and step.heads:
            written = within(written)
        summed = stream + written
        return summed if after is None else after(summed)

    def read(self, step: ResidualStep, streams: Streams) -> Inputs:
        """The queries, keys and values of all heads for each stream."""
        sites = self.input_sites(step)
        record = ActivationEditor({}, sites.values())
        self.run(step, streams, record, list(sites.values())[-1])
        return {
            tap: record[site].values.unflatten(0, streams.shape[:2]) for tap, site in sites.items()
        }

    def attend(
        self, step: ResidualStep, streams: Streams, inputs: Inputs
    ) -> Float[Tensor, "copies n h d"]:
        """What each head of an attention makes of these queries, keys and values."""
        site, sites = self.site(step, Tap.HEAD_OUTPUT), self.input_sites(step)
        edits = {sites[tap]: replace_by(values.flatten(0, 1)) for tap, values in inputs.items()}
        record = ActivationEditor(edits, [site])
        self.run(step, streams, record, site)
        return record[site].values.unflatten(0, streams.shape[:2])

    def after(
        self, step: ResidualStep, record: ActivationEditor | CachedRun
    ) -> Float[Tensor, "n c"]:
        """The residual stream after a step of a run."""
        return record[self.site(step, Tap.AFTER)].values

    def written_together(
        self, step: ResidualStep, record: ActivationEditor | CachedRun
    ) -> Float[Tensor, "n c"]:
        """What all writers of a step wrote in a run, with its bias."""
        if not step.writers:
            return record[self.site(step, Tap.OUTPUT)].values
        return self.written(step, record).sum(0) + self.bias(step)

    def raw_outputs(self, step: ResidualStep, streams: Streams) -> Tensor:
        """What a feed-forward or a mixer gives for each stream, heads before their projection."""
        site = self.output_site(step)
        record = ActivationEditor({}, [site])
        self.run(step, streams, record, site)
        return record[site].values

    def go_on(self, step: ResidualStep, run: CachedRun, streams: Streams) -> Ragged:
        """The input of the readout if a feed-forward or a mixer reads these streams instead."""
        edits = {self.site(step, Tap.READ): replace_by(streams.flatten(0, 1))}
        return run.resume(step.layer, ActivationEditor(edits), len(streams))

    def output_gradient_site(self, step: ResidualStep) -> Site:
        """Where the gradient at what a step writes is read."""
        return self.output_site(step)

    def moved(
        self, step: ResidualStep, part: float, clean: CachedRun, corrupted: CachedRun
    ) -> dict[Site, EditFunction]:
        """Edits that move what a step writes from the corrupted run (0) to the clean one (1)."""
        site = self.output_site(step)
        start, end = corrupted[site].values, clean[site].values
        return {site: replace_by((start + part * (end - start)).requires_grad_(part > 0))}

    def tracked(self, step: ResidualStep) -> tuple[dict[Site, EditFunction], list[Site]]:
        """Where gradients are needed for those at the readers of a step, and edits for them."""
        if step.owners is not None:
            return {}, [*self.input_sites(step).values(), self.output_site(step)]
        read = self.site(step, Tap.READ)
        return {read: another_view}, [read, self.output_site(step)]

    def pull(
        self, step: ResidualStep, stream: Float[Tensor, "n c"], gradients: Mapping[Site, Tensor]
    ) -> Float[Tensor, "r n c"]:
        """The gradient at each reader of a step that read this stream."""
        if step.owners is None:
            gradient = gradients.get(self.site(step, Tap.READ))
            return torch.zeros_like(stream)[None] if gradient is None else gradient[None]
        attention = self.scope.attention(step.layer)
        projected: list[Tensor] = []
        hook = attention.project.register_forward_hook(lambda *call: projected.append(call[2]))
        try:
            leaf, inputs = self._read_differentiably(step, stream)
        finally:
            hook.remove()
        if not projected or attention.config.norm_span == "heads":
            return self._pull_each(step, leaf, inputs, gradients)
        taps = [tap for tap, site in self.input_sites(step).items() if site in gradients]
        rows = torch.zeros_like(projected[0])
        if taps:
            outputs = [inputs[tap] for tap in taps]
            towards = [gradients[self.site(step, tap)][None] for tap in taps]
            rows = torch.autograd.grad(outputs, projected[0], towards)[0]
        normed = self._times_own_weights(step, attention, rows)
        return pull_back(self._residual(step).read, stream, normed)

    def _times_own_weights(
        self, step: ResidualStep, attention: Attention, rows: Float[Tensor, "n rows"]
    ) -> Float[Tensor, "r n c"]:
        """Gradients at the rows of the projection as those at what it reads, reader by reader."""
        sizes = attention.our_rows
        parts = dict(zip(sizes, rows.split(list(sizes.values()), dim=-1), strict=True))
        weights = attention.projections()
        names = {Tap.QUERY: ["query", "gate_query", "gate_output"], Tap.KEY: ["key", "gate_key"]}
        names[Tap.VALUE] = ["value", "gate_value"]
        heads = {Tap.QUERY: step.heads, Tap.KEY: step.key_heads, Tap.VALUE: step.key_heads}
        readers = []
        for tap, own in names.items():
            total = rows.new_zeros(heads[tap], len(rows), weights["query"].shape[1])
            for name in own:
                if name in parts:
                    total = total + _by_head(parts[name], weights[name].detach(), heads[tap])
            readers.append(total)
        return torch.cat(readers)

    def _read_differentiably(
        self, step: ResidualStep, stream: Float[Tensor, "n c"]
    ) -> tuple[Float[Tensor, "n c"], Inputs]:
        leaf = stream.detach().clone().requires_grad_()
        with torch.enable_grad():
            return leaf, self.read(step, leaf[None])

    def _pull_each(
        self, step: ResidualStep, leaf: Tensor, inputs: Inputs, gradients: Mapping[Site, Tensor]
    ) -> Float[Tensor, "r n c"]:
        """The gradient through one input of one head at a time."""
        readers = []
        for tap, head in step.inputs():
            outputs, towards = [], []
            for name in (tap, Tap.GATE_OUTPUT) if tap is Tap.QUERY else (tap,):
                gradient = gradients.get(self.site(step, name))
                if gradient is not None:
                    own = slice(head, head + 1) if gradient.shape[1] > 1 else slice(None)
                    part = torch.zeros_like(inputs[name])
                    part[0, :, own] = gradient[:, own]
                    outputs.append(inputs[name])
                    towards.append(part)
            reader = torch.zeros_like(leaf)
            if outputs:
                reader = torch.autograd.grad(outputs, leaf, towards, retain_graph=True)[0]
            readers.append(reader)
        return torch.stack(readers)

    def outputs(self, step: ResidualStep, streams: Streams) -> Float[Tensor, "w copies n c"]:
        """What a feed-forward or a mixer writes for each stream."""
        values = self.raw_outputs(step, streams)
        written = self.spread(step, values) if step.heads else values[None]
        return written.unflatten(1, streams.shape[:2])

    def finish(self, stream: Float[Tensor, "*#k n c"]) -> Float[Tensor, "*#k n c"]:
        """What the readout receives from the residual stream after the last step."""
        final: Tensor = self.scope.stack.final_norm(stream)
        return final

    def run(
        self, step: ResidualStep, streams: Streams, watch: ActivationEditor, last: Site
    ) -> None:
        """Run one sublayer on each of these streams until a watcher has seen the last site."""
        x = self.pack(streams)
        stack = self.scope.stack
        if step.sublayer is not Sublayer.FEEDFORWARD:
            run_until(lambda watcher: stack.resume(x, step.layer, watch=watcher), watch, last)
            return
        module = cast(Layer, stack.layers[step.layer])

        def finish(watcher: Watcher) -> Any:
            return module.finish(x, x, None, WatchContext(watcher, stack.name, step.layer))

        run_until(finish, watch, last)

    def pack(self, streams: Streams) -> Ragged:
        copies = len(streams)
        if copies not in self._lengths:
            self._lengths[copies] = Lengths.of(self.lengths.each * copies, streams.device)
        return Ragged(streams.flatten(0, 1), self._lengths[copies])

    def _inner(self, step: ResidualStep) -> Attention | Mixer:
        return addresses.heads_at(self.scope.stack, step.layer, step.sublayer)

    def _residual(self, step: ResidualStep) -> Residual:
        module = self.scope.stack.layers[step.layer]
        residual: Residual = getattr(module, f"{step.sublayer.value}_residual")
        return residual

    def _projection(
        self, step: ResidualStep
    ) -> tuple[Float[Tensor, "c hd"], Float[Tensor, " c"] | None]:
        """The weight and bias of the output projection, scaled as the stream gets them."""
        output = self._inner(step).output
        weight, bias = output.weight.detach(), None if output.bias is None else output.bias.detach()
        scale = self._residual(step).second_norm
        if not isinstance(scale, norms.ChannelScale):
            return weight, bias
        by_channel = scale.weight.detach()
        return weight * by_channel[:, None], None if bias is None else bias * by_channel

    def _head_norm(self, step: ResidualStep) -> nn.Module | None:
        norm = self._residual(step).second_norm
        return None if norm is None or isinstance(norm, norms.ChannelScale) else norm

    def _after_norm(self, step: ResidualStep) -> nn.Module | None:
        residual = self._residual(step)
        return residual.norm if isinstance(residual.placement, norms.PostNorm) else None


def pull_back(
    function: Callable[[Tensor], Tensor],
    at: Float[Tensor, "n c"],
    towards: Float[Tensor, "r n c"],
) -> Float[Tensor, "r n c"]:
    """Gradients behind a function as gradients in front of it."""
    with torch.enable_grad():
        leaf = at.detach().expand(len(towards), *at.shape).clone().requires_grad_()
        return torch.autograd.grad(function(leaf), leaf, towards)[0]


def _by_head(
    rows: Float[Tensor, "n rows"], weight: Float[Tensor, "rows c"], heads: int
) -> Float[Tensor, "h n c"]:
    return rows.unflatten(1, (heads, -1)).movedim(1, 0) @ weight.unflatten(0, (heads, -1))


def another_view(values: Tensor) -> Tensor:
    """An edit that changes nothing: the values as a tensor with a gradient of its own."""
    return values.view_as(values)


def check_edges(scope: HeadScope) -> None:
    """Refuse a model whose heads do not each read and write one residual stream."""
    if scope.model.reads_pairs:
        raise InputError("circuits of encoder-decoders are not supported", "use lens.patch")
    direct_logits.check_stream(scope)
    if isinstance(scope.stack, wrapped_parts.WrappedStack):
        for facts, _ in scope.stack.facts.attentions:
            if facts.weights is not None or facts.projection is None:
                raise InputError(f"the inputs of heads of {facts.path} cannot be changed", REMEDY)
        return
    for layer in scope.layers:
        config = scope.config(layer)
        for gate in () if config is None else config.gates:
            if gate.at == "final" or (gate.heads == "shared" and gate.reads == "input"):
                raise InputError(f"a gate of layer {layer} is shared by its heads", REMEDY)
