"""One forward of a `transformers` model under a watcher: hooks on its layers, our attention."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from manyheads.attention import mix
from manyheads.bridge.padded_call import PackedCall, Packing, PaddedCall
from manyheads.bridge.registry import current_listener, listening, our_attention
from manyheads.bridge.returned_weights import weights_call
from manyheads.bridge.structure import (
    ProbedAttention,
    StackFacts,
    Structure,
    hidden_of_arguments,
    hidden_of_output,
    hooked,
)
from manyheads.errors import InputError
from manyheads.kernels import reference
from manyheads.kernels.contract import Request
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Sublayer, Tap, WatchContext, Watcher, observe

# What is read from returned weights.
OF_WEIGHTS = (Tap.QUERY, Tap.KEY, Tap.SCORES, Tap.PATTERN)


def read_only(tap: Tap) -> InputError:
    return InputError(
        f"the {tap.value} of this attention cannot be changed: the model does not dispatch its "
        "attention, and only its weights are read",
        "change head outputs or the residual stream",
    )


class ReadoutReached(Exception):  # noqa: N818, it ends a forward that has done its work
    """The hidden states are known, and nobody wants the logits."""


@dataclass(frozen=True, slots=True, eq=False)
class ResidualEntry:
    """A residual stream that replaces what enters a layer; the layers below need not run."""

    stack: str
    layer: int
    hidden: Ragged


@dataclass(slots=True, eq=False)
class _Stream:
    """Where a forward stands in one stack."""

    facts: StackFacts
    calls: int = 0
    layer: int = -1


@dataclass(slots=True, eq=False)
class WatchedRun:
    """Listens to the attentions of a model and shows its activations to a watcher.

    `lengths` are those of the padded sequences of a stack. `requests` are those of the
    attentions that are being computed.
    """

    structure: Structure
    watcher: Watcher
    lengths: Mapping[str, Lengths]
    readout_stack: str
    logits_too: bool
    entry: ResidualEntry | None = None
    requests: dict[tuple[str, int, Sublayer], Request] = field(default_factory=dict)
    final: Ragged | None = None
    after_layers: Tensor | None = None
    _streams: dict[str, _Stream] = field(default_factory=dict)
    _places: dict[int, tuple[ProbedAttention, StackFacts, int]] = field(default_factory=dict)
    _projected: dict[int, tuple[WatchContext, Packing, int]] = field(default_factory=dict)
    _open: dict[int, WatchContext] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for stack in self.structure.stacks.values():
            self._streams[stack.name] = _Stream(stack)
            for facts, index in stack.attentions:
                self._places[id(facts.module)] = facts, stack, index % stack.slots

    @contextmanager
    def listen(self, model: nn.Module) -> Iterator[None]:
        """The forwards of the model inside the block are watched."""
        switched = our_attention(model, weights=self.structure.by_weights)
        with switched, listening(self), hooked(*self._hooks()), self._skipped():
            yield

    def run(self, model: nn.Module, inputs: Mapping[str, Any]) -> Any:
        """The output of the model; None where it ended at the readout."""
        with self.listen(model):
            try:
                return model(**inputs)
            except ReadoutReached:
                return None

    def owns(self, module: nn.Module) -> bool:
        return id(module) in self._places

    def attend(self, module: nn.Module, call: PaddedCall) -> Tensor:
        facts, context = self._places[id(module)][0], self._context(module)
        packed, place = (
            self._packed(call, context),
            (context.stack, context.layer, context.sublayer),
        )
        self.requests[place] = packed.request
        query = observe(context, Tap.QUERY, packed.query.values, packed.query)
        key = observe(context, Tap.KEY, packed.key.values, packed.key)
        value = observe(context, Tap.VALUE, packed.value.values, packed.value)
        output = mix(query, key, value, packed.request, context)
        output = observe(context, Tap.MIXED, output, packed.query)
        self.requests.pop(place)
        if facts.projection is None or facts.direct:
            output = observe(context, Tap.HEAD_OUTPUT, output, packed.query)
        if facts.projection is not None:
            self._projected[id(facts.projection)] = context, packed.packing, facts.heads
        return packed.unpack(output).to(call.query.dtype)

    def _context(self, module: nn.Module) -> WatchContext:
        """The sublayer whose attention is being called."""
        facts, stack, slot = self._places[id(module)]
        stream = self._streams[stack.name]
        if not stack.order:
            stream.layer = stream.calls % len(stack.attentions)
            stream.calls += 1
        layer = stream.layer * stack.slots + slot
        sublayer = Sublayer.CROSS if facts.cross else Sublayer.ATTENTION
        return WatchContext(self.watcher, stack.name, layer, sublayer)

    def _packed(self, call: PaddedCall, context: WatchContext) -> PackedCall:
        lengths = self._true_lengths(context.stack, (call.query.shape[0], call.query.shape[2]))
        cross = context.sublayer is Sublayer.CROSS
        return PackedCall.of(call, cross=cross, true_lengths=lengths)

    def _before_weights(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Where an attention that does not dispatch stands, and how its projection is shown."""
        facts, context = self._places[id(module)][0], self._context(module)
        self._open[id(module)] = context
        hidden = hidden_of_arguments(args, kwargs)
        if facts.projection is not None and hidden is not None:
            packing = self.packing(context.stack, hidden)
            self._projected[id(facts.projection)] = context, packing, facts.heads

    def _show_weights(self, module: nn.Module, _: Any, output: Any) -> None:
        """The weights that such an attention returned; they have done their work already."""
        facts, context = self._places[id(module)][0], self._open.pop(id(module))
        assert facts.weights is not None
        weights = facts.weights.read(output)
        if weights is None or not any(map(context.wants, OF_WEIGHTS)):
            return
        packed, place = (
            self._packed(weights_call(weights, facts.size), context),
            (context.stack, context.layer, context.sublayer),
        )
        self.requests[place] = packed.request
        for tap, part in ((Tap.QUERY, packed.query), (Tap.KEY, packed.key)):
            if observe(context, tap, part.values, part) is not part.values:
                raise read_only(tap)
        self.requests.pop(place)
        if context.wants(Tap.SCORES) or context.wants(Tap.PATTERN):
            scores = reference.scores(packed.query.values, packed.key.values, packed.request)
            patterns = reference.patterns(scores, packed.request)
            for tap, own in ((Tap.SCORES, scores), (Tap.PATTERN, patterns)):
                pairs = zip(context.at(tap, own).each, own.each, strict=True)
                if not all(torch.equal(*pair) for pair in pairs):
                    raise read_only(tap)

    def _true_lengths(self, stack: str, shape: tuple[int, int]) -> Lengths | None:
        lengths = self.lengths.get(stack)
        fits = lengths is not None and (len(lengths), lengths.longest) == shape
        return lengths if fits else None

    def packing(self, stack: str, hidden: Tensor) -> Packing:
        shape = hidden.shape[0], hidden.shape[1]
        lengths = self._true_lengths(stack, shape)
        if lengths is None:
            lengths = Lengths.of([shape[1]] * shape[0], hidden.device)
        return Packing.of(lengths.to(hidden.device), [0] * shape[0], shape)

    def _hooks(self) -> Iterator[Callable[[], Any]]:
        mine = self._in_this_thread
        for stack in self.structure.stacks.values():
            for layer in {id(module): module for module in stack.layers}.values():
                before = mine(self._before_layer(stack))
                yield partial(layer.register_forward_pre_hook, before, with_kwargs=True)
                if stack.seen_layers:
                    yield partial(layer.register_forward_hook, mine(self._after_layer(stack)))
            if stack.name != self.readout_stack or self.structure.readout is None:
                yield partial(stack.owner.register_forward_hook, mine(self._after_stack(stack)))
            attentions = {id(facts.projection): facts for facts, _ in stack.attentions}
            for facts in attentions.values():
                if facts.projection is None:
                    continue
                if not facts.direct:
                    yield partial(facts.projection.register_forward_pre_hook, mine(self._project))
                yield partial(facts.projection.register_forward_hook, mine(self._written))
            returning = {id(facts.module): facts for facts, _ in stack.attentions if facts.weights}
            for facts in returning.values():
                before, after = mine(self._before_weights), mine(self._show_weights)
                yield partial(facts.module.register_forward_pre_hook, before, with_kwargs=True)
                yield partial(facts.module.register_forward_hook, after)
        if self.structure.readout is not None:
            linear = self.structure.readout.linear
            yield partial(linear.register_forward_pre_hook, mine(self._read))

    def _in_this_thread(self, hook: Callable[..., Any]) -> Callable[..., Any]:
        """A hook that leaves alone the forwards of the same model in other threads."""

        def guarded(*args: Any) -> Any:
            return hook(*args) if current_listener() is self else None

        return guarded

    def _before_layer(self, stack: StackFacts) -> Callable[..., Any]:
        stream = self._streams[stack.name]
        once = len(set(stack.order)) == len(stack.order) <= len(stack.layers)
        places = {id(layer): index for index, layer in enumerate(stack.layers)} if once else {}

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            # A layer for images does not run on texts alone, so that calls are not counted.
            called = stack.order[stream.calls % len(stack.order)]
            stream.layer = places.get(id(module), called)
            stream.calls += 1
            hidden = hidden_of_arguments(args, kwargs)
            if hidden is None or not stack.seen_layers:
                return None
            packing = self.packing(stack.name, hidden)
            changed = hidden
            first = stream.layer * stack.slots
            entry = self.entry
            if entry is not None and (entry.stack, entry.layer) == (stack.name, first):
                changed = packing.unpack(entry.hidden.values, hidden)
            elif entry is not None and entry.stack == stack.name and first < entry.layer:
                return None
            if stream.layer == stack.order[0]:
                whole = WatchContext(self.watcher, stack.name)
                changed = self._show(whole, Tap.EMBEDDINGS, changed)
            context = WatchContext(self.watcher, stack.name, first, Sublayer.ATTENTION)
            changed = self._show(context, Tap.BEFORE, changed)
            return None if changed is hidden else replaced(args, kwargs, hidden, changed)

        return before

    def _after_layer(self, stack: StackFacts) -> Callable[..., Any]:
        stream = self._streams[stack.name]
        crossed = {index for facts, index in stack.attentions if facts.cross}

        def after(_: nn.Module, __: Any, output: Any) -> Any:
            layer = stream.layer * stack.slots + stack.slots - 1
            entry = self.entry
            if entry is not None and entry.stack == stack.name and layer < entry.layer:
                return None
            sublayer = Sublayer.CROSS if layer in crossed else Sublayer.ATTENTION
            hidden = hidden_of_output(output)
            if hidden is None:
                return None
            context = WatchContext(self.watcher, stack.name, layer, sublayer)
            changed = self._show(context, Tap.AFTER, hidden)
            return None if changed is hidden else _with_hidden(output, changed)

        return after

    def _after_stack(self, stack: StackFacts) -> Callable[..., Any]:
        def after(_: nn.Module, __: Any, output: Any) -> Any:
            hidden = hidden_of_output(output)
            if hidden is None or hidden.dim() != 3:
                return None
            if stack.name == self.readout_stack:
                self.after_layers = hidden
                return None
            changed = self._show(WatchContext(self.watcher, stack.name), Tap.FINAL, hidden)
            return None if changed is hidden else _with_hidden(output, changed)

        return after

    def _show(self, context: WatchContext, tap: Tap, hidden: Tensor) -> Tensor:
        """The hidden states after the watcher has seen them; padding stays as it is."""
        if not context.wants(tap):
            return hidden
        packing = self.packing(context.stack, hidden)
        ragged = packing.pack(hidden)
        answer = context.at(tap, ragged)
        return hidden if answer is ragged else packing.unpack(answer.values, hidden)

    def _project(self, module: nn.Module, args: Any) -> Any:
        """Head outputs as the projection receives them, gated or normed."""
        if id(module) not in self._projected:
            return None
        context, packing, heads = self._projected[id(module)]
        if not context.wants(Tap.HEAD_OUTPUT):
            return None
        received = args[0]
        flat = received.reshape(*packing.shape, -1)
        ragged = packing.pack(flat.unflatten(-1, (heads, -1)))
        answer = context.at(Tap.HEAD_OUTPUT, ragged)
        if answer is ragged:
            return None
        changed = packing.unpack(answer.values.flatten(1), flat).reshape(received.shape)
        return (changed, *args[1:])

    def _written(self, module: nn.Module, _: Any, output: Any) -> Any:
        """What the heads of an attention write together."""
        if id(module) not in self._projected or not isinstance(output, Tensor):
            return None
        context, packing, _heads = self._projected.pop(id(module))
        if not context.wants(Tap.OUTPUT):
            return None
        flat = output.reshape(*packing.shape, -1)
        ragged = packing.pack(flat)
        answer = context.at(Tap.OUTPUT, ragged)
        if answer is ragged:
            return None
        return packing.unpack(answer.values, flat).reshape(output.shape)

    def _read(self, _: nn.Module, args: Any) -> Any:
        hidden = args[0]
        packing = (
            self.packing(self.readout_stack, hidden)
            if hidden.dim() == 3
            else Packing(Lengths.of([1] * len(hidden), hidden.device), (len(hidden), 1))
        )
        states = hidden if hidden.dim() == 3 else hidden.reshape(len(hidden), 1, -1)
        ragged = packing.pack(states)
        self.final = WatchContext(self.watcher, self.readout_stack).at(Tap.FINAL, ragged)
        if not self.logits_too:
            raise ReadoutReached
        if self.final is ragged:
            return None
        return (packing.unpack(self.final.values, states).reshape(hidden.shape), *args[1:])

    @contextmanager
    def _skipped(self) -> Iterator[None]:
        """The layers below the entry return what they receive."""
        patched: list[nn.Module] = []
        if self.entry is not None:
            stack = self.structure.stacks[self.entry.stack]
            if stack.skippable and stack.seen_layers:
                patched = list(stack.layers[: self.entry.layer // stack.slots])
        before = [module.__dict__.get("forward") for module in patched]

        def pass_on(*args: Any, **kwargs: Any) -> Any:
            hidden = hidden_of_arguments(args, kwargs)
            return (hidden,) if stack.returns_tuple else hidden

        try:
            for module in patched:
                module.forward = pass_on
            yield
        finally:
            for module, own in zip(patched, before, strict=True):
                if own is None:
                    module.__dict__.pop("forward", None)
                else:
                    module.forward = own


def replaced(args: Any, kwargs: dict[str, Any], old: Tensor, new: Tensor) -> tuple[Any, Any]:
    """The arguments of a call with another tensor."""
    new_args = tuple(new if argument is old else argument for argument in args)
    return new_args, {
        name: new if argument is old else argument for name, argument in kwargs.items()
    }


def _with_hidden(output: Any, hidden: Tensor) -> Any:
    """The output of a module with other hidden states."""
    if isinstance(output, Tensor):
        return hidden
    if getattr(output, "last_hidden_state", None) is not None:
        output.last_hidden_state = hidden
        return output
    return type(output)((hidden, *output[1:]))
