"""The keys and values of whole feed-forwards, in words: which layers store what can be said."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.feeds import Expert, Feeds, Neuron, feeds_of
from manyheads.lens.results import Tabular
from manyheads.lens.storing import Facts
from manyheads.lens.trunk import StackName
from manyheads.lens.vocabulary import Vocabulary, vocabulary_of
from manyheads.models.build import Model
from manyheads.progress import Progress

__all__ = ["LayerMemory", "Memories", "memories"]

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
        Progress("reading weights", total=len(groups), unit="feed-forwards", shown=progress) as bar,
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
