"""Feed-forward layers as memories: each neuron has a key that it reads and a value it writes."""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.files import Facts
from manyheads.lens.weights.circuits import Vocabulary, folded, vocabulary_of
from manyheads.models.build import Model
from manyheads.models.layer import Layer, Residual
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.stack import Stack
from manyheads.parts.experts import MixtureOfExperts
from manyheads.parts.feedforward import ACTIVATIONS, FeedForward
from manyheads.parts.norms import LayerNorm, Normalise, Post
from manyheads.progress import Progress

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


KIND = "memories"
# Scores of all words that live at once.
ROOM = 2**25


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class LayerMemory:
    """One feed-forward, neuron by neuron.

    `written` is the word that the value raises most, and `written_clearly` how many standard
    deviations of all words' scores it stands above their mean; `read` and `read_clearly` the same
    of the word nearest to the key. `likeness` is the cosine of key and value.
    """

    layer: int
    expert: Expert
    written: Int[np.ndarray, " f"]
    written_clearly: Float[np.ndarray, " f"]
    read: Int[np.ndarray, " f"]
    read_clearly: Float[np.ndarray, " f"]
    likeness: Float[np.ndarray, " f"]
    key_norm: Float[np.ndarray, " f"]
    value_norm: Float[np.ndarray, " f"]

    def __len__(self) -> int:
        return len(self.written)

    def summary(self, clear_above: float) -> dict[str, Any]:
        """What share of neurons writes a clear word, reads one, and writes the word it reads."""
        writes, reads = self.written_clearly > clear_above, self.read_clearly > clear_above
        same = self.written == self.read
        return {
            "layer": self.layer,
            "expert": self.expert,
            "neurons": len(self),
            "write_clearly": float(writes.mean()),
            "read_clearly": float(reads.mean()),
            "write_what_they_read": float((same & writes & reads).mean()),
            "likeness": float(self.likeness.mean()),
            "key_norm": float(self.key_norm.mean()),
            "value_norm": float(self.value_norm.mean()),
        }


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Memories(Tabular):
    """The feed-forwards of a model; `facts["through"]` says how values were put into words."""

    layers: tuple[LayerMemory, ...]
    clear_above: float
    facts: Facts = field(default_factory=dict)

    def of(self, layer: int, expert: Expert = None) -> LayerMemory:
        for each in self.layers:
            if (each.layer, each.expert) == (layer, expert):
                return each
        raise InputError(
            f"layer {layer} has no feed-forward"
            + ("" if expert is None else f" of expert {expert}"),
            f"use one of {', '.join(str(each.layer) for each in self.layers)}",
        )

    def clear(self, top_k: int = 20) -> list[tuple[Neuron, int, float]]:
        """The neurons that write a word most clearly, each with the word and how clearly."""
        found = [
            (Neuron(each.layer, int(index), each.expert), int(each.written[index]), float(score))
            for each in self.layers
            for index, score in enumerate(each.written_clearly)
            if score > self.clear_above
        ]
        return sorted(found, key=lambda each: -each[2])[:top_k]

    def rows(self) -> list[dict[str, Any]]:
        """One record per feed-forward."""
        return [each.summary(self.clear_above) for each in self.layers]

    def table(self) -> Any:
        """A rich table of `rows`."""
        from rich.table import Table

        table = Table("layer", box=None, pad_edge=False, title=KIND, title_justify="left")
        names = ("neurons", "write_clearly", "read_clearly", "write_what_they_read", "likeness")
        for name in names:
            table.add_column(name.replace("_", " "), justify="right")
        for row in self.rows():
            where = str(row["layer"]) + (
                "" if row["expert"] is None else f" expert {row['expert']}"
            )
            told = [f"{row[name]:.3f}" for name in names[1:]]
            table.add_row(where, str(row["neurons"]), *told)
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        neurons = sum(map(len, self.layers))
        yield f"{neurons:,} neurons, their values through the {self.facts['through']}"
        for row in self.rows():
            where = f"layer {row['layer']}"
            where += "" if row["expert"] is None else f" expert {row['expert']}"
            yield (
                f"  {where}: {row['write_clearly']:.1%} write a clear word, "
                f"{row['read_clearly']:.1%} read one, {row['write_what_they_read']:.1%} the same"
            )


def memories(
    model: Model,
    *,
    clear_above: float = 6.0,
    stack: StackName | None = None,
    progress: bool = True,
) -> Memories:
    """The keys and values of every feed-forward in words, from the weights alone.

    Each value vector is led through the final norm and the unembedding (Geva et al., arXiv
    2012.14913 and 2203.14680; without a language head through the embedding's own table), each key
    is held against the vectors by which words enter. A word is clear that stands more than
    `clear_above` standard deviations above the mean of all words: of 50,000 words that scored at
    random, one would by chance in 20,000 neurons.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=2, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = memories(model)
    >>> [len(layer) for layer in found.layers], found.facts["through"]
    ([128, 128], 'unembedding')
    """
    if clear_above <= 0:
        raise InputError(f"clear_above={clear_above} calls every word clear", "use more than 0")
    feeds, vocabulary = feeds_of(model, stack), vocabulary_of(model, stack)
    groups = list(feeds.groups())
    found = []
    with (
        Progress("reading weights", total=len(groups), unit="feed-forwards", enabled=progress) as bar,
        torch.inference_mode(),
    ):
        for layer, expert in groups:
            found.append(_layer(feeds, vocabulary, layer, expert))
            bar.advance()
    facts = {"through": vocabulary.through, "words": len(vocabulary.leave)}
    return Memories(layers=tuple(found), clear_above=clear_above, facts=facts)


def _layer(feeds: Feeds, vocabulary: Vocabulary, layer: int, expert: Expert) -> LayerMemory:
    keys, values = feeds.keys(layer, expert), feeds.values(layer, expert)
    step = max(1, ROOM // len(vocabulary.leave))
    written, read = [], []
    for key, value in zip(keys.split(step), values.split(step), strict=True):
        written.append(_clearest(vocabulary.said(value)))
        read.append(_clearest(vocabulary.read(key)))
    columns = [
        torch.cat(side).cpu().numpy()
        for pairs in (written, read)
        for side in zip(*pairs, strict=True)
    ]
    return LayerMemory(
        layer=layer,
        expert=expert,
        written=columns[0],
        written_clearly=columns[1],
        read=columns[2],
        read_clearly=columns[3],
        likeness=F.cosine_similarity(keys, values, dim=-1).cpu().numpy(),
        key_norm=keys.norm(dim=-1).cpu().numpy(),
        value_norm=values.norm(dim=-1).cpu().numpy(),
    )


def _clearest(scores: Float[Tensor, "m v"]) -> tuple[Int[Tensor, " m"], Float[Tensor, " m"]]:
    """The best word of each row, and how far it stands out; 0 where all words are level."""
    best, word = scores.max(-1)
    deviation, mean = torch.std_mean(scores, dim=-1, correction=0)
    clearly = (best - mean) / deviation.clamp(min=torch.finfo(scores.dtype).tiny)
    return word, torch.where(deviation > 0, clearly, 0.0)
