"""A model run on one batch whose activations are cached, so that it can resume at any layer."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.bridge import watched_run, wrapped_model, wrapped_parts
from manyheads.errors import InputError
from manyheads.lens.results.addresses import (
    Address,
    Block,
    HeadName,
    Heads,
    attention_at,
    blocks_of,
    find_heads,
    heads_at,
    heads_in,
    pick_head,
    pick_heads,
)
from manyheads.mixers.mixer import Mixer
from manyheads.models import build, non_finite_weights, seq2seq
from manyheads.models.layer import Layer
from manyheads.models.model_interface import ModelInputs, repeat_batch
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Head, Patterns, Record, Site, Sublayer, Tap, Watcher

EditFunction = Callable[[Tensor], Tensor]
# "main", or "encoder" and "decoder"; wrapped models may have others.
StackName = str


def replace_by(values: Tensor) -> EditFunction:
    """An edit that puts these values in the place of an activation."""
    return lambda _: values


@dataclass(frozen=True, slots=True)
class HeadScope:
    """The heads in scope: those of the self- or cross-attention of one stack of a model.

    A mixer stands in the place of self-attention; without `mixers` its heads do not count.
    """

    model: build.Model
    stack_name: StackName = "main"
    sublayer: Sublayer = Sublayer.ATTENTION
    mixers: bool = True

    @property
    def stack(self) -> Stack:
        return self.model.stacks()[self.stack_name]

    def config(self, layer: int) -> AttentionConfig | None:
        """The config of an attention; None where a layer has none, but perhaps a mixer."""
        config = self.stack.config.layers[layer]
        branch = config.cross if self.sublayer is Sublayer.CROSS else config.attention
        return None if branch is None else branch.inner

    def attention(self, layer: int) -> Attention:
        """The attention of a layer; a mixer is refused."""
        return attention_at(self.stack, layer, self.sublayer)

    def module(self, layer: int) -> Attention | Mixer:
        """The attention or mixer of a layer that has heads."""
        return heads_at(self.stack, layer, self.sublayer)

    def heads_of(self, layer: int) -> int:
        config = self.stack.config.layers[layer]
        return heads_in(config, self.sublayer) if self.mixers or config.mixer is None else 0

    def check_patterns(self, layers: Iterable[int]) -> None:
        """Refuse layers whose heads have no pattern."""
        for layer in layers:
            module = self.module(layer)
            if isinstance(module, Mixer) and not module.has_pattern:
                raise InputError(
                    f"layer {layer} mixes tokens by {type(module.config).__name__}, which has no "
                    "pattern of weights",
                    "use ablation, patching or lens.influence",
                )

    def site(self, layer: int, tap: Tap) -> Site:
        return Site(layer, tap, self.sublayer, self.stack_name)

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers that have heads."""
        every = range(len(self.stack.config.layers))
        return tuple(layer for layer in every if self.heads_of(layer))

    @property
    def blocks(self) -> tuple[Block, ...]:
        return tuple(
            Block(layer, self.heads_of(layer), self.stack_name, self.sublayer)
            for layer in self.layers
        )

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    @property
    def heads(self) -> tuple[Head, ...]:
        return tuple(address.head for address in self.addresses)

    def head(self, name: HeadName) -> Head:
        """The head of this name."""
        if isinstance(name, Head):
            in_range = 0 <= name.layer < len(self.stack.config.layers)
            if in_range and 0 <= name.head < self.heads_of(name.layer):
                return name
        return pick_head(self.addresses, name).head

    def find(self, heads: Heads) -> tuple[Head, ...]:
        """The named heads; each must be in scope."""
        matches = pick_heads(self.addresses, heads, self.stack_name, self.sublayer)
        return tuple(address.head for address in matches)


def head_scope(
    model: build.Model,
    stack: StackName | None = None,
    sublayer: Sublayer | None = None,
    *,
    heads: Sequence[HeadName] = (),
    mixers: bool = True,
    headless: bool = False,
) -> HeadScope:
    """The heads of a stack and sublayer, by default those that `heads` belong to.

    Without them, it is the self-attention of the stack that is read out: of a `Seq2Seq`, its
    decoder. Without `mixers` only the heads of attention, for what needs its queries, keys and
    softmax. With `headless` a stack without any heads will do.
    """
    non_finite_weights.check_finite(model)
    if chosen := [head for head in heads if head != "all"]:
        attentions = {
            (address.stack, address.sublayer): address
            for address in find_heads(model, chosen, stack, sublayer)
        }
        if len(attentions) > 1:
            one, other, *_ = attentions.values()
            raise InputError(
                f"{one} and {other} are not heads of the same kind of attention",
                "name those of one stack and sublayer at a time",
            )
        ((own_stack, own_sublayer),) = attentions
        stack, sublayer = stack or own_stack, sublayer or own_sublayer
    sublayer = sublayer or Sublayer.ATTENTION
    name: StackName = stack or model.readout_stack
    if name not in (stacks := model.stacks()):
        names = " or ".join(f'"{stack_name}"' for stack_name in stacks)
        raise InputError(f"this {type(model).__name__} has no stack {name!r}", f"use {names}")
    if sublayer is Sublayer.FEEDFORWARD:
        raise InputError(
            "a feed-forward sublayer has no heads", "use Sublayer.ATTENTION or Sublayer.CROSS"
        )
    scope = HeadScope(model, name, sublayer, mixers)
    if not scope.heads and not headless:
        layers = scope.stack.config.layers
        mixer_names = {type(layer.mixer.inner).__name__ for layer in layers if layer.mixer}
        names = ", ".join(sorted(mixer_names))
        if mixer_names and sublayer is Sublayer.ATTENTION:
            raise InputError(
                f"the {name} stack has no attention heads: it mixes tokens by {names}",
                "use lens.influence, or a model with attention"
                if mixers
                else "use a model with attention in some layers",
            )
        raise InputError(
            f"the {name} stack has no {sublayer.value} heads", "choose another stack or sublayer"
        )
    return scope


