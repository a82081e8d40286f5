"""A new model from the layers, heads and neurons that stay of another."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address
from manyheads.models.build import Model, build
from manyheads.models.layer import Branch, Layer, LayerConfig, Residual
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import Constant, FeedForward
from manyheads.parts.norms import NoNorm, PostNorm, PreNorm
from manyheads.parts.positions import Alibi, T5Buckets
from manyheads.parts.positions.disentangled import DisentangledTable
from manyheads.parts.positions.relative import BucketTable
from manyheads.quantization.integer_layers import REMEDY
from manyheads.quantization.model_weights import weights_of
from manyheads.taps import Sublayer

SUBLAYERS = (Sublayer.ATTENTION, Sublayer.CROSS)
# The field of a model, and of its config, that has a stack.
FIELDS = {"main": "stack", "encoder": "encoder", "decoder": "decoder"}


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerPlan:
    """The heads and neurons that stay of layer `source`; empty if there are none."""

    source: int
    attention: tuple[int, ...]
    cross: tuple[int, ...]
    neurons: tuple[int, ...]

    @classmethod
    def all_of(cls, index: int, layer: LayerConfig) -> "LayerPlan":
        hidden = 0
        if layer.feedforward is not None and not isinstance(layer.feedforward.inner, Experts):
            hidden = layer.feedforward.inner.hidden
        attention, cross = (
            tuple(range(0 if branch is None else branch.inner.heads))
            for branch in (layer.attention, layer.cross)
        )
        return cls(source=index, attention=attention, cross=cross, neurons=tuple(range(hidden)))

    def heads(self, sublayer: Sublayer) -> tuple[int, ...]:
        return self.cross if sublayer is Sublayer.CROSS else self.attention

    def without(self, heads: Iterable[Address]) -> "LayerPlan":
        """The plan without these heads, all of this layer."""
        removed = {(address.sublayer, address.head.head) for address in heads}
        attention, cross = (
            tuple(head for head in self.heads(sublayer) if (sublayer, head) not in removed)
            for sublayer in SUBLAYERS
        )
        return replace(self, attention=attention, cross=cross)


def full_plan(model: Model) -> dict[str, tuple[LayerPlan, ...]]:
    """A plan that keeps everything, by stack."""
    return {
        name: tuple(
            LayerPlan.all_of(index, layer) for index, layer in enumerate(stack.config.layers)
        )
        for name, stack in model.stacks().items()
    }


HeadMeans = Float[Tensor, "h d"]


def pruned_attention_config(
    config: AttentionConfig, kept_heads: Sequence[int], *, writes_mean: bool = False
) -> AttentionConfig:
    """The config of the heads that stay, with the key heads that they still read.

    The mean of the others is written by a bias.

    >>> config = AttentionConfig(width=64, heads=8, kv_heads=2)
    >>> pruned_attention_config(config, [0, 1, 2, 5]).kv_heads
    (3, 1)
    """
    if writes_mean:
        biased = config.bias in ("inputs", "all")
        config = replace(config, bias="all" if biased else "output")
    if len(kept_heads) == config.heads:
        return config
    if config.norm_span == "heads":
        raise InputError(
            f"cannot prune {config.heads - len(kept_heads)} of {config.heads} heads: their queries "
            "and keys are normed together, so the other heads would change",
            "prune all heads of a layer, neurons or layers, or ablate the heads instead",
        )
    owners = [config.owners[head] for head in kept_heads]
    groups = tuple(owners.count(key) for key in _keys(config, kept_heads))
    position = config.position
    if isinstance(position, Alibi):
        position = position.select(kept_heads, config.heads)
    return replace(
        config,
        heads=len(kept_heads),
        kv_heads="each" if config.kv_heads == "each" else groups,
        head_size=config.size,
        position=position,
        # A final gate keeps its slices of the width.
        gates=tuple(
            replace(gate, slices=gate.slice_count(config.heads)) if gate.at == "final" else gate
            for gate in config.gates
        ),
    )


def attention_weights(
    attention: Attention, kept_heads: Sequence[int], means: HeadMeans | None = None
) -> dict[str, Tensor]:
    """The weights of the heads that stay, by name; `means` of the others go into the bias.

    Without a table that may belong to another layer.
    """
    weights: dict[str, Tensor] = {}
    for name, linear, rows in attention.input_layers:
        for kind in ("weight", "bias"):
            joined = getattr(linear, kind)
            if joined is not None:
                parts = zip(rows, joined.split(list(rows.values())), strict=True)
                chosen = [
                    _rows(attention.config, part, values, kept_heads) for part, values in parts
                ]
                weights[f"{name}.{kind}"] = torch.cat(chosen)
    if attention.distances is not None:
        for name, values in attention.distances.state_dict().items():
            part = name.partition(".")[0]
            weights[f"distances.{name}"] = _rows(attention.config, part, values, kept_heads)
    columns = attention.output.weight.unflatten(1, (attention.config.heads, -1))
    weights["output.weight"] = columns[:, list(kept_heads)].flatten(1)
    bias = output_bias(attention, kept_heads, means)
    if bias is not None:
        weights["output.bias"] = bias
    for name in ("sink", "head_scale"):
        if getattr(attention, name) is not None:
            weights[name] = getattr(attention, name)[list(kept_heads)]
    for name, logits in attention.gate_parameters.items():
        weights[name] = _rows(attention.config, name, logits, kept_heads)
    for name in ("query_norm", "key_norm", "output_norm", "table"):
        part = getattr(attention, name)
        if part is not None and not isinstance(part, BucketTable | DisentangledTable):
            weights |= prefixed(name, part.state_dict())
    return weights


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {f"{prefix}.{name}": tensor for name, tensor in tensors.items()}


def output_bias(
    attention: Attention, kept_heads: Sequence[int], means: HeadMeans | None
) -> Float[Tensor, " c"] | None:
    """The bias of the output projection, plus the mean output of the removed heads."""
    bias = attention.output.bias
    if means is None:
        return bias
    removed = [head for head in range(attention.config.heads) if head not in kept_heads]
    weight = attention.output.weight
    columns = weight.unflatten(1, (attention.config.heads, -1))[:, removed].flatten(1)
    mean = columns.double() @ means[removed].flatten().to(weight.device).double()
    return (mean if bias is None else bias.double() + mean).to(weight.dtype)


def feedforward_weights(feedforward: FeedForward, neurons: Sequence[int]) -> dict[str, Tensor]:
    """The rows of the input projections and the columns of the output's that stay."""
    weights = prefixed("contract", feedforward.contract.state_dict())
    weights["contract.weight"] = weights["contract.weight"][:, list(neurons)]
    for name, joined in feedforward.expand.state_dict().items():
        halves = joined.chunk(2 if feedforward.gated else 1)
        weights[f"expand.{name}"] = torch.cat([half[list(neurons)] for half in halves])
    return weights


