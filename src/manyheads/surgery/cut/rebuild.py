"""A new model from what stays of another, which is not changed."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar, cast

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.errors import InputError
from manyheads.lens.results.addresses import stacks_of
from manyheads.models.build import Model, build
from manyheads.models.layer import Branch, Layer, LayerConfig, Residual
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.constant import Constant
from manyheads.parts.feedforward import FeedForward
from manyheads.parts.norms import SandwichNorm, NoNorm, PostNorm, PreNorm
from manyheads.parts.positions import T5Buckets
from manyheads.parts.positions.relative import BucketTable
from manyheads.surgery.cut.layer_plan import LayerPlan
from manyheads.surgery.cut.weights import (
    attention_weights,
    attention_with,
    feedforward_weights,
    feedforward_with,
    written_by,
)
from manyheads.taps import Sublayer

# The mean outputs of heads by stack, sublayer and layer, which replace those that go.
Means = Mapping[tuple[str, Sublayer, int], Float[Tensor, "_ _"]]
AnyModel = TypeVar("AnyModel", bound=Model)

BRANCHES = ((Sublayer.ATTENTION, "attention"), (Sublayer.CROSS, "cross"))


@torch.no_grad()
def rebuild(
    model: AnyModel, kept: Mapping[str, Sequence[LayerPlan]], means: Means | None = None
) -> AnyModel:
    """The model with these layers, heads and neurons of it, in memory of its own."""
    _check(
        set(build(cast(ModelConfig, model.config), device="meta").state_dict()),
        set(model.state_dict()),
    )
    stacks = stacks_of(model)
    cuts = {name: _StackCut(name, stack, kept[name], means or {}) for name, stack in stacks.items()}
    fields = {"main": "stack", "encoder": "encoder", "decoder": "decoder"}
    configs: dict[str, Any] = {fields[name]: cut.config() for name, cut in cuts.items()}
    fresh = build(cast(ModelConfig, replace(cast(Any, model.config), **configs)), device="meta")
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if not any(name.startswith(f"{fields[stack]}.layers.") for stack in stacks)
    }
    for name, stack in stacks_of(fresh).items():
        for index in range(len(stack.layers)):
            prefix = f"{fields[name]}.layers.{index}."
            layer = cast(Layer, stack.layers[index])
            own = cuts[name].weights(index, layer)
            state |= {f"{prefix}{part}": tensor for part, tensor in own.items()}
    _check(set(fresh.state_dict()), set(state))
    fresh.load_state_dict(
        {name: tensor.detach().clone() for name, tensor in state.items()}, assign=True
    )
    fresh.comes_from(model)
    return cast(AnyModel, fresh.train(model.training))


def _check(wanted: set[str], got: set[str]) -> None:
    if odd := sorted(got ^ wanted):
        raise InputError(
            f"{odd[0]} does not belong to the model's own weights",
            "first merge or delete adapters, gates and whatever else was added to it",
        )


@dataclass(frozen=True, slots=True, eq=False)
class _StackCut:
    """One stack and what stays of it."""

    name: str
    stack: Stack
    kept: Sequence[LayerPlan]
    means: Means

    def config(self) -> StackConfig:
        layers = [self._layer(each) for each in self.kept]
        apart = self._own_tables()
        return replace(
            self.stack.config,
            layers=tuple(
                _with_own_table(layer) if index in apart else layer
                for index, layer in enumerate(layers)
            ),
        )

    def weights(self, index: int, fresh: Layer) -> dict[str, Tensor]:
        """The weights of a layer of the new model by the names that they have in it."""
        kept = self.kept[index]
        old = self._old(kept.source)
        found: dict[str, Tensor] = {}
        for sublayer, name in BRANCHES:
            attention = getattr(old, name)
            if attention is not None and kept.heads(sublayer):
                means = self._means(kept, sublayer)
                own = attention_weights(attention, kept.heads(sublayer), means)
                found |= {f"{name}.{part}": tensor for part, tensor in own.items()}
            rest = getattr(fresh, f"{name}_rest")
            if rest is not None:
                found[f"{name}_rest.vector"] = self._vector(kept, sublayer)
            residual = getattr(fresh, f"{name}_residual", None)
            if residual is not None:
                wanted = residual.state_dict()
                mine = getattr(old, f"{name}_residual").state_dict()
                found |= {f"{name}_residual.{part}": mine[part] for part in wanted}
        if fresh.attention is not None and isinstance(fresh.attention.table, BucketTable):
            found["attention.table.table"] = self._table(kept)
        if old.feedforward is not None:
            found |= _feedforward(old, kept)
        return found

    def _old(self, index: int) -> Layer:
        return cast(Layer, self.stack.layers[index])

    def _layer(self, kept: LayerPlan) -> LayerConfig:
        layer = self.stack.config.layers[kept.source]
        changes: dict[str, Any] = {}
        for sublayer, name in BRANCHES:
            branch: Branch[AttentionConfig] | None = getattr(layer, name)
            heads = kept.heads(sublayer)
            if branch is not None and heads:
                writes_mean = self._means(kept, sublayer) is not None
                inner = attention_with(branch.inner, heads, writes_mean=writes_mean)
                changes[name] = replace(branch, inner=inner)
            elif branch is not None:
                changes |= {name: None, f"{name}_rest": self._rest(kept, sublayer)}
        fed = layer.feedforward
        if fed is not None and kept.neurons:
            less = feedforward_with(fed.inner, len(kept.neurons))
            changes["feedforward"] = replace(fed, inner=less)
        return replace(layer, **changes)

    def _means(self, kept: LayerPlan, sublayer: Sublayer) -> Tensor | None:
        """What the heads of a layer say on average, where some of them go."""
        layer = self.stack.config.layers[kept.source]
        if len(kept.heads(sublayer)) == len(LayerPlan.all_of(0, layer).heads(sublayer)):
            return None
        return self.means.get((self.name, sublayer, kept.source))

    def _rest(self, kept: LayerPlan, sublayer: Sublayer) -> Branch[Constant] | None:
        """What is left of an attention without heads; nothing where it would change nothing."""
        name = dict(BRANCHES)[sublayer]
        branch = getattr(self.stack.config.layers[kept.source], name)
        written = written_by(getattr(self._old(kept.source), name), (), self._means(kept, sublayer))
        _check_gates(branch.inner, written, f"layer {kept.source} gates its {sublayer.value}")
        constant = Constant(width=branch.inner.width)
        if isinstance(branch.norm, PostNorm):
            return Branch(constant, branch.norm, branch.dropout)
        silent = not self._vector(kept, sublayer).any()
        if silent and sublayer is Sublayer.ATTENTION:
            return None
        return Branch(constant, PreNorm(NoNorm()), branch.dropout)

    def _vector(self, kept: LayerPlan, sublayer: Sublayer) -> Float[Tensor, " c"]:
        old, name = self._old(kept.source), dict(BRANCHES)[sublayer]
        rest = getattr(old, f"{name}_rest")
        if rest is not None:
            return rest.vector
        attention: Attention = getattr(old, name)
        written = written_by(attention, (), self._means(kept, sublayer))
        if written is None:
            written = attention.output.weight.new_zeros(attention.config.width)
        residual: Residual = getattr(old, f"{name}_residual")
        if isinstance(residual.placement, SandwichNorm) and residual.second_norm is not None:
            written = residual.second_norm(written[None])[0]
        return written

    def _own_tables(self) -> set[int]:
        """New layers that can no longer share a table of buckets, as they kept other heads."""
        sharing = {
            index: kept
            for index, kept in enumerate(self.kept)
            if kept.attention and self._shares_table(kept.source)
        }
        owners = {self.stack.place_owner[kept.source] for kept in sharing.values()}
        alike = {kept.attention for kept in sharing.values()}
        if len(owners) <= 1 and len(alike) <= 1:
            return set()
        return {index for index, kept in sharing.items() if self._loses(kept)}

    def _shares_table(self, layer: int) -> bool:
        config = self.stack.config.attention(layer)
        return (
            config is not None and isinstance(config.position, T5Buckets) and config.position.shared
        )

    def _loses(self, kept: LayerPlan) -> bool:
        config = self.stack.config.attention(kept.source)
        return config is not None and len(kept.attention) < config.heads

    def _table(self, kept: LayerPlan) -> Float[Tensor, "buckets h"]:
        owner = self._old(self.stack.place_owner[kept.source]).attention
        assert owner is not None
        assert isinstance(owner.table, BucketTable)
        return owner.table.table[:, list(kept.attention)]


def _with_own_table(layer: LayerConfig) -> LayerConfig:
    assert layer.attention is not None
    inner = layer.attention.inner
    assert isinstance(inner.position, T5Buckets)
    inner = replace(inner, position=replace(inner.position, shared=False))
    return replace(layer, attention=replace(layer.attention, inner=inner))


def _feedforward(old: Layer, kept: LayerPlan) -> dict[str, Tensor]:
    residual = old.feedforward_residual.state_dict()
    found = {f"feedforward_residual.{part}": tensor for part, tensor in residual.items()}
    assert old.feedforward is not None
    if isinstance(old.feedforward, FeedForward):
        own = feedforward_weights(old.feedforward, kept.neurons)
    else:
        own = old.feedforward.state_dict()
    return found | {f"feedforward.{part}": tensor for part, tensor in own.items()}


def _check_gates(config: AttentionConfig, written: Tensor | None, what: str) -> None:
    """A gate after the output projection makes of a bias something that no bias is."""
    for gate in config.gates:
        if gate.at == "final" and (gate.how == "plus" or written is not None):
            raise InputError(f"{what} even without any head", "keep one of its heads")