def layer_input_site(stack: Stack, layer: int) -> Site:
    """The site of the residual stream that enters a layer."""
    first = next(iter(stack.config.layers[layer].branches), Sublayer.FEEDFORWARD)
    return Site(layer, Tap.BEFORE, first, stack.name)


def layer_output_site(stack: Stack, layer: int) -> Site:
    """The site of the residual stream that leaves a layer."""
    last = next(reversed(stack.config.layers[layer].branches), Sublayer.ATTENTION)
    return Site(layer, Tap.AFTER, last, stack.name)


class ActivationEditor:
    """A watcher that edits the activations at some sites and records those at others.

    A site that is both edited and recorded is recorded as edited.
    """

    def __init__(self, edits: Mapping[Site, EditFunction], record: Iterable[Site] = ()) -> None:
        self.edits = dict(edits)
        self.recorded = Record(record)

    def wants(self, site: Site) -> bool:
        return site in self.edits or self.recorded.wants(site)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        if site in self.edits:
            assert isinstance(value, Ragged), "patterns are not edited"
            value = value.map(self.edits[site])
        if self.recorded.wants(site):
            self.recorded.see(site, value)
        return value

    def __getitem__(self, site: Site) -> Ragged:
        value = self.recorded[site]
        assert isinstance(value, Ragged), "patterns are not recorded here"
        return value


class _PassEndError(Exception):
    """The watcher has seen all that it needs."""


@dataclass(frozen=True, slots=True)
class _EndingWatcher:
    watcher: Watcher
    last: Site

    def wants(self, site: Site) -> bool:
        return self.watcher.wants(site)

    def mix(self, *inputs: Any) -> Any:
        mix = getattr(self.watcher, "mix", None)
        return None if mix is None else mix(*inputs)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns | None:
        result = self.watcher.see(site, value)
        if site == self.last:
            raise _PassEndError
        return result


def run_until(run: Callable[[Watcher], Any], watcher: Watcher, last: Site | None) -> None:
    """Run a model with a watcher, and end the pass once it has seen the last site (None: never)."""
    with suppress(_PassEndError):
        run(watcher if last is None else _EndingWatcher(watcher, last))


def final_hidden(model: build.Model, inputs: ModelInputs) -> Ragged:
    """What the readout of a model receives."""
    final = Site(-1, Tap.FINAL, stack=model.readout_stack)
    record = Record([final])
    model.run_hidden(inputs, record)
    hidden = record[final]
    assert isinstance(hidden, Ragged), "hidden states are no patterns"
    return hidden


def last_head_site(model: build.Model, tap: Tap) -> Site | None:
    """The site of the last heads of a model; None where more may be watched after it."""
    blocks = blocks_of(model)
    if not (model.native and blocks) or model.reads_pairs:
        return None
    return Site(blocks[-1].layer, tap, blocks[-1].sublayer, blocks[-1].stack)


def entry_sites(stack: Stack, layer: int) -> list[Site]:
    """Where the residual stream that enters a layer is seen; of reversible layers, each stream."""
    before = layer_input_site(stack, layer)
    if not getattr(stack.config, "reversible", False):
        return [before]
    first, second = (
        _last_write(stack, layer, written) for written in (Sublayer.ATTENTION, Sublayer.FEEDFORWARD)
    )
    return [first, before if before.sublayer is Sublayer.ATTENTION else second]


def _last_write(stack: Stack, layer: int, sublayer: Sublayer) -> Site:
    """Where the sublayers of this kind below a layer wrote last: attention or feed-forward."""
    for index in reversed(range(layer)):
        if sublayer in stack.config.layers[index].branches:
            return Site(index, Tap.AFTER, sublayer, stack.name)
    return Site(-1, Tap.EMBEDDINGS, stack=stack.name)