def _keys(config: AttentionConfig, kept_heads: Sequence[int]) -> list[int]:
    """The key heads that are still read."""
    return sorted({config.owners[head] for head in kept_heads})


def _rows(
    config: AttentionConfig, part: str, values: Float[Tensor, "rows *c"], kept_heads: Sequence[int]
) -> Float[Tensor, "fewer *c"]:
    """The rows of one part of an input projection that belong to the heads that stay."""
    name = part.removeprefix("gate_")
    heads = _keys(config, kept_heads) if name in ("key", "value") else list(kept_heads)
    gate = next((candidate for candidate in config.gates if part == f"gate_{candidate.at}"), None)
    if gate is not None and (gate.heads == "shared" or gate.at == "final"):
        return values
    count = config.key_heads if name in ("key", "value") else config.heads
    return values.unflatten(0, (count, -1))[heads].flatten(0, 1)


# The mean outputs of heads by stack, sublayer and layer, which replace removed heads.
Means = Mapping[tuple[str, Sublayer, int], Float[Tensor, "_ _"]]
AnyModel = TypeVar("AnyModel", bound=Model)


@torch.no_grad()
def rebuild(
    model: AnyModel, plans: Mapping[str, Sequence[LayerPlan]], means: Means | None = None
) -> AnyModel:
    """A copy of the model with only these layers, heads and neurons."""
    check_own_weights(model)
    stacks = model.stacks()
    cuts = {
        name: _StackCut(name, stack, plans[name], means or {}) for name, stack in stacks.items()
    }
    configs: dict[str, Any] = {FIELDS[name]: cut.config() for name, cut in cuts.items()}
    fresh = build(cast(ModelConfig, replace(cast(Any, model.config), **configs)), device="meta")
    layers = tuple(f"{FIELDS[name]}.layers." for name in stacks)
    state = {
        name: tensor for name, tensor in model.state_dict().items() if not name.startswith(layers)
    }
    for name, stack in fresh.stacks().items():
        for index, layer in enumerate(stack.layers):
            own = cuts[name].weights(index, cast(Layer, layer))
            state |= prefixed(f"{FIELDS[name]}.layers.{index}", own)
    assert set(fresh.state_dict()) == set(state)
    fresh.load_state_dict(
        {name: tensor.detach().clone() for name, tensor in state.items()}, assign=True
    )
    fresh.copy_provenance(model)
    return cast(AnyModel, fresh.train(model.training))


