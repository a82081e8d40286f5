"""One sentence through one encoder layer of 2017: every number as the model has it, and by hand."""

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
from manyheads.models.recipes import council
from manyheads.parts.feedforward import FeedForward
from manyheads.parts.norms import Normalise
from manyheads.parts.positions import Sinusoidal
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Sublayer, Tap

LONGEST = 512
TOLERANCE = 1e-5

Sentences = tuple[tuple[str, ...], ...]


class Stage(Enum):
    """What the walk comes past, in order; letters as in the design's legend."""

    EMBEDDINGS = "embeddings"  # n c, a token's vector times sqrt(c)
    POSITIONS = "positions"  # n c, the sines and cosines of a token's place
    PLACED = "placed"  # n c, the sum of both: what enters the layer
    QUERY = "query"  # n h d
    KEY = "key"  # n h d
    VALUE = "value"  # n h d
    SCORES = "scores"  # h t s
    WEIGHTS = "weights"  # h t s
    HEAD_OUTPUTS = "head outputs"  # n h d
    JOINED = "joined"  # n c, the heads side by side
    ATTENTION_OUTPUT = "attention output"  # n c
    ATTENTION_SUM = "attention sum"  # n c
    ATTENTION_NORMED = "attention normed"  # n c
    INSIDE = "inside"  # n f, after ReLU
    FEEDFORWARD_OUTPUT = "feed-forward output"  # n c
    FEEDFORWARD_SUM = "feed-forward sum"  # n c
    FEEDFORWARD_NORMED = "feed-forward normed"  # n c
    RESULT = "result"  # n c, of a run that nobody watches, on the kernel the library chooses