def join_streams(entries: Sequence[Ragged]) -> Ragged:
    values = [entry.values for entry in entries]
    return entries[0].with_values(torch.cat(values, dim=-1)) if len(values) > 1 else entries[0]


class CachedRun:
    """One run of a model on one batch, with the activations needed to resume at any layer."""

    def __init__(
        self,
        scope: HeadScope,
        inputs: ModelInputs,
        *,
        layers: Sequence[int] | None = None,
        record: Iterable[Site] = (),
        edits: Mapping[Site, EditFunction] | None = None,
    ) -> None:
        self.scope, self.inputs = scope, inputs
        layers = scope.layers if layers is None else layers
        if isinstance(scope.stack, wrapped_parts.WrappedStack):
            for layer in layers:
                scope.stack.check_entry(layer)
        sites = [*record, Site(-1, Tap.FINAL, stack=scope.model.readout_stack)]
        sites += [scope.site(layer, Tap.HEAD_OUTPUT) for layer in layers if scope.heads_of(layer)]
        sites += [site for layer in layers for site in entry_sites(scope.stack, layer)]
        if scope.stack_name == "decoder":
            sites.append(Site(-1, Tap.FINAL, stack="encoder"))
        if scope.stack_name == "encoder":
            sites.append(Site(-1, Tap.EMBEDDINGS, stack="decoder"))
        self._cache = ActivationEditor({} if edits is None else edits, sites)
        scope.model.run_hidden(inputs, self._cache)

    def __getitem__(self, site: Site) -> Ragged:
        return self._cache[site]

    @property
    def hidden(self) -> Ragged:
        """The input of the readout."""
        return self[Site(-1, Tap.FINAL, stack=self.scope.model.readout_stack)]

    def head_outputs(self, layer: int) -> Ragged:
        return self[self.scope.site(layer, Tap.HEAD_OUTPUT)]

    def entering(self, layer: int) -> Ragged:
        """The residual stream that enters a layer, or both streams of reversible layers."""
        return join_streams([self[site] for site in entry_sites(self.scope.stack, layer)])

    def resume(self, layer: int, watch: Watcher | None = None, copies: int = 1) -> Ragged:
        """The input of the readout when copies of the batch resume at `layer` with a watcher."""
        return self.continue_from(repeat_batch(self.entering(layer), copies), layer, watch, copies)

    def resume_after_heads(self, layer: int, watch: ActivationEditor, copies: int = 1) -> Ragged:
        """The same as `resume`, cheaper, where the watcher edits nothing but head outputs.

        The attention of `layer` is not computed again: each copy uses its cached head outputs.
        """
        inner, site = self.scope.module(layer), self.scope.site(layer, Tap.HEAD_OUTPUT)
        # A gate after the output reads the input of the attention, and cross-attention needs the
        # self-attention before it: these layers run in full.
        gates = inner.config.gates if isinstance(inner, Attention) else ()
        whole = any(gate.at == "final" for gate in gates)
        whole = whole or not self.scope.model.native
        if whole or self.scope.sublayer is Sublayer.CROSS:
            return self.resume(layer, watch, copies)
        outputs = watch.see(site, repeat_batch(self.head_outputs(layer), copies))
        assert isinstance(outputs, Ragged), "head outputs are ragged"
        entries = [
            repeat_batch(self[site], copies) for site in entry_sites(self.scope.stack, layer)
        ]
        # Reversible layers read the second stream and write to the first.
        onto, x = entries[0], entries[-1]
        module = cast(Layer, self.scope.stack.layers[layer])
        projected = inner.output(outputs.values.flatten(1))
        after = x.with_values(module.attention_residual.write(onto, projected, None))
        x, _ = module.finish(x, after, self._memory(copies))
        return self.continue_from(x, layer + 1, watch, copies)

    def continue_from(
        self, x: Ragged, layer: int, watch: Watcher | None = None, copies: int = 1
    ) -> Ragged:
        """The input of the readout from the residual stream `x` that enters `layer`."""
        if isinstance(self.scope.model, wrapped_model.WrappedModel):
            entry = watched_run.ResidualEntry(self.scope.stack_name, layer, x)
            repeated = self.inputs.repeat(copies)
            hidden = self.scope.model.run_inputs(repeated, watch, logits=False, entry=entry).hidden
            assert isinstance(hidden, Ragged), "ragged in, ragged out"
            return hidden
        final, _ = self.scope.stack.resume(x, layer, memory=self._memory(copies), watch=watch)
        if self.scope.stack_name != "encoder":
            return final
        model = cast(seq2seq.Seq2Seq, self.scope.model)
        embeddings = repeat_batch(self[Site(-1, Tap.EMBEDDINGS, stack="decoder")], copies)
        return model.decoder.resume(embeddings, 0, memory=final, watch=watch)[0]

    def _memory(self, copies: int) -> Ragged | None:
        """The keys and values of cross-attention."""
        if self.scope.stack_name != "decoder":
            return None
        return repeat_batch(self[Site(-1, Tap.FINAL, stack="encoder")], copies)
