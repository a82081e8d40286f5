"""Small models whose weights are set by hand, so that it is known what each head does.

Words, places, the word before, and what was found have directions of their own in the residual
stream, all orthogonal, and no norm or feed-forward comes between.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.layer import Branch, Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import Stack, StackConfig
from manyheads.parts.masks import Causal, Full, Mask
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.parts.positions import Learned
from manyheads.taps import Head

__all__ = ["DEAD", "MIXED", "PLANTED", "Look", "offset_look", "planted_model", "text_model"]

WORDS, PLACES = 48, 80
# Scores so far apart that the softmax leaves nothing to the rest.
SHARP = 40.0
BARE = PreNorm(NoNorm())

DEAD, MIXED = "dead", "mixed"
PLANTED = {
    Head(0, 0): "previous-token",
    Head(0, 1): "sink",
    Head(0, 2): "duplicate-token",
    Head(0, 3): MIXED,
    Head(1, 0): "induction",
    Head(1, 1): "copying",
    Head(1, 2): DEAD,
    Head(1, 3): MIXED,
}


@dataclass(frozen=True, slots=True)
class Stream:
    """Where in the residual stream things stand."""

    words: int
    places: int

    @property
    def word(self) -> slice:
        return slice(0, self.words)

    @property
    def place(self) -> slice:
        return slice(self.words, self.size)

    @property
    def before(self) -> slice:
        return slice(self.size, self.size + self.words)

    @property
    def match_slice(self) -> slice:
        return slice(self.before.stop, self.before.stop + self.words)

    @property
    def size(self) -> int:
        """Of a head that compares words and places at once."""
        return self.words + self.places

    @property
    def width(self) -> int:
        return self.match_slice.stop


@dataclass(frozen=True, slots=True, eq=False)
class Look:
    """The score of a query and a key: of their words and of their places, query first.

    With `words_before` a key counts by the word before it, which an earlier head has put there.
    """

    words: Tensor | None = None
    places: Tensor | None = None
    words_before: bool = False
    writes: Tensor | None = None
    to: str = "match_slice"


def offset_look(offset: int, places: int = PLACES) -> Look:
    """Looks at the place `offset` on, and anywhere where there is none."""
    ones = torch.ones(places - abs(offset))
    return Look(places=SHARP * torch.diag(ones, offset))


def planted_model() -> tuple[Decoder, dict[Head, str]]:
    """A decoder of two layers of four heads, and what each of them is."""
    stream = Stream(WORDS, PLACES)
    same, here = SHARP * torch.eye(WORDS), SHARP * torch.eye(PLACES)
    first = torch.zeros(PLACES, PLACES)
    first[:, 0] = SHARP
    looks = {
        # The first place has none before it, and finds itself alone.
        "previous-token": lambda _: Look(places=offset_look(-1).places, to="before"),
        "sink": lambda _: Look(places=first),
        # A word is no copy of itself.
        "duplicate-token": lambda _: Look(words=same, places=-here),
        "induction": lambda _: Look(words=same, words_before=True),
        "copying": lambda seed: Look(words=_tastes(seed), writes=2 * torch.eye(WORDS), to="word"),
        DEAD: lambda seed: Look(words=_tastes(seed), writes=torch.zeros(WORDS, WORDS)),
        MIXED: lambda seed: Look(words=_tastes(seed), writes=_tastes(seed + 20) / 3),
    }
    by_layer = [
        [_made(looks, kind, head) for head, kind in PLANTED.items() if head.layer == layer]
        for layer in (0, 1)
    ]
    model = model_of_looks(stream, by_layer, Causal())
    assert isinstance(model, Decoder)
    return model, dict(PLANTED)


def text_model(
    looks: Sequence[Look], *, tokenizer: Any = None, places: int = PLACES, causal: bool = True
) -> Any:
    """One layer with a head a look: a decoder, or an encoder where it sees both ways."""
    words = WORDS if tokenizer is None else tokenizer.get_vocab_size()
    model = model_of_looks(Stream(words, places), [looks], Causal() if causal else Full())
    model.tokenizer = tokenizer
    return model


def plant(attention: Attention, head: int, stream: Stream, look: Look) -> None:
    """Set one head by hand."""
    size, words = stream.size, stream.words
    query, key, value = (torch.zeros(size, stream.width) for _ in range(3))
    output = torch.zeros(stream.width, size)
    if look.words is not None:
        query[:words, stream.word] = look.words.T
    key[:words, stream.before if look.words_before else stream.word] = torch.eye(words)
    if look.places is not None:
        query[words:, stream.place] = look.places.T
    key[words:, stream.place] = torch.eye(stream.places)
    value[:words, stream.word] = torch.eye(words)
    writes = torch.eye(words) if look.writes is None else look.writes
    output[getattr(stream, look.to), :words] = writes
    mine = slice(head * size, (head + 1) * size)
    parts = attention.projections()
    for name, weights in (("query", query), ("key", key), ("value", value)):
        parts[name][mine] = weights
    attention.output.weight[:, mine] = output


def _made(looks: dict[str, Callable[[int], Look]], kind: str, head: Head) -> Look:
    return looks[kind](4 * head.layer + head.head)


def _tastes(seed: int) -> Tensor:
    """Each word prefers some others, at random."""
    return 3.0 * torch.randn(WORDS, WORDS, generator=torch.Generator().manual_seed(seed))


def model_of_looks(stream: Stream, layers: Sequence[Sequence[Look]], mask: Mask) -> Any:
    """A head a look, layer by layer: a decoder under a causal mask, else an encoder."""
    made = [
        AttentionConfig(
            width=stream.width, heads=len(looks), head_size=stream.size, mask=mask, scale=1.0
        )
        for looks in layers
    ]
    config = {
        "embedding": Embedding(
            vocabulary=stream.words, width=stream.width, position=Learned(count=stream.places)
        ),
        "stack": StackConfig(
            width=stream.width,
            layers=tuple(
                LayerConfig(attention=Branch(each, BARE), feedforward=None) for each in made
            ),
            final_norm=NoNorm(),
        ),
        "readout": LanguageHead(tied=False),
    }
    kind = DecoderConfig if isinstance(mask, Causal) else EncoderConfig
    model: Any = build(kind(**config), seed=0)
    with torch.no_grad():
        for weights in model.parameters():
            weights.zero_()
        model.embedding.tokens.weight[:, stream.word] = torch.eye(stream.words)
        model.embedding.positions.weight[:, stream.place] = torch.eye(stream.places)
        # What heads find and move raises words too, but others than those they read.
        every = torch.eye(stream.words)
        for part, turned in ((stream.word, 0), (stream.match_slice, 1), (stream.before, 2)):
            model.readout.weight[:, part] = every.roll(turned, dims=1)
        for layer, looks in enumerate(layers):
            for head, look in enumerate(looks):
                plant(attention_of(model.stack, layer), head, stream, look)
    return model


def attention_of(stack: Stack, layer: int) -> Attention:
    result = stack.layers[layer]
    assert isinstance(result, Layer)
    assert result.attention is not None
    return result.attention
