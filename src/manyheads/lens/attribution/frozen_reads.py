"""Queries and keys as linear maps of the residual stream, with norms and gates frozen."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.bridge import residual_writes, structure, watched_run, wrapped_model, wrapped_parts
from manyheads.errors import InputError
from manyheads.lens.attribution import stream_parts
from manyheads.lens.inputs import cached_run
from manyheads.models.model_interface import ModelInputs
from manyheads.parts import norms
from manyheads.parts.gates import GATE_TAPS
from manyheads.parts.positions.rotary import Rotation
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Head, Record, Sublayer, Tap

Side = Literal["query", "key"]
SIDES: tuple[Side, Side] = ("query", "key")


@dataclass(frozen=True, slots=True, eq=False)
class NativeReads:
    """The query and the key of one head of ours from the parts of the stream that it reads."""

    scope: cached_run.HeadScope
    head: Head
    record: cached_run.ActivationEditor
    lengths: Lengths

    def read(
        self, side: Side, stream: stream_parts.StreamParts, rows: Int[Tensor, " m"]
    ) -> stream_parts.StreamParts:
        """The parts of the head's queries or keys, as its kernel receives them, at some tokens."""
        layer, attention = self.head.layer, self.scope.attention(self.head.layer)
        residual = getattr(self.scope.stack.layers[layer], f"{self.scope.sublayer.value}_residual")
        from_memory = side == "key" and self.scope.sublayer is Sublayer.CROSS
        if not from_memory and not isinstance(residual.placement, norms.PostNorm):
            stream = stream.normed(residual.norm)
        norm = getattr(attention, f"{side}_norm")
        together = attention.config.norm_span == "heads" and isinstance(norm, norms.Normalize)
        size = attention.config.size
        own = self.head.head if side == "query" else attention.config.owners[self.head.head]
        mine = slice(own * size, (own + 1) * size)
        # Heads that are normed together need the divisor of all.
        channels = slice(None) if together else mine
        weight, bias = _rows_of(attention, side)
        parts = stream.projected(weight[channels], None if bias is None else bias[channels])
        for gate in attention.config.gates:
            if gate.at == side:
                opened = self.record[self.scope.site(layer, GATE_TAPS[side])].values[rows]
                shape = attention.config.gate_shape(side)
                spread = opened.expand(len(rows), *shape).flatten(1)[:, channels]
                multiplies = gate.operation == "multiply"
                parts = parts.scaled(spread) if multiplies else parts.with_bias(spread)
        parts = parts.normed(norm)
        if together:
            parts = stream_parts.StreamParts(parts.names, parts.values[..., mine])
        rotation = self._rotation()
        if rotation is not None and not from_memory:
            turned = Rotation(rotation.cos[rows], rotation.sin[rows])(parts.values)
            parts = stream_parts.StreamParts(parts.names, turned)
        return parts

    def _rotation(self) -> Rotation | None:
        if self.scope.sublayer is Sublayer.CROSS:
            return None
        stack = self.scope.stack
        encodings = stack.encode_positions(self.lengths.positions, self.lengths)
        encoding = encodings[stack.position_owner[self.head.layer]]
        return encoding if isinstance(encoding, Rotation) else None


def _rows_of(attention: Attention, side: Side) -> tuple[Tensor, Tensor | None]:
    """The rows of the input projection that make queries or keys, and their bias."""
    for _, linear, rows in attention.input_layers:
        if side in rows:
            start = sum(list(rows.values())[: list(rows).index(side)])
            own = slice(start, start + rows[side])
            bias = cast("Tensor | None", linear.bias)
            return linear.weight[own], None if bias is None else bias[own]
    raise AssertionError("an attention has queries and keys")