def check_own_weights(model: Model) -> None:
    """Refuse a model with integer weights, or with more weights than its config has."""
    if weights := weights_of(model):
        raise InputError(f"a model with {weights} weights cannot be reshaped", REMEDY)
    own = build(cast(ModelConfig, model.config), device="meta").state_dict().keys()
    if odd := sorted(own ^ model.state_dict().keys()):
        raise InputError(
            f"{odd[0]} does not belong to the model's own weights",
            "first merge or delete adapters, gates and other modules that were added",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _StackCut:
    """One stack and the parts of it that stay."""

    name: str
    stack: Stack
    plans: Sequence[LayerPlan]
    means: Means

    def config(self) -> StackConfig:
        layers = [self._layer(plan) for plan in self.plans]
        separate = self._own_tables()
        return replace(
            self.stack.config,
            # What is left of layers that shared their weights may differ.
            weights_of="own",
            layers=tuple(
                _with_own_table(layer) if index in separate else layer
                for index, layer in enumerate(layers)
            ),
        )

    def weights(self, index: int, fresh: Layer) -> dict[str, Tensor]:
        """The weights of a layer of the new model, by name."""
        plan = self.plans[index]
        old = self._old(plan.source)
        weights: dict[str, Tensor] = {}
        for sublayer in SUBLAYERS:
            name = sublayer.value
            attention = getattr(old, name)
            if attention is not None and plan.heads(sublayer):
                means = self._means(plan, sublayer)
                own = attention_weights(attention, plan.heads(sublayer), means)
                weights |= prefixed(name, own)
            if getattr(fresh, f"{name}_rest") is not None:
                weights[f"{name}_rest.vector"] = self._vector(plan, sublayer)
            residual = getattr(fresh, f"{name}_residual", None)
            if residual is not None:
                mine = getattr(old, f"{name}_residual").state_dict()
                weights |= {f"{name}_residual.{part}": mine[part] for part in residual.state_dict()}
        table = None if fresh.attention is None else fresh.attention.table
        if isinstance(table, BucketTable | DisentangledTable):
            # It may belong to another layer.
            owner = self._old(self.stack.position_owner[plan.source]).attention
            assert owner is not None
            assert isinstance(owner.table, type(table))
            weights |= prefixed("attention.table", owner.table.state_dict())
        if isinstance(table, BucketTable):
            columns = weights["attention.table.table"]
            weights["attention.table.table"] = columns[:, list(plan.attention)]
        if old.mixer is not None:
            weights |= prefixed("mixer", old.mixer.state_dict())
        if old.convolution is not None:
            weights |= prefixed("convolution", old.convolution.state_dict())
        if old.feedforward is not None:
            weights |= prefixed("feedforward_residual", old.feedforward_residual.state_dict())
            if not fresh.config.one_norm:
                norm = old.feedforward_residual.norm.state_dict()
                weights |= prefixed("feedforward_residual.norm", norm)
            own = old.feedforward.state_dict()
            if isinstance(old.feedforward, FeedForward):
                own = feedforward_weights(old.feedforward, plan.neurons)
            weights |= prefixed("feedforward", own)
        return weights

    def _old(self, index: int) -> Layer:
        return cast(Layer, self.stack.layers[index])

    def _layer(self, plan: LayerPlan) -> LayerConfig:
        layer = self.stack.config.layers[plan.source]
        changes: dict[str, Any] = {}
        for sublayer in SUBLAYERS:
            name, heads = sublayer.value, plan.heads(sublayer)
            branch: Branch[AttentionConfig] | None = getattr(layer, name)
            if branch is not None and heads:
                writes_mean = self._means(plan, sublayer) is not None
                inner = pruned_attention_config(branch.inner, heads, writes_mean=writes_mean)
                changes[name] = replace(branch, inner=inner)
            elif branch is not None:
                changes |= {name: None, f"{name}_rest": self._rest(plan, sublayer)}
        feedforward = layer.feedforward
        if feedforward is not None and plan.neurons:
            smaller = replace(feedforward.inner, hidden=len(plan.neurons))
            changes["feedforward"] = replace(feedforward, inner=smaller)
        return replace(layer, **changes)

    def _means(self, plan: LayerPlan, sublayer: Sublayer) -> Tensor | None:
        """The mean outputs of the heads of a layer that loses some."""
        layer = self.stack.config.layers[plan.source]
        if len(plan.heads(sublayer)) == len(LayerPlan.all_of(0, layer).heads(sublayer)):
            return None
        return self.means.get((self.name, sublayer, plan.source))

    def _rest(self, plan: LayerPlan, sublayer: Sublayer) -> Branch[Constant] | None:
        """The constant that is left of attention without heads; None if it is zero."""
        name = sublayer.value
        branch = getattr(self.stack.config.layers[plan.source], name)
        attention = getattr(self._old(plan.source), name)
        writes = output_bias(attention, (), self._means(plan, sublayer)) is not None
        # A gate after the output projection would gate a bias, which no bias can express.
        if any(g.at == "final" and (g.operation == "add" or writes) for g in branch.inner.gates):
            raise InputError(
                f"layer {plan.source} gates its {name} even without any head",
                "keep one of its heads",
            )
        constant = Constant(width=branch.inner.width)
        if isinstance(branch.norm, PostNorm):
            return Branch(constant, branch.norm, branch.dropout)
        silent = not self._vector(plan, sublayer).any()
        if silent and sublayer is Sublayer.ATTENTION:
            return None
        return Branch(constant, PreNorm(NoNorm()), branch.dropout)

    def _vector(self, plan: LayerPlan, sublayer: Sublayer) -> Float[Tensor, " c"]:
        old, name = self._old(plan.source), sublayer.value
        rest = getattr(old, f"{name}_rest")
        if rest is not None:
            return rest.vector
        attention: Attention = getattr(old, name)
        written = output_bias(attention, (), self._means(plan, sublayer))
        if written is None:
            written = attention.output.weight.new_zeros(attention.config.width)
        residual: Residual = getattr(old, f"{name}_residual")
        if residual.second_norm is not None:
            written = residual.second_norm(written[None])[0]
        return written

    def _own_tables(self) -> set[int]:
        """New layers that can no longer share a bucket table, since they keep different heads."""
        sharing: list[LayerPlan] = []
        losing: set[int] = set()
        for index, plan in enumerate(self.plans):
            config = self.stack.config.attention(plan.source)
            position = None if config is None else config.position
            if plan.attention and isinstance(position, T5Buckets) and position.shared:
                sharing.append(plan)
                if config is not None and len(plan.attention) < config.heads:
                    losing.add(index)
        owners = {self.stack.position_owner[plan.source] for plan in sharing}
        alike = {plan.attention for plan in sharing}
        return set() if len(owners) <= 1 and len(alike) <= 1 else losing


def _with_own_table(layer: LayerConfig) -> LayerConfig:
    assert layer.attention is not None
    inner = layer.attention.inner
    assert isinstance(inner.position, T5Buckets)
    inner = replace(inner, position=replace(inner.position, shared=False))
    return replace(layer, attention=replace(layer.attention, inner=inner))
