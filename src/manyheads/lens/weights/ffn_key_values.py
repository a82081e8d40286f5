"""Feed-forward layers as key-value memories: each neuron reads by a key and writes a value."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError, NativeModelError
from manyheads.formatting import percent, plain_table
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.results.files import Metadata
from manyheads.lens.results.tables import Tabular
from manyheads.lens.weights.circuits import (
    VocabularyProjection,
    folded,
    through,
    vocabulary_projection,
)
from manyheads.models.build import Model
from manyheads.models.layer import Layer, Residual
from manyheads.models.stack import Stack
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.parts.norms import PostNorm
from manyheads.progress import Progress

# An expert of a mixture; None for a plain feed-forward.
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
                f"{text!r} is not the address of a neuron", "write L5N10, or L5E2N10 for expert 2"
            )
        expert: Expert = None
        if match[2]:
            expert = "shared" if match[2].upper() == "S" else int(match[2][1:])
        return cls(int(match[1]), int(match[3]), expert)


@dataclass(frozen=True, slots=True)
class FeedForwards:
    """The feed-forwards of one stack."""

    stack: Stack

    @property
    def layers(self) -> tuple[int, ...]:
        """The layers with a feed-forward."""
        every = range(len(self.stack.layers))
        return tuple(layer for layer in every if self._layer(layer).feedforward is not None)

    def experts(self, layer: int) -> tuple[Expert, ...]:
        """The experts of a layer; (None,) for a plain feed-forward."""
        module = self.module(layer)
        if isinstance(module, FeedForward):
            return (None,)
        shared: tuple[Expert, ...] = () if module.shared is None else ("shared",)
        return (*range(module.config.count), *shared)

    def size(self, layer: int, expert: Expert = None) -> int:
        """The number of neurons."""
        module, _ = self._expert(layer, expert)
        return module.config.hidden

    def keys(self, layer: int, expert: Expert = None) -> Float[Tensor, "f c"]:
        """What each neuron reads from the residual stream, the norm in front folded in.

        The key of a gated neuron is that of its gate, which decides whether it is active.
        """
        residual, (module, index) = self.residual(layer), self._expert(layer, expert)
        if isinstance(module, FeedForward):
            rows = module.expand.weight.detach()
        else:
            rows = module.expand.detach()[index].T
        rows = rows[: module.config.hidden].float()
        return rows if isinstance(residual.placement, PostNorm) else folded(rows, residual.norm)

    def values(self, layer: int, expert: Expert = None) -> Float[Tensor, "f c"]:
        """What each neuron writes, including the weights of a norm after the feed-forward."""
        module, index = self._expert(layer, expert)
        if isinstance(module, FeedForward):
            rows = module.contract.weight.detach().T
        else:
            rows = module.contract.detach()[index]
        return through(rows.float(), self.residual(layer).second_norm)

    def coefficients(
        self, layer: int, expert: Expert, indices: Sequence[int], before: Float[Tensor, "n c"]
    ) -> Float[Tensor, "n k"]:
        """The factors of some neurons' values, from the residual stream before the layer.

        They include the router's weight or the shared expert's gate, and are 0 for tokens that are
        not routed to the expert.
        """
        entered = self.residual(layer).read(before)
        module, index = self._expert(layer, expert)
        places = torch.tensor(list(indices), device=entered.device)
        if isinstance(module, FeedForward):
            gate = getattr(self.module(layer), "shared_gate", None)
            activations = _activations(module, entered, places)
            return activations if gate is None else activations * gate(entered).sigmoid()
        probabilities = module.router(entered).float().softmax(-1)
        weights, experts = probabilities.topk(module.config.top_k, dim=-1)
        if module.config.renormalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # The router's weight of this expert for each token, 0 where it is not selected.
        weight = torch.where(experts == index, weights, 0.0).sum(-1)
        positions = weight.nonzero().squeeze(1)
        rows = module.expand[index].T.to(entered.dtype)
        halves = []
        for chosen in (places, places + module.config.hidden):
            bias = None if module.expand_bias is None else module.expand_bias[index][chosen]
            halves.append(F.linear(entered[positions], rows[chosen], bias))
        activations = module.activate(*halves)
        values = activations.new_zeros(len(entered), len(places))
        values[positions] = activations * weight[positions, None].to(activations.dtype)
        return values

    def find(self, neurons: Sequence[Neuron | str | tuple[int, int]]) -> tuple[Neuron, ...]:
        """The named neurons, checked to exist in the stack."""
        addresses = tuple(map(self._address, neurons))
        if not addresses:
            raise InputError("there are no neurons", "name some, as L0N5 or (0, 5)")
        return addresses

    def module(self, layer: int) -> FeedForward | MixtureOfExperts:
        module = self._layer(layer).feedforward
        assert module is not None, "callers use only layers with a feed-forward"
        return module

    def residual(self, layer: int) -> Residual:
        return self._layer(layer).feedforward_residual

    def _address(self, named: Neuron | str | tuple[int, int]) -> Neuron:
        neuron = Neuron.parse(named) if isinstance(named, str) else named
        neuron = neuron if isinstance(neuron, Neuron) else Neuron(*neuron)
        if neuron.layer not in self.layers:
            choices = ", ".join(map(str, self.layers))
            raise InputError(
                f"{neuron} is in a layer without a feed-forward", f"use a layer of {choices}"
            )
        experts = self.experts(neuron.layer)
        if neuron.expert not in experts:
            choices = "leave out the expert" if experts == (None,) else f"use one of {experts}"
            raise InputError(f"layer {neuron.layer} has no expert {neuron.expert}", choices)
        size = self.size(neuron.layer, neuron.expert)
        if not 0 <= neuron.index < size:
            raise InputError(f"there is no neuron {neuron}", f"use 0 to {size - 1}")
        return neuron

    def _layer(self, layer: int) -> Layer:
        module = self.stack.layers[layer]
        assert isinstance(module, Layer)
        return module

    def _expert(
        self, layer: int, expert: Expert
    ) -> tuple[FeedForward, None] | tuple[MixtureOfExperts, int]:
        """A plain feed-forward or shared expert; of other experts the mixture and its index."""
        module = self.module(layer)
        if isinstance(module, MixtureOfExperts) and expert == "shared":
            assert module.shared is not None
            module = module.shared
        if isinstance(module, FeedForward):
            return module, None
        assert isinstance(expert, int)
        return module, expert


def feed_forwards_of(model: Model, stack: StackName | None = None) -> FeedForwards:
    """The feed-forwards of the named stack, by default the decoder of a `Seq2Seq`."""
    stacks, name = model.stacks(), stack or model.readout_stack
    if not model.native:
        raise NativeModelError("a feed-forward")
    if name not in stacks:
        names = " or ".join(f'"{choice}"' for choice in stacks)
        raise InputError(f"this {type(model).__name__} has no stack {name!r}", f"use {names}")
    feed_forwards = FeedForwards(stacks[name])
    if not feed_forwards.layers:
        raise InputError(f"the {name} stack has no feed-forward", "use another stack or model")
    return feed_forwards


def _activations(
    module: FeedForward, entered: Float[Tensor, "n c"], places: Int[Tensor, " k"]
) -> Float[Tensor, "n k"]:
    activate = ACTIVATIONS[module.config.activation]

    def read(rows: Tensor) -> Tensor:
        bias = None if module.expand.bias is None else module.expand.bias[rows]
        return F.linear(entered, module.expand.weight[rows], bias)

    if not module.gated:
        return activate(read(places))
    return activate(read(places)) * read(places + module.config.hidden)


KIND = "key-value memories"
# Scores that are in memory at once.
LARGEST_CHUNK = 2**25


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerKeyValues:
    """The neurons of one feed-forward.

    `written` is the token whose logit the value raises most, and `written_z` its z-score among all
    tokens; `read` and `read_z` are the same for the token whose embedding is nearest to the key.
    `similarity` is the cosine of key and value.
    """

    layer: int
    expert: Expert
    written: Int[np.ndarray, " f"]
    written_z: Float[np.ndarray, " f"]
    read: Int[np.ndarray, " f"]
    read_z: Float[np.ndarray, " f"]
    similarity: Float[np.ndarray, " f"]
    key_norm: Float[np.ndarray, " f"]
    value_norm: Float[np.ndarray, " f"]

    def __len__(self) -> int:
        return len(self.written)

    @property
    def name(self) -> str:
        """The layer, and the expert if there are any."""
        return str(self.layer) + ("" if self.expert is None else f" expert {self.expert}")

    def summary(self, clear_above: float) -> dict[str, Any]:
        """Fractions of neurons that write a clear token, read one, and write the one they read."""
        writes, reads = self.written_z > clear_above, self.read_z > clear_above
        same = self.written == self.read
        return {
            "layer": self.layer,
            "expert": self.expert,
            "neurons": len(self),
            "write_clear": float(writes.mean()),
            "read_clear": float(reads.mean()),
            "write_what_is_read": float((same & writes & reads).mean()),
            "similarity": float(self.similarity.mean()),
            "key_norm": float(self.key_norm.mean()),
            "value_norm": float(self.value_norm.mean()),
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class KeyValueMemories(Tabular):
    """The feed-forwards of a model; `metadata["through"]` names the projection of the values."""

    layers: tuple[LayerKeyValues, ...]
    clear_above: float
    metadata: Metadata = field(default_factory=dict)

    def of(self, layer: int, expert: Expert = None) -> LayerKeyValues:
        for key_values in self.layers:
            if (key_values.layer, key_values.expert) == (layer, expert):
                return key_values
        missing = "feed-forward" + ("" if expert is None else f" of expert {expert}")
        layers = ", ".join(str(key_values.layer) for key_values in self.layers)
        raise InputError(f"layer {layer} has no {missing}", f"use one of {layers}")

    def clear(self, top_k: int = 20) -> list[tuple[Neuron, int, float]]:
        """The neurons that write a token most clearly, with the token and its z-score."""
        scored = [
            (Neuron(layer.layer, int(index), layer.expert), int(layer.written[index]), float(score))
            for layer in self.layers
            for index, score in enumerate(layer.written_z)
            if score > self.clear_above
        ]
        return sorted(scored, key=lambda scored_neuron: -scored_neuron[2])[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        """One record per feed-forward."""
        return [key_values.summary(self.clear_above) for key_values in self.layers]

    def table(self) -> Any:
        """A rich table of `rows`."""
        names = ("neurons", "write_clear", "read_clear", "write_what_is_read", "similarity")
        rows = [
            [layer.name, str(row["neurons"]), *(f"{row[name]:.3f}" for name in names[1:])]
            for row, layer in zip(self.rows(), self.layers, strict=True)
        ]
        titles = [name.replace("_", " ") for name in names]
        return plain_table(["layer"], titles, rows, title=KIND)

    def __str__(self) -> str:
        neurons = sum(map(len, self.layers))
        lines = [f"{neurons:,} neurons, values projected through the {self.metadata['through']}"]
        for row, layer in zip(self.rows(), self.layers, strict=True):
            lines.append(
                f"  layer {layer.name}: {percent(row['write_clear'])} write a clear token, "
                f"{percent(row['read_clear'])} read one, "
                f"{percent(row['write_what_is_read'])} write the one they read"
            )
        return "\n".join(lines)

    __repr__ = __str__


@wrapping_models
def key_value_memories(
    model: Model, *, clear_above: float = 6.0, stack: StackName | None = None, progress: bool = True
) -> KeyValueMemories:
    """The keys and values of every feed-forward as tokens, from the weights alone.

    Each value is projected through the final norm and the unembedding (Geva et al., arXiv
    2012.14913 and 2203.14680; without a language head through the embedding), each key is compared
    with the token embeddings. A token is clear if its score is more than `clear_above` standard
    deviations above the mean; with random scores of 50,000 tokens, 1 neuron in 20,000 has one.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = key_value_memories(model)
    >>> [len(layer) for layer in result.layers], result.metadata["through"]
    ([128, 128], 'unembedding')
    """
    if clear_above <= 0:
        raise InputError(f"clear_above must be positive, got {clear_above}", "use more than 0")
    feed_forwards, vocabulary = feed_forwards_of(model, stack), vocabulary_projection(model, stack)
    layers = feed_forwards.layers
    groups = [(layer, expert) for layer in layers for expert in feed_forwards.experts(layer)]
    memories = []
    bar = Progress("reading weights", total=len(groups), unit="feed-forwards", enabled=progress)
    with bar, torch.inference_mode():
        for layer, expert in groups:
            memories.append(_layer(feed_forwards, vocabulary, layer, expert))
            bar.advance()
    metadata = {"through": vocabulary.through, "tokens": len(vocabulary.unembed)}
    return KeyValueMemories(layers=tuple(memories), clear_above=clear_above, metadata=metadata)


def _layer(
    feed_forwards: FeedForwards, vocabulary: VocabularyProjection, layer: int, expert: Expert
) -> LayerKeyValues:
    keys, values = feed_forwards.keys(layer, expert), feed_forwards.values(layer, expert)
    step = max(1, LARGEST_CHUNK // len(vocabulary.unembed))
    written, read = [], []
    for key, value in zip(keys.split(step), values.split(step), strict=True):
        written.append(_clearest(vocabulary.write_scores(value)))
        read.append(_clearest(vocabulary.read_scores(key)))
    sides = (side for pairs in (written, read) for side in zip(*pairs, strict=True))
    columns = [torch.cat(side).cpu().numpy() for side in sides]
    return LayerKeyValues(
        layer=layer,
        expert=expert,
        **dict(zip(("written", "written_z", "read", "read_z"), columns, strict=True)),
        similarity=F.cosine_similarity(keys, values, dim=-1).cpu().numpy(),
        key_norm=keys.norm(dim=-1).cpu().numpy(),
        value_norm=values.norm(dim=-1).cpu().numpy(),
    )


def _clearest(scores: Float[Tensor, "m v"]) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """The best token of each row and its z-score, 0 where all scores are equal."""
    best, token = scores.max(-1)
    deviation, mean = torch.std_mean(scores, dim=-1, correction=0)
    z = (best - mean) / deviation.clamp(min=torch.finfo(scores.dtype).tiny)
    return token, torch.where(deviation > 0, z, 0.0)
