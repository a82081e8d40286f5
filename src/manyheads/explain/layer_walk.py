"""One sentence through one encoder layer of 2017, computed by the model and by hand."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import cast

import torch
from einops import einsum, rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.errors import ConfigError, InputError
from manyheads.models.encoder import Encoder
from manyheads.models.layer import Layer
from manyheads.models.recipes import tiny_encoder
from manyheads.parts.feedforward import FeedForward
from manyheads.parts.norms import Normalize
from manyheads.parts.positions import Sinusoidal
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap

MAX_TOKENS = 512
TOLERANCE = 1e-5

Sentences = tuple[tuple[str, ...], ...]


class Stage(Enum):
    """The stages of the walk in order, with their shapes."""

    EMBEDDINGS = "embeddings"  # n c, a token's vector times sqrt(c)
    POSITIONS = "positions"  # n c, the sines and cosines of a token's position
    INPUT = "input"  # n c, the sum of both, which enters the layer
    QUERY = "query"  # n h d
    KEY = "key"  # n h d
    VALUE = "value"  # n h d
    SCORES = "scores"  # h t s
    WEIGHTS = "weights"  # h t s
    HEAD_OUTPUTS = "head outputs"  # n h d
    CONCATENATED = "concatenated"  # n c, the outputs of all heads
    ATTENTION_OUTPUT = "attention output"  # n c
    ATTENTION_SUM = "attention sum"  # n c
    ATTENTION_NORMED = "attention normed"  # n c
    NEURONS = "neurons"  # n f, after ReLU
    FEEDFORWARD_OUTPUT = "feed-forward output"  # n c
    FEEDFORWARD_SUM = "feed-forward sum"  # n c
    FEEDFORWARD_NORMED = "feed-forward normed"  # n c
    RESULT = "result"  # n c, of a run without taps, on the kernel that the library chooses


def stage_sites(layer: int) -> dict[Stage, Site]:
    """Where a model shows the stages of a layer; the others are computed from these."""
    feedforward = Sublayer.FEEDFORWARD
    return {
        Stage.INPUT: Site(-1, Tap.EMBEDDINGS),
        Stage.QUERY: Site(layer, Tap.QUERY),
        Stage.KEY: Site(layer, Tap.KEY),
        Stage.VALUE: Site(layer, Tap.VALUE),
        Stage.SCORES: Site(layer, Tap.SCORES),
        Stage.WEIGHTS: Site(layer, Tap.PATTERN),
        Stage.HEAD_OUTPUTS: Site(layer, Tap.HEAD_OUTPUT),
        Stage.ATTENTION_OUTPUT: Site(layer, Tap.OUTPUT),
        Stage.ATTENTION_NORMED: Site(layer, Tap.AFTER),
        Stage.NEURONS: Site(layer, Tap.INSIDE, feedforward),
        Stage.FEEDFORWARD_OUTPUT: Site(layer, Tap.OUTPUT, feedforward),
        Stage.FEEDFORWARD_NORMED: Site(layer, Tap.AFTER, feedforward),
    }


ENTERS_ATTENTION = Site(0, Tap.BEFORE)
ENTERS_FEEDFORWARD = Site(0, Tap.BEFORE, Sublayer.FEEDFORWARD)


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """One stage as the model computed it in float32, and by hand in float64."""

    model: Float[Tensor, "..."]
    hand: Float[Tensor, "..."]

    @property
    def difference(self) -> float:
        """The largest difference over all numbers of the stage."""
        return float((self.model.double() - self.hand).abs().max())


@dataclass(frozen=True, slots=True)
class Cell:
    """One score written out: the products that are summed, and the root that divides the sum.

    >>> cell = Cell(query=(1.0, 2.0, 0.5, -1.0), key=(3.0, 1.0, 2.0, 2.0))
    >>> cell.products, cell.product, cell.root, cell.score
    ((3.0, 2.0, 1.0, -2.0), 4.0, 2.0, 2.0)
    """

    query: tuple[float, ...]
    key: tuple[float, ...]

    @property
    def products(self) -> tuple[float, ...]:
        return tuple(q * k for q, k in zip(self.query, self.key, strict=True))

    @property
    def product(self) -> float:
        return sum(self.products)

    @property
    def root(self) -> float:
        return math.sqrt(len(self.query))

    @property
    def score(self) -> float:
        return self.product / self.root


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Walk:
    """The stages of one sentence of a batch, with the head and the token that are explained."""

    sentences: Sentences
    ids: tuple[tuple[int, ...], ...]
    sentence: int
    head: int
    position: int
    steps: dict[Stage, Step]
    kernel: str
    kernels_explained: str

    def __getitem__(self, stage: Stage) -> Step:
        return self.steps[stage]

    @property
    def tokens(self) -> tuple[str, ...]:
        """The words of the chosen sentence."""
        return self.sentences[self.sentence]

    @property
    def strongest_key(self) -> int:
        """The token with the largest attention weight."""
        return int(self[Stage.WEIGHTS].model[self.head, self.position].argmax())

    @property
    def agrees(self) -> bool:
        """Whether model and hand agree at every stage."""
        return all(step.difference <= TOLERANCE for step in self.steps.values())

    def cell(self, key: int) -> Cell:
        """The score of the chosen token and another, written out."""
        query_vector = self[Stage.QUERY].hand[self.position, self.head]
        key_vector = self[Stage.KEY].hand[key, self.head]
        return Cell(tuple(query_vector.tolist()), tuple(key_vector.tolist()))

    def powers(self) -> tuple[float, ...]:
        """The numerators of the softmax of the chosen row: e to the power of each score."""
        scores = self[Stage.SCORES].hand[self.head, self.position]
        return tuple(math.exp(score) for score in scores.tolist())

    def first_channel(self) -> tuple[tuple[float, float], ...]:
        """Weight and value of each key; their products sum to the first channel of the output."""
        weights = self[Stage.WEIGHTS].hand[self.head, self.position]
        values = self[Stage.VALUE].hand[:, self.head, 0]
        return tuple(zip(weights.tolist(), values.tolist(), strict=True))

    def entropies(self) -> Float[Tensor, " h"]:
        """The mean entropy of each head over its queries, in bits."""
        weights = self[Stage.WEIGHTS].hand
        return torch.special.entr(weights).sum(-1).mean(-1).clamp(min=0) / math.log(2)


def walk(
    model: Encoder, texts: Sequence[str], *, sentence: int = 0, head: int = 0, position: int = 0
) -> Walk:
    """Run texts through the model as one batch, and follow one of them.

    >>> from manyheads.models.build import build
    >>> walked = walk(build("tiny-encoder", seed=0), ["Hello, world!"], head=3)
    >>> walked.tokens, walked.agrees
    (('Hello', ',', 'world', '!'), True)
    """
    _check_model(model)
    sentences = split_words(texts)
    _check_choice("sentence", sentence, len(sentences), "a batch of {} sentences")
    _check_choice("position", position, len(sentences[sentence]), "a sentence of {} tokens")
    _check_choice("head", head, _parts(model)[0].config.heads, "a layer of {} heads")
    # Ids are in the order of first appearance.
    numbers: dict[str, int] = {}
    ids = tuple(
        tuple(numbers.setdefault(word, len(numbers)) for word in words) for words in sentences
    )
    if len(numbers) > (vocabulary := model.config.embedding.vocabulary):
        raise InputError(
            f"{len(numbers)} different tokens do not fit into a vocabulary of {vocabulary}",
            "give fewer or shorter texts",
        )
    batch = Ragged.from_list([torch.tensor(row) for row in ids])
    with torch.no_grad():
        by_model = _by_model(model, batch, sentence)
        by_hand = _by_hand(model, batch.of(sentence))
        explanation = model.explain_kernels(batch)
    return Walk(
        sentences=sentences,
        ids=ids,
        sentence=sentence,
        head=head,
        position=position,
        steps={stage: Step(by_model[stage], by_hand[stage]) for stage in Stage},
        kernel=explanation.choices[0][1].kernel,
        kernels_explained=str(explanation),
    )


def split_words(texts: Sequence[str]) -> Sentences:
    """The words and punctuation marks of each text.

    >>> split_words(["Hello, world!"])
    (('Hello', ',', 'world', '!'),)
    """
    from tokenizers.pre_tokenizers import Whitespace

    if not texts:
        raise InputError("texts is empty", "give at least one text")
    splitter = Whitespace()
    sentences = []
    for index, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"text {index} contains bytes that are not UTF-8"
            raise InputError(problem, "save or type it as UTF-8") from None
        words = tuple(word for word, _ in splitter.pre_tokenize_str(text))
        if not words:
            raise InputError(f"text {index} has no word in it", "write one or more")
        if len(words) > MAX_TOKENS:
            raise InputError(
                f"text {index} has {len(words)} tokens, too many to explain number by number",
                f"use {MAX_TOKENS} or fewer",
            )
        sentences.append(words)
    return tuple(sentences)


def _check_choice(name: str, value: int, count: int, among: str) -> None:
    if not 0 <= value < count:
        remedy = f"use 0 to {count - 1}" if count > 1 else "use 0"
        raise InputError(f"{name}={value} is outside {among.format(count)}", remedy)


def _check_model(model: Encoder) -> None:
    """Refuse any model but the layer of 2017, which is computed by hand."""
    embedding, layers = model.config.embedding, model.config.stack.layers
    attention = model.config.stack.attention(0) if layers else None
    branch = layers[0].feedforward if layers else None
    expected = None
    if attention is not None and branch is not None and hasattr(branch.inner, "hidden"):
        expected = tiny_encoder(
            width=embedding.width,
            heads=attention.heads,
            hidden=branch.inner.hidden,
            vocabulary=embedding.vocabulary,
        )
    if model.config != expected:
        raise ConfigError(
            "the walk explains the encoder layer of 2017 only and this model has other parts",
            'use build("tiny-encoder"), in any width and number of heads',
        )
    weight = model.embedding.tokens.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise ConfigError(
            f"the walk needs float32 weights on the CPU and this model has {weight.dtype} on "
            f"{weight.device}",
            "use model.float().cpu()",
        )


def _by_model(model: Encoder, batch: Ragged, sentence: int) -> dict[Stage, Tensor]:
    sites = stage_sites(0)
    record = Record([*sites.values(), ENTERS_ATTENTION, ENTERS_FEEDFORWARD])
    model(batch, watch=record)
    stages = {stage: record[site].of(sentence) for stage, site in sites.items()}
    ids = batch.of(sentence)
    width = model.config.embedding.width
    stages[Stage.EMBEDDINGS] = model.embedding.tokens(ids) * model.config.embedding.scale
    stages[Stage.POSITIONS] = Sinusoidal().vectors(torch.arange(len(ids)), width)
    stages[Stage.CONCATENATED] = rearrange(stages[Stage.HEAD_OUTPUTS], "n h d -> n (h d)")
    before, between = (record[site].of(sentence) for site in (ENTERS_ATTENTION, ENTERS_FEEDFORWARD))
    stages[Stage.ATTENTION_SUM] = before + stages[Stage.ATTENTION_OUTPUT]
    stages[Stage.FEEDFORWARD_SUM] = between + stages[Stage.FEEDFORWARD_OUTPUT]
    hidden = model(batch).hidden
    assert isinstance(hidden, Ragged)
    stages[Stage.RESULT] = hidden.of(sentence)
    return stages


def _by_hand(model: Encoder, ids: Int[Tensor, " n"]) -> dict[Stage, Tensor]:
    """The same from the weights, by the formulas of arXiv 1706.03762, in float64."""
    attention, first_norm, feedforward, second_norm = _parts(model)
    width = model.config.embedding.width
    vectors = model.embedding.tokens.weight.double()[ids] * math.sqrt(width)
    waves = [[_wave(at, channel, width) for channel in range(width)] for at in range(len(ids))]
    positions = torch.tensor(waves, dtype=torch.float64)
    x = vectors + positions
    stages = {Stage.EMBEDDINGS: vectors, Stage.POSITIONS: positions, Stage.INPUT: x}
    stages |= _attend(attention, x)
    stages[Stage.ATTENTION_SUM] = x + stages[Stage.ATTENTION_OUTPUT]
    x = stages[Stage.ATTENTION_NORMED] = _normed(first_norm, stages[Stage.ATTENTION_SUM])
    stages[Stage.NEURONS] = _linear(feedforward.expand, x).clamp(min=0)
    stages[Stage.FEEDFORWARD_OUTPUT] = _linear(feedforward.contract, stages[Stage.NEURONS])
    stages[Stage.FEEDFORWARD_SUM] = x + stages[Stage.FEEDFORWARD_OUTPUT]
    x = _normed(second_norm, stages[Stage.FEEDFORWARD_SUM])
    stages[Stage.FEEDFORWARD_NORMED] = stages[Stage.RESULT] = x
    return stages


def _parts(model: Encoder) -> tuple[Attention, Normalize, FeedForward, Normalize]:
    layer = cast(Layer, model.stack.layers[0])
    assert layer.attention is not None
    return (
        layer.attention,
        cast(Normalize, layer.attention_residual.norm),
        cast(FeedForward, layer.feedforward),
        cast(Normalize, layer.feedforward_residual.norm),
    )


def _wave(position: int, channel: int, width: int) -> float:
    """Even channels are sines, odd ones the cosines of the same angle."""
    angle = position / 10_000 ** ((channel - channel % 2) / width)
    return math.cos(angle) if channel % 2 else math.sin(angle)


def _attend(attention: Attention, x: Float[Tensor, "n c"]) -> dict[Stage, Tensor]:
    heads, size = attention.config.heads, attention.config.size
    joined = _linear(attention.project, x)
    query, key, value = rearrange(joined, "n (part h d) -> part n h d", part=3, h=heads)
    scores = einsum(query, key, "t h d, s h d -> h t s") / math.sqrt(size)
    powers = scores.exp()
    weights = powers / powers.sum(-1, keepdim=True)
    outputs = einsum(weights, value, "h t s, s h d -> t h d")
    concatenated = torch.cat([outputs[:, head] for head in range(heads)], dim=-1)
    return {
        Stage.QUERY: query,
        Stage.KEY: key,
        Stage.VALUE: value,
        Stage.SCORES: scores,
        Stage.WEIGHTS: weights,
        Stage.HEAD_OUTPUTS: outputs,
        Stage.CONCATENATED: concatenated,
        Stage.ATTENTION_OUTPUT: _linear(attention.output, concatenated),
    }


def _linear(layer: nn.Linear, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
    return x @ layer.weight.double().T + layer.bias.double()


def _normed(norm: Normalize, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    centered = x - x.mean(-1, keepdim=True)
    variance = centered.square().mean(-1, keepdim=True)
    normed = centered / (variance + norm.config.eps).sqrt()
    assert norm.bias is not None
    return normed * norm.weight.double() + norm.bias.double()
