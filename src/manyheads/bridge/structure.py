"""What one probing forward finds in a `transformers` model: stacks, layers, attentions, readout."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.bridge import padded_call, registry, residual_writes, returned_weights
from manyheads.errors import InputError
from manyheads.parts.masks import Causal, Full, Mask, MaskBySequence

# Arguments by which a decoder layer gives an attention the tokens of another sequence.
MEMORY_ARGUMENTS = ("key_value_states", "encoder_hidden_states", "cross_attention_states")
HIDDEN_ARGUMENTS = ("hidden_states", "hidden_state", "x", "inputs_embeds")


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ProbedAttention:
    """What a probing forward saw of one attention."""

    module: nn.Module
    path: str
    cross: bool
    heads: int
    key_heads: int
    size: int
    value_size: int
    scale: float
    mask: Mask
    has_sink: bool
    width: int
    projection: nn.Module | None = None
    # Whether the projection receives what we return, and not a gated or normed version of it.
    direct: bool = True
    # How the projection's output is added to the residual stream; None where that was not found.
    write: residual_writes.ResidualWrite | None = None
    # Where it returns its weights, if it does not dispatch.
    weights: returned_weights.WeightsOutput | None = None


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StackFacts:
    """The layers of one residual stream.

    `order` is the index of each layer in the order of calls. `slots` is the number of attentions of
    a kind in a layer, `skippable` whether a layer returns nothing but its hidden states.
    """

    name: str
    path: str
    owner: nn.Module
    layers: tuple[nn.Module, ...]
    order: tuple[int, ...]
    attentions: tuple[tuple[ProbedAttention, int], ...]
    width: int
    slots: int = 1
    seen_layers: bool = True
    skippable: bool = True
    # The norm between the last layer and the readout, if it is all that is between them.
    final_norm: nn.Module | None = None
    returns_tuple: bool = False

    @property
    def depth(self) -> int:
        """The number of layers, counting a module that is called again as another layer."""
        return (max(self.order) + 1 if self.order else len(self.attentions)) * self.slots

    @property
    def unseen(self) -> str:
        """Why the residual stream before some attentions is not seen; empty if all of it is."""
        if not self.layers:
            return f"{self.path} is not a list of layers"
        if not self.seen_layers:
            kind = type(self.layers[0]).__name__
            return f"{kind} does not take and return one residual stream (batch, tokens, width)"
        if self.slots > 1:
            kind = type(self.layers[0]).__name__
            return f"{kind} has {self.slots} attentions, and the stream between them is not seen"
        return ""


LogitChange = Literal["none", "scale", "softcap"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ReadoutFacts:
    """The linear layer whose output becomes the logits, and how: times or within `amount`."""

    linear: nn.Module
    change: LogitChange = "none"
    amount: float = 1.0
    by_token: bool = True

    def finish(self, logits: Float[Tensor, "*n v"]) -> Float[Tensor, "*n v"]:
        if self.change == "scale":
            return logits * self.amount
        if self.change == "softcap":
            return torch.tanh(logits / self.amount) * self.amount
        return logits


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Structure:
    """The parts of a model that the lens can watch, and what was not found."""

    stacks: dict[str, StackFacts]
    readout: ReadoutFacts | None
    silent: tuple[str, ...] = ()
    # Whether weights are read from what modules return, since none dispatches.
    by_weights: bool = False

    @property
    def causal(self) -> bool:
        """Whether no self-attention of the last stack sees later tokens."""
        last = list(self.stacks.values())[-1]
        masks = [facts.mask for facts, _ in last.attentions if not facts.cross]
        return bool(masks) and all(mask.reach.after == 0 for mask in masks)


@dataclass(slots=True, eq=False)
class _LayerCall:
    module: nn.Module
    hidden: Tensor | None = None
    plain: bool = False
    same_shape: bool = False
    in_tuple: bool = False
    output: Tensor | None = None
    # The leaves that ran in it, as a range of those of the probe.
    start: int = 0
    stop: int = 0


@dataclass(slots=True, eq=False)
class _AttentionCall:
    module: nn.Module
    call: padded_call.PaddedCall
    output: Tensor
    around: tuple[_LayerCall, ...]
    memory: bool
    layer: _LayerCall | None = None
    projection: nn.Module | None = None
    direct: bool = False
    projected: Tensor | None = None
    weights: returned_weights.WeightsOutput | None = None


@dataclass(slots=True, eq=False)
class _Probe:
    """Records the calls of one forward; it listens to every attention.

    `own_linears` are the linear layers below each module, `near_linears` those below its parent.
    """

    modules: dict[str, nn.Module]
    residual_factor: float
    names: dict[int, str] = field(init=False)
    own_linears: dict[int, set[int]] = field(init=False)
    near_linears: dict[int, set[int]] = field(init=False)
    attentions: list[_AttentionCall] = field(default_factory=list)
    layers: list[_LayerCall] = field(default_factory=list)
    leaves: list[tuple[nn.Module, Tensor, Tensor]] = field(default_factory=list)
    open_layers: list[_LayerCall] = field(default_factory=list)
    memories: set[int] = field(default_factory=set)
    returned: list[returned_weights.ReturnedTensor] = field(default_factory=list)
    _starts: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        items = self.modules.items()
        self.names = {id(module): name for name, module in items}
        self.own_linears = {
            id(module): {id(part) for part in module.modules() if is_linear(part)}
            for _, module in items
        }
        self.near_linears = {
            id(module): self.own_linears[id(self.modules.get(name.rpartition(".")[0], module))]
            for name, module in items
        }

    def owns(self, module: nn.Module) -> bool:  # noqa: ARG002, it listens to all
        return True

    def attend(self, module: nn.Module, call: padded_call.PaddedCall) -> Tensor:
        options = {
            "scaling": call.scale,
            "softcap": call.softcap,
            "s_aux": call.sink,
            "position_bias": call.position_bias,
            "indices": call.chosen_keys,
        }
        output = registry.attend_plainly(
            module, call.query, call.key, call.value, call.mask, **options
        )
        memory = id(module) in self.memories
        layers = tuple(self.open_layers)
        self.attentions.append(_AttentionCall(module, call, output, layers, memory))
        return output

    def saw_leaf(self, module: nn.Module, args: Any, output: Any) -> None:
        if not args or not isinstance(args[0], Tensor) or not isinstance(output, Tensor):
            return
        self.leaves.append((module, args[0], output))
        if not self.attentions or not is_linear(module):
            return
        last = self.attentions[-1]
        if last.projection is not None and last.direct:
            return
        heads, size = last.output.shape[2:]
        if args[0].shape[-1] != heads * size:
            return
        direct = args[0].untyped_storage().data_ptr() == last.output.untyped_storage().data_ptr()
        inside = id(module) in self.own_linears[id(last.module)]
        beside = id(module) in self.near_linears[id(last.module)]
        if (direct and (inside or beside)) or (inside and last.projection is None):
            last.projection, last.direct, last.projected = module, direct, output

    def before_layer(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        call = _LayerCall(module, hidden_of_arguments(args, kwargs), start=len(self.leaves))
        self.layers.append(call)
        self.open_layers.append(call)

    def after_layer(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        call = self.open_layers.pop()
        hidden = hidden_of_output(output)
        others = output[1:] if isinstance(output, tuple) else ()
        call.plain = isinstance(output, Tensor | tuple) and all(item is None for item in others)
        call.in_tuple, call.output = isinstance(output, tuple), hidden
        call.stop = len(self.leaves)
        call.same_shape = (
            hidden is not None and call.hidden is not None and hidden.shape == call.hidden.shape
        )

    def after_any(self, module: nn.Module, args: Any, output: Any) -> None:  # noqa: ARG002
        hidden = hidden_of_output(output)
        if not isinstance(output, tuple) or hidden is None or hidden.dim() != 3:
            return
        leaves, memory = range(self._starts[id(module)], len(self.leaves)), self.memories
        self.returned += (
            returned_weights.ReturnedTensor(
                module, item, part, hidden, leaves, tuple(self.open_layers), id(module) in memory
            )
            for item, part in enumerate(output)
            if isinstance(part, Tensor) and part.dim() == 4
        )

    def read_weights(self, output: Any) -> None:
        """Take for attentions the modules that returned the weights of the model's output."""
        for call, place, weights in returned_weights.find_weights(self.returned, output):
            linears = [leaf for leaf in self.leaves if is_linear(leaf[0])]
            inside = [self.leaves[index] for index in call.leaves]
            products = [product for module, _, product in inside if is_linear(module)]
            mixed = list(returned_weights.mixed_values(weights, products))
            near = self.near_linears[id(call.module)]
            projections = (
                (module, product)
                for module, received, product in linears
                if id(module) in near and any(residual_writes.close(received, x) for x in mixed)
            )
            projection, projected = next(projections, (None, None))
            width = call.hidden.shape[-1] if not mixed else mixed[0].shape[-1]
            for layer in call.around:
                # Some models have the tokens on the first axis.
                shape = None if layer.hidden is None else layer.hidden.shape[:2]
                layer.same_shape &= shape == (weights.shape[0], weights.shape[2])
            attention = _AttentionCall(
                module=call.module,
                call=returned_weights.weights_call(weights, width // weights.shape[1]),
                output=call.hidden,
                around=call.around,
                memory=call.memory,
                projection=projection,
                projected=projected,
                weights=place,
            )
            self.attentions.append(attention)

    def before_any(self, module: nn.Module, args: Any, kwargs: Any) -> None:  # noqa: ARG002
        self._starts[id(module)] = len(self.leaves)
        if any(kwargs.get(name) is not None for name in MEMORY_ARGUMENTS):
            self.memories.add(id(module))
        else:
            self.memories.discard(id(module))


def hidden_of_arguments(args: Any, kwargs: Mapping[str, Any]) -> Tensor | None:
    """The hidden states that a layer is called with."""
    candidates = [*args[:1], *(kwargs.get(name) for name in HIDDEN_ARGUMENTS)]
    for each in candidates:
        if isinstance(each, Tensor) and each.is_floating_point() and each.dim() == 3:
            return each
    return None


def hidden_of_output(output: Any) -> Tensor | None:
    """The hidden states that a module returns, alone or first of several."""
    if isinstance(output, Tensor):
        return output
    last = getattr(output, "last_hidden_state", None)
    if isinstance(last, Tensor):
        return last
    if isinstance(output, tuple | list) and output and isinstance(output[0], Tensor):
        return output[0]
    return None


def is_linear(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


def linear_weight(module: nn.Module) -> Float[Tensor, "out in"]:
    """The weight as `nn.Linear` has it; GPT-2's Conv1D stores its transpose."""
    weight = module.weight
    assert isinstance(weight, Tensor)
    return weight if isinstance(module, nn.Linear) else weight.T


@contextmanager
def hooked(*register: Callable[[], Any]) -> Iterator[None]:
    """Hooks that exist inside the block."""
    with ExitStack() as stack:
        for register_hook in register:
            stack.callback(register_hook().remove)
        yield


def find_structure(model: Any, inputs: Mapping[str, Any]) -> Structure:
    """Run a model once and see which attentions call us, in which layers, and what they feed.

    If none does, a second run sees which modules return the weights of the model's output.
    """
    probe, output = _run_probe(model, inputs)
    by_weights = not probe.attentions
    if by_weights:
        probe, output = _run_probe(model, inputs, weights=True)
        probe.read_weights(output)
    if not probe.attentions:
        raise InputError(
            f"{type(model).__name__} neither computes its attention through the attention "
            "interface of transformers nor returns all weights by output_attentions=True, so its "
            "heads cannot be seen",
            "load it with manyheads.load if its family is one that manyheads opens itself",
        )
    readout = _readout(model, probe, output)
    read = None
    if readout is not None:
        read = next(x for module, x, _ in reversed(probe.leaves) if module is readout.linear)
    stacks = _stacks(probe, read, pairs=model.config.is_encoder_decoder)
    called = {id(call.module) for call in probe.attentions}
    # Modules named as attentions that never called us and contain none that did.
    silent = tuple(
        name
        for name, module in probe.modules.items()
        if "Attention" in type(module).__name__
        and not any(id(part) in called for part in module.modules())
        and not any("Attention" in type(part).__name__ for part in list(module.modules())[1:])
    )
    return Structure(stacks=stacks, readout=readout, silent=silent, by_weights=by_weights)


def _run_probe(
    model: Any, inputs: Mapping[str, Any], *, weights: bool = False
) -> tuple[_Probe, Any]:
    """One forward with hooks on all modules, and its output."""
    modules = dict(model.named_modules())
    elements = {
        id(element): element
        for module in modules.values()
        if isinstance(module, nn.ModuleList)
        for element in module
    }
    factor = getattr(getattr(model.config, "text_config", model.config), "residual_multiplier", 1.0)
    probe = _Probe(modules, float(factor))
    hooks: list[Callable[[], Any]] = []
    for module in modules.values():
        if not list(module.children()):
            hooks.append(partial(module.register_forward_hook, probe.saw_leaf))
        before = partial(module.register_forward_pre_hook, with_kwargs=True)
        if id(module) in elements:
            hooks.append(partial(before, probe.before_layer))
            hooks.append(partial(module.register_forward_hook, probe.after_layer))
        hooks.append(partial(before, probe.before_any))
        if weights:
            hooks.append(partial(module.register_forward_hook, probe.after_any))
    switched = registry.our_attention(model, weights=weights)
    with switched, registry.listening(probe), torch.no_grad(), hooked(*hooks):
        return probe, model(**inputs)


def _stacks(probe: _Probe, read: Tensor | None, *, pairs: bool) -> dict[str, StackFacts]:
    by_path: dict[str, list[_AttentionCall]] = {}
    for call in probe.attentions:
        call.layer = _layer_of(call, probe)
        # A module that several layers share has one name, but is called in each of them.
        inside = probe.names[id((call.layer or call).module)]
        by_path.setdefault(inside.rpartition(".")[0], []).append(call)
    stack_names = _name_stacks(list(by_path), pairs=pairs)
    stacks = {}
    for path, calls in by_path.items():
        name = stack_names[path]
        stack = _stack(name, path, calls, probe)
        layers = {id(layer) for layer in stack.layers}
        outputs = [layer.output for layer in probe.layers if id(layer.module) in layers]
        last = outputs[-1] if outputs else None
        norm = residual_writes.find_final_norm(last, read, probe.leaves)
        stacks[name] = replace(stack, final_norm=norm)
    return stacks


def _layer_of(call: _AttentionCall, probe: _Probe) -> _LayerCall | None:
    """The layer that an attention was called in: the outermost element of a list of layers.

    An element that holds a list of equal blocks is a stage, as in Swin: its blocks are the layers.
    """
    chosen = None
    for layer in call.around:
        if layer.module is call.module:
            break
        path = probe.names[id(layer.module)].rpartition(".")[0]
        kinds = {type(child) for child in probe.modules[path].children()}
        if chosen is not None and len(kinds) > 1:
            break
        chosen = layer
    return chosen


def _stack(name: str, path: str, calls: list[_AttentionCall], probe: _Probe) -> StackFacts:
    container = probe.modules[path]
    layers = tuple(container) if isinstance(container, nn.ModuleList) else ()
    positions = {id(layer): index for index, layer in enumerate(layers)}
    mine = [layer_call for layer_call in probe.layers if id(layer_call.module) in positions]
    order = [positions[id(layer_call.module)] for layer_call in mine]
    if len(set(order)) < len(order):
        # One module called again and again, as in ALBERT.
        order = list(range(len(order)))
    index_of = {id(layer_call): index for layer_call, index in zip(mine, order, strict=True)}
    attentions: list[tuple[ProbedAttention, int]] = []
    seen: dict[tuple[int, bool], list[int]] = {}
    writes = _writes(calls, probe)
    for number, call in enumerate(calls):
        index = number if call.layer is None else index_of[id(call.layer)]
        cross = call.memory or call.call.query.shape[2] != call.call.key.shape[2]
        modules_in_layer = seen.setdefault((index, cross), [])
        if id(call.module) in modules_in_layer:
            continue
        modules_in_layer.append(id(call.module))
        facts = replace(_facts(call, probe.names, cross), write=writes.get(id(call)))
        attentions.append((facts, index))
    slots = max(len(called) for called in seen.values())
    if slots > 1:
        count: dict[tuple[int, bool], int] = {}
        numbered = []
        for facts, index in attentions:
            slot = count.get((index, facts.cross), 0)
            count[index, facts.cross] = slot + 1
            numbered.append((facts, index * slots + slot))
        attentions = numbered
    hiddens = [layer_call.hidden for layer_call in mine if layer_call.hidden is not None]
    return StackFacts(
        name=name,
        path=path,
        owner=probe.modules[path.rpartition(".")[0]] if layers else container,
        layers=layers,
        order=tuple(order),
        attentions=tuple(attentions),
        width=hiddens[0].shape[-1] if hiddens else attentions[0][0].width,
        slots=slots,
        seen_layers=bool(mine) and all(layer_call.same_shape for layer_call in mine),
        skippable=len({id(layer_call.module) for layer_call in mine}) == len(mine) > 0
        and all(layer_call.plain for layer_call in mine)
        and len({layer_call.in_tuple for layer_call in mine}) == 1,
        returns_tuple=bool(mine) and mine[0].in_tuple,
    )


def _writes(calls: list[_AttentionCall], probe: _Probe) -> dict[int, residual_writes.ResidualWrite]:
    """How the calls write to the residual stream, by call; only where that was found."""
    by_layer: dict[int, tuple[_LayerCall, list[_AttentionCall]]] = {}
    for call in calls:
        if call.layer is not None:
            by_layer.setdefault(id(call.layer), (call.layer, []))[1].append(call)
    writes_by_call: dict[int, residual_writes.ResidualWrite] = {}
    for layer, inside in by_layer.values():
        projected = [attention.projected for attention in inside if attention.projected is not None]
        if not layer.same_shape or len(projected) < len(inside):
            continue
        assert layer.hidden is not None
        assert layer.output is not None
        # A projection may work on a flattened batch.
        projected = [
            output.reshape(layer.hidden.shape)
            for output in projected
            if output.numel() == layer.hidden.numel()
        ]
        leaves = probe.leaves[layer.start : layer.stop]
        writes = residual_writes.find_writes(
            layer.hidden, layer.output, projected, leaves, probe.residual_factor
        )
        if writes is not None and len(writes) == len(inside):
            writes_by_call |= {id(call): write for call, write in zip(inside, writes, strict=True)}
    return writes_by_call


def _facts(call: _AttentionCall, names: Mapping[int, str], cross: bool) -> ProbedAttention:
    padded = call.call
    visible = padded.visible(cross=cross, true_lengths=None)[0]
    mask = visible.mask
    if isinstance(mask, MaskBySequence):
        # Tokens of an image may see each other: the last two are those of the text behind it.
        length = torch.tensor([visible.keys.each[0]], device=padded.query.device)
        next_seen = cross or bool(mask.each[0].allows(length - 2, length - 1, length))
        mask = Full() if next_seen else Causal()
    return ProbedAttention(
        module=call.module,
        path=names[id(call.module)],
        cross=cross,
        heads=padded.query.shape[1],
        key_heads=padded.key.shape[1],
        size=padded.query.shape[3],
        value_size=padded.value.shape[3],
        scale=padded.scale,
        mask=mask,
        has_sink=padded.sink is not None,
        width=call.projected.shape[-1]
        if call.projected is not None
        else padded.query.shape[1] * padded.value.shape[3],
        projection=call.projection,
        direct=call.direct,
        weights=call.weights,
    )


WORDS = {
    "vision": ("vision", "visual", "image", "vit", "pixel"),
    "audio": ("audio", "speech"),
    "text": ("text", "language"),
    "encoder": ("encoder",),
    "decoder": ("decoder",),
}


def _name_stacks(paths: list[str], *, pairs: bool) -> dict[str, str]:
    """Short names: "main" for the only stack, else by the words of its path.

    In an encoder-decoder these are its two sides, even if only one of them is seen.

    >>> _name_stacks(["text_encoder.layers", "text_decoder.layers"], pairs=True)
    {'text_encoder.layers': 'encoder', 'text_decoder.layers': 'decoder'}
    """
    words = {name: WORDS[name] for name in ("decoder", "encoder")} if pairs else {}
    if len(paths) == 1 and not any(word in paths[0].lower() for word in words):
        return {paths[0]: "main"}
    stack_names: dict[str, str] = {}
    for path in paths:
        parts = path.lower().split(".")
        hits = (
            word
            for word, hints in (words | WORDS).items()
            if any(hint in part for part in parts for hint in hints)
        )
        stack_names[path] = next(hits, parts[0] or "main")
    for name in set(stack_names.values()):
        same = [path for path, stack_name in stack_names.items() if stack_name == name]
        if len(same) > 1:
            stack_names |= {path: f"{name}{number}" for number, path in enumerate(same)}
    return stack_names


def _readout(model: nn.Module, probe: _Probe, output: Any) -> ReadoutFacts | None:
    """The linear layer behind the logits, checked on the logits themselves."""
    logits = getattr(output, "logits", None)
    if not isinstance(logits, Tensor):
        return None
    config = getattr(model.config, "text_config", model.config)
    for linear, _, product in reversed(probe.leaves):
        if product.shape != logits.shape or not is_linear(linear):
            continue
        by_token = logits.dim() == 3
        if torch.equal(product, logits):
            return ReadoutFacts(linear=linear, by_token=by_token)
        cap = getattr(config, "final_logit_softcapping", None)
        tries = [ReadoutFacts(linear=linear, change="softcap", amount=cap)] if cap else []
        factor = float((product * logits).sum() / (product * product).sum())
        tries.append(ReadoutFacts(linear=linear, change="scale", amount=factor))
        for facts in tries:
            if torch.allclose(facts.finish(product), logits, rtol=1e-4, atol=1e-5):
                return ReadoutFacts(
                    linear=linear, change=facts.change, amount=facts.amount, by_token=by_token
                )
    return None
