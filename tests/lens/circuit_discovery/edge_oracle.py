"""Exact effects of edges by a plain forward pass: no hooks, no cache, one edge at a time."""

from collections.abc import Callable, Iterator, Sequence

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

from manyheads.lens.circuit_discovery.graph import Edge
from manyheads.models.encoder import TextModel
from manyheads.parts.masks import Causal
from manyheads.ragged import Ragged

Writes = dict[str, Tensor]


def edges_of(model: TextModel) -> Iterator[Edge]:
    """Every edge of a model whose layers are attention and feed-forward in turn."""
    writers = ["embeddings"]
    for number, layer in enumerate(model.config.stack.layers):
        heads = [f"L{number}H{head}" for head in range(layer.attention.inner.heads)]
        readers = [f"{head} {part}" for head in heads for part in ("query", "key", "value")]
        yield from (Edge(writer, reader) for reader in readers for writer in writers)
        writers += heads
        yield from (Edge(writer, f"L{number} mlp") for writer in writers)
        writers.append(f"L{number} mlp")
    yield from (Edge(writer, "logits") for writer in writers)


def forward(
    model: TextModel, ids: Tensor, edge: Edge | None = None, others: Writes | None = None
) -> tuple[Tensor, Writes]:
    """Logits and what each part wrote; along `edge` passes what its writer wrote in `others`."""
    places = torch.arange(ids.shape[1])
    writes = {"embeddings": model.embedding.tokens(ids) + model.embedding.positions(places)}

    def read(reader: str) -> Tensor:
        stream = sum(writes.values())
        if edge is not None and edge.reader == reader:
            stream = stream - writes[edge.writer] + others[edge.writer]
        return stream

    for number, (config, layer) in enumerate(
        zip(model.config.stack.layers, model.stack.layers, strict=True)
    ):
        inner, added = config.attention.inner, {}
        inputs = rearrange(
            layer.attention.project.weight, "(p h d) c -> p h c d", p=3, h=inner.heads
        )
        outputs = rearrange(layer.attention.output.weight, "c (h d) -> h d c", h=inner.heads)
        for head in range(inner.heads):
            name = f"L{number}H{head}"
            q, k, v = (
                read(f"{name} {part}") @ inputs[place, head]
                for place, part in enumerate(("query", "key", "value"))
            )
            scores = q @ k.mT * inner.score_scale
            if inner.mask == Causal():
                scores = scores.masked_fill(places[:, None] < places, -torch.inf)
            added[name] = scores.softmax(-1) @ v @ outputs[head]
        writes |= added
        name = f"L{number} mlp"
        hidden = F.relu(layer.feedforward.expand(read(name)))
        writes[name] = layer.feedforward.contract(hidden)
    return read("logits") @ model.readout.weight.T, writes


def edge_effects(
    model: TextModel,
    clean: Sequence[Sequence[int]],
    corrupted: Sequence[Sequence[int]],
    metric: Callable[[Ragged, Sequence[int]], Tensor],
    edges: Sequence[Edge],
) -> Tensor:
    """By how much the metric of each text falls when one edge of the clean run is corrupted."""
    effects = torch.zeros(len(edges), len(clean))
    for length in {len(ids) for ids in clean}:
        texts = [number for number, ids in enumerate(clean) if len(ids) == length]

        def measure(logits: Tensor, texts: Sequence[int] = texts) -> Tensor:
            return metric(Ragged.from_list(list(logits)), texts)

        with torch.no_grad():
            first, second = (
                torch.tensor([side[number] for number in texts]) for side in (clean, corrupted)
            )
            logits, _ = forward(model, first)
            base, others = measure(logits), forward(model, second)[1]
            for number, edge in enumerate(edges):
                patched, _ = forward(model, first, edge, others)
                effects[number, texts] = base - measure(patched)
    return effects