@dataclass(slots=True, eq=False)
class WrappedReads:
    """The same for an attention of `transformers`, whose maps are gradients of its own modules.

    The layer runs again with its norms frozen, once on its own stream and once on zeros: the
    gradients are the linear map, and what it gives for zeros is the bias.
    """

    scope: cached_run.HeadScope
    head: Head
    inputs: ModelInputs
    entering: Ragged
    expected: Float[Tensor, " c"]
    query_row: int
    _maps: dict[Side, tuple[Float[Tensor, "n d c"], Float[Tensor, "n d"]]] = field(
        default_factory=dict
    )

    def read(
        self, side: Side, stream: stream_parts.StreamParts, rows: Int[Tensor, " m"]
    ) -> stream_parts.StreamParts:
        if not self._maps:
            self._trace()
        weights, biases = self._maps[side]
        values = torch.einsum("mwc,mdc->mwd", stream.values, weights[rows].double())
        return stream_parts.StreamParts(stream.names, values).with_bias(biases[rows])

    def _trace(self) -> None:
        with torch.enable_grad():
            traced = _Trace(self)
            sides = traced.run(zero=False)
            assert traced.leaf is not None
            for side, own in sides.items():
                gradients = [
                    torch.autograd.grad(own[:, channel].sum(), traced.leaf, retain_graph=True)[0]
                    for channel in range(own.shape[1])
                ]
                weights = torch.stack(gradients, -2).flatten(0, -3)
                self._maps[side] = weights, own.detach()
        with torch.no_grad():
            biases = traced.run(zero=True)
        for side, (weights, own) in self._maps.items():
            leaf = traced.leaf.detach().flatten(0, -2)
            linear = torch.einsum("nc,ndc->nd", leaf.double(), weights.double())
            total = linear + biases[side].double()
            if not residual_writes.close(total.to(own.dtype), own):
                raise InputError(
                    f"the {side} of {self.head} is not linear in the residual stream, even with "
                    "frozen norms",
                    stream_parts.ELSEWHERE,
                )
            self._maps[side] = weights, biases[side]


class _Trace:
    """Runs an attention on a stream that gradients are taken of, or on zeros."""

    def __init__(self, reads: WrappedReads) -> None:
        self.reads = reads
        self.leaf: Tensor | None = None
        self._frozen: list[residual_writes.FrozenNorm] = []
        self._zero, self._started, self._calls = False, False, 0
        stack = cast(wrapped_parts.WrappedStack, reads.scope.stack)
        crosses = reads.scope.sublayer is Sublayer.CROSS
        module = next(
            facts.module
            for facts, layer in stack.facts.attentions
            if layer == reads.head.layer and facts.cross is crosses
        )
        # What is in the layer; the stream that enters the layer itself is still to be replaced.
        inside = [list(layer.modules())[1:] for layer in stack.facts.layers]
        self._modules = next(
            modules for modules in inside if any(part is module for part in modules)
        )

    def run(self, *, zero: bool) -> dict[Side, Float[Tensor, "n d"]]:
        """The queries and keys of the head, of self-attention; of cross-attention the queries."""
        reads, scope = self.reads, self.reads.scope
        self._zero, self._started, self._calls = zero, False, 0
        taps = {"query": Tap.QUERY, "key": Tap.KEY}
        sites = {side: scope.site(reads.head.layer, taps[side]) for side in SIDES}
        record = Record(sites.values())
        entry = watched_run.ResidualEntry(scope.stack_name, reads.head.layer, reads.entering)
        model = cast(wrapped_model.WrappedModel, scope.model)
        with self._hooks():
            cached_run.run_until(
                lambda watch: model.run_inputs(reads.inputs, watch, logits=False, entry=entry),
                record,
                sites["key"],
            )
        config = scope.attention(reads.head.layer).config
        values: dict[Side, Tensor] = {}
        for side in SIDES[: 1 if scope.sublayer is Sublayer.CROSS else 2]:
            tensor = record[sites[side]]
            assert isinstance(tensor, Ragged)
            own = reads.head.head if side == "query" else config.owners[reads.head.head]
            values[side] = tensor.values[:, own]
        return values

    @contextmanager
    def _hooks(self) -> Iterator[None]:
        handles = []
        for module in self._modules:
            handles.append(module.register_forward_pre_hook(self._before, with_kwargs=True))
            if "norm" in type(module).__name__.lower() and not list(module.children()):
                handles.append(module.register_forward_hook(self._freeze))
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _before(self, _: nn.Module, args: Any, kwargs: Any) -> Any:
        """Replace the stream where the first module receives it."""
        hidden = structure.hidden_of_arguments(args, kwargs)
        if self._started or hidden is None:
            return None
        row = hidden.detach()[0, self.reads.query_row]
        expected = self.reads.expected.to(row.dtype)
        if len(hidden) > 1 or not residual_writes.close(row, expected):
            return None
        self._started = True
        leaf = torch.zeros_like(hidden) if self._zero else hidden.detach()
        if not self._zero:
            self.leaf = leaf.requires_grad_()
        return watched_run.replaced(args, kwargs, hidden, leaf)

    def _freeze(self, module: nn.Module, args: Any, output: Any) -> Any:
        if not self._started or not isinstance(output, Tensor):
            return None
        received = args[0]
        flat = received.reshape(-1, received.shape[-1]).double()
        if not self._zero:
            # Freezing runs the norm.
            self._started = False
            self._frozen.append(residual_writes.FrozenNorm.of(module, flat.detach()))
            self._started = True
        normed = self._frozen[self._calls].apply(flat)
        self._calls += 1
        return normed.to(output.dtype).reshape(output.shape)
