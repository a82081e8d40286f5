"""The weights of a compiled program in a model, hidden among idle and noise heads."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from einops import rearrange
from jaxtyping import Float
from numpy.random import Generator
from torch import Tensor, nn

from manyheads.attention import AttentionConfig
from manyheads.lens.circuit_discovery.rasp_programs import (
    BilinearHead,
    Matrix,
    ProgramWeights,
    ReluLayer,
)
from manyheads.models import decoder, encoder
from manyheads.models.build import build
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP, FeedForward
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.parts.positions import Learned

# Directions of the residual stream that no part of a program reads, and units that write there.
NOISE_WIDTH, NOISE_UNITS = 16, 8
# Singular values of a weight below this share of the largest are rounding.
RANK_TOLERANCE = 1e-9
# Of queries and keys of noise heads: attention that is neither flat nor on one token.
NOISE_SCORES = 0.5


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Disguise:
    """How the parts of a program are hidden in a model.

    `places` has the heads of each layer that the program's heads become, of `slots` in all; of the
    others `idle_heads` write nothing, and the rest is noise.
    """

    places: tuple[tuple[int, ...], ...]
    slots: int
    idle_heads: int
    rotate: bool
    generator: Generator

    @classmethod
    def draw(
        cls,
        weights: ProgramWeights,
        *,
        idle_heads: int,
        noise_heads: int,
        rotate: bool,
        generator: Generator,
    ) -> "Disguise":
        counts = [len(heads) for heads, _ in weights.layers]
        slots = max(1, max(counts) + idle_heads + noise_heads)
        orders = [
            generator.permutation(slots) if rotate else np.arange(slots) for _ in weights.layers
        ]
        return cls(
            places=tuple(
                tuple(order[:count].tolist()) for order, count in zip(orders, counts, strict=True)
            ),
            slots=slots,
            idle_heads=idle_heads if noise_heads else slots,
            rotate=rotate,
            generator=generator,
        )

    def orthogonal(self, size: int) -> Matrix:
        return np.linalg.qr(self.generator.standard_normal((size, size)))[0]

    def change_of_basis(self, size: int) -> tuple[Matrix, Matrix]:
        """An invertible matrix, and its inverse transposed."""
        if not self.rotate:
            return np.eye(size), np.eye(size)
        left, right = self.orthogonal(size), self.orthogonal(size)
        stretch = np.exp(self.generator.uniform(-0.5, 0.5, size))
        return (left * stretch) @ right, (left / stretch) @ right


def assemble(
    weights: ProgramWeights, disguise: Disguise, *, causal: bool
) -> encoder.Encoder | decoder.Decoder:
    """A model of these weights, wider by directions that only noise uses."""
    named = weights.embed.shape[1]
    width, generator = named + NOISE_WIDTH, disguise.generator
    turn = disguise.orthogonal(width) if disguise.rotate else np.eye(width)
    size = max([2, *(rank for heads, _ in weights.layers for rank in map(_rank, heads))])
    units = [0 if layer is None else layer.expand.shape[1] for _, layer in weights.layers]
    outputs = weights.unembed.shape[1]
    vocabulary = max(len(weights.tokens), outputs)
    model = build(
        _config(
            width=width,
            heads=disguise.slots,
            size=size,
            hidden=max(units) + NOISE_UNITS,
            layers=len(weights.layers),
            vocabulary=vocabulary,
            positions=len(weights.positions),
            causal=causal,
        )
    )
    tokens = generator.standard_normal((vocabulary, width)) * 0.3
    tokens[:, :named] = 0
    tokens[: len(weights.tokens), :named] = weights.embed
    positions = generator.standard_normal((len(weights.positions), width)) * 0.3
    positions[:, :named] = weights.positions
    unembed = np.zeros((width, vocabulary))
    unembed[:named, :outputs] = weights.unembed
    assert model.embedding.positions is not None
    assert model.readout is not None
    _set(model.embedding.tokens.weight, tokens @ turn)
    _set(model.embedding.positions.weight, positions @ turn)
    assert isinstance(model.readout.weight, nn.Parameter), "the readout is not tied"
    _set(model.readout.weight, (turn.T @ unembed).T)
    for number, (heads, layer) in enumerate(weights.layers):
        module = cast(Layer, model.stack.layers[number])
        assert module.attention is not None
        assert isinstance(module.feedforward, FeedForward)
        inputs, output = _attention(heads, disguise.places[number], disguise, size, width)
        _set(module.attention.project.weight, rearrange(turn.T @ inputs, "p h c d -> (p h d) c"))
        _set(module.attention.output.weight, rearrange(output @ turn, "h d c -> c (h d)"))
        expand, contract = _feedforward(layer, disguise, max(units) + NOISE_UNITS, width)
        _set(module.feedforward.expand.weight, (turn.T @ expand).T)
        _set(module.feedforward.contract.weight, (contract @ turn).T)
    return model.eval()


def _rank(head: BilinearHead) -> int:
    return max(len(_factors(matrix)[0].T) for matrix in (head.qk, head.ov))


def _factors(matrix: Matrix) -> tuple[Matrix, Matrix]:
    """Two narrow matrices of like sizes whose product this is."""
    left, values, right = np.linalg.svd(matrix)
    rank = int((values > RANK_TOLERANCE * max(values[0], RANK_TOLERANCE)).sum())
    root = np.sqrt(values[:rank])
    return left[:, :rank] * root, root[:, None] * right[:rank]


def _attention(
    heads: Sequence[BilinearHead],
    places: Sequence[int],
    disguise: Disguise,
    size: int,
    width: int,
) -> tuple[Float[np.ndarray, "three h c d"], Float[np.ndarray, "h d c"]]:
    """Queries, keys and values, and the output of every head."""
    normal = disguise.generator.standard_normal
    # A score sums over both sides of the stream and all channels.
    inputs = normal((3, disguise.slots, width, size)) * np.sqrt(NOISE_SCORES) / size**0.25
    inputs[2] *= size**-0.25
    output = np.zeros((disguise.slots, size, width))
    free = [slot for slot in range(disguise.slots) if slot not in places]
    if disguise.rotate:
        disguise.generator.shuffle(free)
    noise = free[disguise.idle_heads :]
    output[noise, :, -NOISE_WIDTH:] = normal((len(noise), size, NOISE_WIDTH)) * 0.3
    for slot, head in zip(places, heads, strict=True):
        inputs[:, slot], output[slot] = 0, 0
        (query, key), (value, written) = _factors(head.qk), _factors(head.ov)
        named = len(query)
        inputs[0, slot, :named, : query.shape[1]] = query
        inputs[1, slot, :named, : len(key)] = key.T
        inputs[2, slot, :named, : value.shape[1]] = value
        output[slot, : len(written), :named] = written
        for_scores, inverse = disguise.change_of_basis(size)
        inputs[0, slot], inputs[1, slot] = inputs[0, slot] @ for_scores, inputs[1, slot] @ inverse
        for_values, inverse = disguise.change_of_basis(size)
        inputs[2, slot], output[slot] = inputs[2, slot] @ for_values, inverse.T @ output[slot]
    return inputs, output


def _feedforward(
    layer: ReluLayer | None, disguise: Disguise, hidden: int, width: int
) -> tuple[Matrix, Matrix]:
    generator = disguise.generator
    expand, contract = np.zeros((width, hidden)), np.zeros((hidden, width))
    expand[:, -NOISE_UNITS:] = generator.standard_normal((width, NOISE_UNITS)) * 0.3
    contract[-NOISE_UNITS:, -NOISE_WIDTH:] = (
        generator.standard_normal((NOISE_UNITS, NOISE_WIDTH)) * 0.3
    )
    if layer is not None:
        named, units = layer.expand.shape
        expand[:named, :units], contract[:units, :named] = layer.expand, layer.contract
    if not disguise.rotate:
        return expand, contract
    # relu(s x) = s relu(x), and the order of units means nothing.
    stretch, order = np.exp(generator.uniform(-0.5, 0.5, hidden)), generator.permutation(hidden)
    return (expand * stretch)[:, order], (contract / stretch[:, None])[order]


def _config(
    *,
    width: int,
    heads: int,
    size: int,
    hidden: int,
    layers: int,
    vocabulary: int,
    positions: int,
    causal: bool,
) -> encoder.EncoderConfig | decoder.DecoderConfig:
    attention = AttentionConfig(
        width=width, heads=heads, head_size=size, scale=1.0, mask=Causal() if causal else Full()
    )
    mlp = MLP(width=width, hidden=hidden, activation="relu", bias=False)
    layer = LayerConfig(
        attention=Branch(attention, PreNorm(NoNorm())), feedforward=Branch(mlp, PreNorm(NoNorm()))
    )
    kind = decoder.DecoderConfig if causal else encoder.EncoderConfig
    return kind(
        embedding=Embedding(vocabulary=vocabulary, width=width, position=Learned(count=positions)),
        stack=StackConfig(width=width, layers=(layer,) * layers),
        readout=LanguageHead(tied=False),
    )


def _set(parameter: Tensor, values: np.ndarray) -> None:
    with torch.no_grad():
        parameter.copy_(torch.from_numpy(values))