TAPS = {
    Stage.PLACED: Site(-1, Tap.EMBEDDINGS),
    Stage.QUERY: Site(0, Tap.QUERY),
    Stage.KEY: Site(0, Tap.KEY),
    Stage.VALUE: Site(0, Tap.VALUE),
    Stage.SCORES: Site(0, Tap.SCORES),
    Stage.WEIGHTS: Site(0, Tap.PATTERN),
    Stage.HEAD_OUTPUTS: Site(0, Tap.HEAD_OUTPUT),
    Stage.ATTENTION_OUTPUT: Site(0, Tap.OUTPUT),
    Stage.ATTENTION_NORMED: Site(0, Tap.AFTER),
    Stage.INSIDE: Site(0, Tap.INSIDE, Sublayer.FEEDFORWARD),
    Stage.FEEDFORWARD_OUTPUT: Site(0, Tap.OUTPUT, Sublayer.FEEDFORWARD),
    Stage.FEEDFORWARD_NORMED: Site(0, Tap.AFTER, Sublayer.FEEDFORWARD),
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
        """The largest, over all numbers of the stage."""
        return float((self.model.double() - self.hand).abs().max())


@dataclass(frozen=True, slots=True)
class Cell:
    """One score, written out: the products that are summed, and the root they are divided by.

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
    """The stages of one sentence of a batch, with the head and the token that are looked at."""

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
        """The token that the chosen one looks at most."""
        return int(self[Stage.WEIGHTS].model[self.head, self.position].argmax())

    @property
    def agrees(self) -> bool:
        """Whether model and hand say the same at every stage."""
        return all(step.difference <= TOLERANCE for step in self.steps.values())

    def cell(self, key: int) -> Cell:
        """The score of the chosen token with another, written out."""
        query = self[Stage.QUERY].hand[self.position, self.head]
        other = self[Stage.KEY].hand[key, self.head]
        return Cell(tuple(query.tolist()), tuple(other.tolist()))

    def powers(self) -> tuple[float, ...]:
        """The chosen row of scores before its softmax is divided out: e to the power of each."""
        scores = self[Stage.SCORES].hand[self.head, self.position]
        return tuple(math.exp(score) for score in scores.tolist())

    def first_channel(self) -> tuple[tuple[float, float], ...]:
        """Weight and value of each key, whose products add up to a head output's first channel."""
        weights = self[Stage.WEIGHTS].hand[self.head, self.position]
        values = self[Stage.VALUE].hand[:, self.head, 0]
        return tuple(zip(weights.tolist(), values.tolist(), strict=True))

    def entropies(self) -> Float[Tensor, " h"]:
        """How widely each head looks, in bits, as a mean over its queries."""
        weights = self[Stage.WEIGHTS].hand
        return torch.special.entr(weights).sum(-1).mean(-1).clamp(min=0) / math.log(2)


def walk(
    model: Encoder, texts: Sequence[str], *, sentence: int = 0, head: int = 0, position: int = 0
) -> Walk:
    """Lead texts through the model as one batch, and follow one of them.

    >>> from manyheads.models.build import build
    >>> walked = walk(build("council", seed=0), ["Hello, world!"], head=3)
    >>> walked.tokens, walked.agrees
    (('Hello', ',', 'world', '!'), True)
    """
    _check_model(model)
    sentences = read(texts)
    _check_choice("sentence", sentence, len(sentences), "a batch of {} sentences")
    _check_choice("position", position, len(sentences[sentence]), "a sentence of {} tokens")
    _check_choice("head", head, _parts(model)[0].config.heads, "a layer of {} heads")
    ids = _number(sentences, model.config.embedding.vocabulary)
    batch = Ragged.from_list([torch.tensor(each) for each in ids])
    with torch.no_grad():
        by_model = _by_model(model, batch, sentence)
        by_hand = _by_hand(model, batch.of(sentence))
        explained = model.explain_kernels(batch)
    return Walk(
        sentences=sentences,
        ids=ids,
        sentence=sentence,
        head=head,
        position=position,
        steps={stage: Step(by_model[stage], by_hand[stage]) for stage in Stage},
        kernel=explained.choices[0][1].kernel,
        kernels_explained=str(explained),
    )


def read(texts: Sequence[str]) -> Sentences:
    """Words and punctuation marks of each text.

    >>> read(["Hello, world!"])
    (('Hello', ',', 'world', '!'),)
    """
    from tokenizers.pre_tokenizers import Whitespace

    if not texts:
        raise InputError("there is no text", "give at least one")
    splitter = Whitespace()
    sentences = []
    for number, text in enumerate(texts):
        try:
            text.encode()
        except UnicodeEncodeError:
            problem = f"text {number} holds bytes that are no UTF-8"
            raise InputError(problem, "save or type it as UTF-8") from None
        words = tuple(word for word, _ in splitter.pre_tokenize_str(text))
        if not words:
            raise InputError(f"text {number} has no word in it", "write one or more")
        if len(words) > LONGEST:
            raise InputError(
                f"text {number} has {len(words)} tokens, too many to follow number by number",
                f"use {LONGEST} or fewer",
            )
        sentences.append(words)
    return tuple(sentences)


def _number(sentences: Sentences, vocabulary: int) -> tuple[tuple[int, ...], ...]:
    """Ids in order of first appearance."""
    known: dict[str, int] = {}
    ids = tuple(
        tuple(known.setdefault(word, len(known)) for word in sentence) for sentence in sentences
    )
    if len(known) > vocabulary:
        raise InputError(
            f"{len(known)} different tokens do not fit into vocabulary={vocabulary}",
            "give fewer or shorter texts",
        )
    return ids


def _check_choice(name: str, value: int, count: int, among: str) -> None:
    if not 0 <= value < count:
        remedy = f"use 0 to {count - 1}" if count > 1 else "use 0"
        raise InputError(f"{name}={value} is outside {among.format(count)}", remedy)


def _check_model(model: Encoder) -> None:
    """The hand knows the layer of 2017 and no other."""
    embedding, layers = model.config.embedding, model.config.stack.layers
    attention = model.config.stack.attention(0) if layers else None
    branch = layers[0].feedforward if layers else None
    expected = None
    if attention is not None and branch is not None and hasattr(branch.inner, "hidden"):
        expected = council(
            width=embedding.width,
            heads=attention.heads,
            hidden=branch.inner.hidden,
            vocabulary=embedding.vocabulary,
        )
    if model.config != expected:
        raise ConfigError(
            "the walk follows one layer of 2017 and this model is made of other parts",
            'use build("council"), in any width and number of heads',
        )
    weight = model.embedding.tokens.weight
    if weight.dtype != torch.float32 or weight.device.type != "cpu":
        raise ConfigError(
            f"the walk compares float32 numbers of the CPU and this model has {weight.dtype} on "
            f"{weight.device}",
            "use model.float().cpu()",
        )


def _by_model(model: Encoder, batch: Ragged, sentence: int) -> dict[Stage, Tensor]:
    record = Record([*TAPS.values(), ENTERS_ATTENTION, ENTERS_FEEDFORWARD])
    model(batch, watch=record)
    found = {stage: record[site].of(sentence) for stage, site in TAPS.items()}
    ids = batch.of(sentence)
    width = model.config.embedding.width
    found[Stage.EMBEDDINGS] = model.embedding.tokens(ids) * model.config.embedding.scale
    found[Stage.POSITIONS] = Sinusoidal().vectors(torch.arange(len(ids)), width)
    found[Stage.JOINED] = rearrange(found[Stage.HEAD_OUTPUTS], "n h d -> n (h d)")
    entered = record[ENTERS_ATTENTION].of(sentence)
    found[Stage.ATTENTION_SUM] = entered + found[Stage.ATTENTION_OUTPUT]
    entered = record[ENTERS_FEEDFORWARD].of(sentence)
    found[Stage.FEEDFORWARD_SUM] = entered + found[Stage.FEEDFORWARD_OUTPUT]
    hidden = model(batch).hidden
    assert isinstance(hidden, Ragged)
    found[Stage.RESULT] = hidden.of(sentence)
    return found


def _by_hand(model: Encoder, ids: Int[Tensor, " n"]) -> dict[Stage, Tensor]:
    """The same from the weights alone, by the formulas of arXiv 1706.03762, in float64."""
    attention, first_norm, feedforward, second_norm = _parts(model)
    found = _embed(model, ids)
    x = found[Stage.PLACED]
    found |= _attend(attention, x)
    found[Stage.ATTENTION_SUM] = x + found[Stage.ATTENTION_OUTPUT]
    x = found[Stage.ATTENTION_NORMED] = _normed(first_norm, found[Stage.ATTENTION_SUM])
    found[Stage.INSIDE] = _linear(feedforward.expand, x).clamp(min=0)
    found[Stage.FEEDFORWARD_OUTPUT] = _linear(feedforward.contract, found[Stage.INSIDE])
    found[Stage.FEEDFORWARD_SUM] = x + found[Stage.FEEDFORWARD_OUTPUT]
    x = _normed(second_norm, found[Stage.FEEDFORWARD_SUM])
    found[Stage.FEEDFORWARD_NORMED] = found[Stage.RESULT] = x
    return found


def _parts(model: Encoder) -> tuple[Attention, Normalise, FeedForward, Normalise]:
    layer = cast(Layer, model.stack.layers[0])
    assert layer.attention is not None
    return (
        layer.attention,
        cast(Normalise, layer.attention_residual.norm),
        cast(FeedForward, layer.feedforward),
        cast(Normalise, layer.feedforward_residual.norm),
    )


def _embed(model: Encoder, ids: Int[Tensor, " n"]) -> dict[Stage, Tensor]:
    width = model.config.embedding.width
    vectors = model.embedding.tokens.weight.double()[ids] * math.sqrt(width)
    places = [
        [_wave(place, channel, width) for channel in range(width)] for place in range(len(ids))
    ]
    positions = torch.tensor(places, dtype=torch.float64)
    return {
        Stage.EMBEDDINGS: vectors,
        Stage.POSITIONS: positions,
        Stage.PLACED: vectors + positions,
    }


def _wave(place: int, channel: int, width: int) -> float:
    """Even channels are sines, odd ones the cosines of the same angle."""
    angle = place / 10_000 ** ((channel - channel % 2) / width)
    return math.cos(angle) if channel % 2 else math.sin(angle)


def _attend(attention: Attention, x: Float[Tensor, "n c"]) -> dict[Stage, Tensor]:
    heads, size = attention.config.heads, attention.config.size
    joined = _linear(attention.project, x)
    query, key, value = rearrange(joined, "n (part h d) -> part n h d", part=3, h=heads)
    scores = einsum(query, key, "t h d, s h d -> h t s") / math.sqrt(size)
    powers = scores.exp()
    weights = powers / powers.sum(-1, keepdim=True)
    read_by_heads = einsum(weights, value, "h t s, s h d -> t h d")
    side_by_side = torch.cat([read_by_heads[:, head] for head in range(heads)], dim=-1)
    return {
        Stage.QUERY: query,
        Stage.KEY: key,
        Stage.VALUE: value,
        Stage.SCORES: scores,
        Stage.WEIGHTS: weights,
        Stage.HEAD_OUTPUTS: read_by_heads,
        Stage.JOINED: side_by_side,
        Stage.ATTENTION_OUTPUT: _linear(attention.output, side_by_side),
    }


def _linear(layer: nn.Linear, x: Float[Tensor, "n inputs"]) -> Float[Tensor, "n outputs"]:
    return x @ layer.weight.double().T + layer.bias.double()


def _normed(norm: Normalise, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
    centred = x - x.mean(-1, keepdim=True)
    variance = centred.square().mean(-1, keepdim=True)
    normed = centred / (variance + norm.config.eps).sqrt()
    assert norm.bias is not None
    return normed * norm.weight.double() + norm.bias.double()
