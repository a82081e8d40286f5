"""Feed-forward layers as memories: each neuron has a key that it reads and a value it writes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.circuits import folded
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.models.layer import Layer, Residual
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.parts.norms import LayerNorm, Normalise, Post

__all__ = ["Expert", "Feeds", "Neuron", "feeds_of"]

# Of a mixture which expert; None where the layer has one feed-forward for all tokens.
Expert = int | Literal["shared"] | None


@dataclass(frozen=True, slots=True)
class Neuron:
    """The address of a neuron of a feed-forward, zero-based.

    >>> str(Neuron(3, 120)), str(Neuron(3, 5, expert=2)), Neuron.parse("L3SN5")
    ('L3N120', 'L3E2N5', Neuron(layer=3, index=5, expert='shared'))
    """

    layer: int
    index: int
    expert: Expert = None

    def __str__(self) -> str:
        expert = "" if self.expert is None else f"E{self.expert}"
        return f"L{self.layer}{'S' if self.expert == 'shared' else expert}N{self.index}"

    @classmethod
    def parse(cls, text: str) -> "Neuron":
        match = re.fullmatch(r"L(\d+)(E\d+|S)?N(\d+)", text.strip(), flags=re.IGNORECASE)
        if match is None:
            raise InputError(
                f"{text!r} is not the address of a neuron", "write it as L5N10, of expert 2 L5E2N10"
            )
        expert: Expert = None
        if match[2]:
            expert = "shared" if match[2].upper() == "S" else int(match[2][1:])
        return cls(int(match[1]), int(match[3]), expert)


@dataclass(frozen=True, slots=True)
class Feeds:
    """The feed-forwards of one stack."""

    stack: Stack

    @property
    def layers(self) -> tuple[int, ...]:
        """Those that have one."""
        every = range(len(self.stack.layers))
        return tuple(layer for layer in every if self._layer(layer).feedforward is not None)

    def experts(self, layer: int) -> tuple[Expert, ...]:
        """The experts of a layer, or None alone for its only feed-forward."""
        module = self.module(layer)
        if isinstance(module, FeedForward):
            return (None,)
        shared: tuple[Expert, ...] = () if module.shared is None else ("shared",)
        return (*range(module.config.count), *shared)

    def size(self, layer: int, expert: Expert = None) -> int:
        """How many neurons there are."""
        module = self.module(layer)
        if isinstance(module, FeedForward):
            return module.config.hidden
        return module.config.shared if expert == "shared" else module.config.hidden

    def keys(self, layer: int, expert: Expert = None) -> Float[Tensor, "f c"]:
        """What each neuron reads from the residual stream, the norm in front folded in.

        Of a gated one the key is that of the gate, which decides whether it speaks.
        """
        residual = self.residual(layer)
        rows = self._expanding(layer, expert)[: self.size(layer, expert)].float()
        return rows if isinstance(residual.placement, Post) else folded(rows, residual.norm)

    def values(self, layer: int, expert: Expert = None) -> Float[Tensor, "f c"]:
        """What each neuron writes, through a norm that follows the feed-forward, if one does."""
        module = self.module(layer)
        if isinstance(module, FeedForward):
            rows = module.contract.weight.detach().T
        elif expert == "shared":
            assert module.shared is not None
            rows = module.shared.contract.weight.detach().T
        else:
            assert isinstance(expert, int)
            rows = module.contract.detach()[expert]
        return _through(rows.float(), self.residual(layer).second_norm)

    def coefficients(
        self, layer: int, expert: Expert, indices: Sequence[int], before: Float[Tensor, "n c"]
    ) -> Float[Tensor, "n k"]:
        """What multiplies the values of some neurons, from the residual stream that enters.

        Of an expert it is 0 for tokens that do not visit it, and includes the router's weight or
        the shared expert's gate.
        """
        entered = self.residual(layer).enter(before)
        module = self.module(layer)
        if isinstance(module, FeedForward):
            return _spoken(module, entered, indices)
        if expert == "shared":
            assert module.shared is not None
            spoken = _spoken(module.shared, entered, indices)
            gate = module.shared_gate
            return spoken if gate is None else spoken * gate(entered).sigmoid()
        assert isinstance(expert, int)
        weight = _visits(module, entered, expert)
        here = weight.nonzero().squeeze(1)
        rows = module.expand[expert].T.to(entered.dtype)
        places = torch.tensor(list(indices), device=rows.device)
        spoken = F.silu(entered[here] @ rows[places].T)
        spoken = spoken * (entered[here] @ rows[places + module.config.hidden].T)
        found = spoken.new_zeros(len(entered), len(places))
        found[here] = spoken * weight[here, None].to(spoken.dtype)
        return found

    def find(self, neurons: Sequence[Neuron | str | tuple[int, int]]) -> tuple[Neuron, ...]:
        """The named neurons, each of which the stack has."""
        found = tuple(self._found(each) for each in neurons)
        if not found:
            raise InputError("no neuron is named", "give some, as L0N5 or (0, 5)")
        return found

    def module(self, layer: int) -> FeedForward | MixtureOfExperts:
        module = self._layer(layer).feedforward
        assert module is not None, "whoever asks has seen that there is one"
        return module

    def residual(self, layer: int) -> Residual:
        return self._layer(layer).feedforward_residual

    def _found(self, named: Neuron | str | tuple[int, int]) -> Neuron:
        neuron = named if isinstance(named, Neuron) else None
        if isinstance(named, str):
            neuron = Neuron.parse(named)
        elif isinstance(named, tuple):
            neuron = Neuron(*named)
        assert neuron is not None
        if neuron.layer not in self.layers:
            there = ", ".join(map(str, self.layers))
            raise InputError(
                f"{neuron} is in a layer without a feed-forward", f"use one of the layers {there}"
            )
        experts = self.experts(neuron.layer)
        if neuron.expert not in experts:
            there = "leave the expert out" if experts == (None,) else f"name one, as {experts[0]}"
            raise InputError(f"layer {neuron.layer} has no expert {neuron.expert}", there)
        size = self.size(neuron.layer, neuron.expert)
        if not 0 <= neuron.index < size:
            raise InputError(f"there is no neuron {neuron}", f"use 0 to {size - 1}")
        return neuron

    def _layer(self, layer: int) -> Layer:
        module = self.stack.layers[layer]
        assert isinstance(module, Layer)
        return module

    def _expanding(self, layer: int, expert: Expert) -> Float[Tensor, "rows c"]:
        module = self.module(layer)
        if isinstance(module, FeedForward):
            return module.expand.weight.detach()
        if expert == "shared":
            assert module.shared is not None
            return module.shared.expand.weight.detach()
        assert isinstance(expert, int)
        return module.expand.detach()[expert].T

    def groups(self) -> Iterator[tuple[int, Expert]]:
        """Every layer with every expert."""
        for layer in self.layers:
            for expert in self.experts(layer):
                yield layer, expert


def feeds_of(model: Model, stack: StackName | None = None) -> Feeds:
    """The feed-forwards of the named stack; a `Seq2Seq` is looked at in its decoder."""
    if not isinstance(model, Seq2Seq):
        if stack not in (None, "main"):
            raise InputError(f"this {type(model).__name__} has no stack {stack!r}", 'use "main"')
        return _with_some(Feeds(model.stack))
    if stack == "main":
        raise InputError("this Seq2Seq has no stack 'main'", 'use "encoder" or "decoder"')
    return _with_some(Feeds(model.encoder if stack == "encoder" else model.decoder))


def _with_some(feeds: Feeds) -> Feeds:
    if not feeds.layers:
        raise InputError(f"the {feeds.stack.name} stack has no feed-forward", "look elsewhere")
    return feeds


def _through(rows: Float[Tensor, "f c"], norm: torch.nn.Module | None) -> Float[Tensor, "f c"]:
    """Rows as a norm after them passes them on, up to its divisor."""
    if not isinstance(norm, Normalise):
        return rows
    if isinstance(norm.config, LayerNorm):
        rows = rows - rows.mean(1, keepdim=True)
    weight = norm.weight.detach().float()
    return rows * (weight + 1 if norm.config.centred else weight)


def _spoken(
    module: FeedForward, entered: Float[Tensor, "n c"], indices: Sequence[int]
) -> Float[Tensor, "n k"]:
    activate = ACTIVATIONS[module.config.activation]
    places = torch.tensor(list(indices), device=entered.device)

    def read(rows: Tensor) -> Tensor:
        bias = None if module.expand.bias is None else module.expand.bias[rows]
        return F.linear(entered, module.expand.weight[rows], bias)

    if not module.gated:
        return activate(read(places))
    return activate(read(places)) * read(places + module.config.hidden)


def _visits(
    module: MixtureOfExperts, entered: Float[Tensor, "n c"], expert: int
) -> Float[Tensor, " n"]:
    """The router's weight of an expert for each token, 0 where it is not chosen."""
    probabilities = module.router(entered).float().softmax(-1)
    weights, experts = probabilities.topk(module.config.chosen, dim=-1)
    if module.config.renormalise:
        weights = weights / weights.sum(-1, keepdim=True)
    return torch.where(experts == expert, weights, 0.0).sum(-1)
