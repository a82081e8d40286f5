"""Texts the library makes by itself to see what heads do: the tokens are the model's own."""

import random
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from typing import Any

import torch
from torch import Tensor

from manyheads.encoding.text_reader import TextReader, find_longest, reads_texts
from manyheads.errors import InputError
from manyheads.lens.inputs.annotated import Pair, Written
from manyheads.lens.inputs.texts import Given
from manyheads.lens.inputs.token_classes import token_classes
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.ragged import Ragged
from manyheads.tokenizers import plain_copy

# Lengths of the random block that is said twice: long enough that even heads score low, and
# different, so that no fixed offset looks like induction.
LONGEST_BLOCK = 48
FEWEST_WORDS = 40
OWN_WORDS = (
    *("river", "stone", "house", "green", "cloud", "paper", "table", "light", "garden", "winter"),
    *("bread", "music", "horse", "field", "small", "silver", "window", "letter", "market", "glass"),
    *("north", "summer", "coat", "road", "apple", "door", "quiet", "bridge", "yellow", "forest"),
    *("water", "seven", "sugar", "engine", "circle", "morning", "paint", "ship", "valley", "round"),
)
BRACKETS = ("()", "[]", "{}")
QUOTE = '"'
STOPS = (",", ".", ";", "!", "?")


@dataclass(frozen=True, slots=True)
class Frame:
    """What a model's texts begin and end with, and the token that a `Seq2Seq` writes after.

    `begin` is what its tokenizer does not put in front by itself, though the model begins with it.
    """

    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    begin: tuple[int, ...] = ()
    start: int = 0

    @classmethod
    def of(cls, model: Model) -> "Frame":
        """From its tokenizer, or else from what its folder says."""
        reader = reads_texts(model)
        before: tuple[int, ...] = ()
        after: tuple[int, ...] = ()
        if reader.tokenizer is not None:
            encoded = plain_copy(reader.tokenizer).encode("a")
            inner = [place for place, mark in enumerate(encoded.special_tokens_mask) if not mark]
            first, last = (inner[0], inner[-1] + 1) if inner else (len(encoded.ids),) * 2
            before, after = tuple(encoded.ids[:first]), tuple(encoded.ids[last:])
        said = dict(reader.described or {}) | dict(reader.generation)
        begins = said.get("bos_token_id")
        begin: tuple[int, ...] = ()
        if not before and isinstance(begins, int) and isinstance(reader, Decoder):
            before = begin = (begins,)
        start = said.get("decoder_start_token_id")
        return cls(before, after, begin, start if isinstance(start, int) else 0)

    def shifts(self, model: Model) -> dict[str, int]:
        """By stack, how far the tokens of a text stand behind where its tokenizer has them."""
        return {"encoder": 0, "decoder": 1} if isinstance(model, Seq2Seq) else {"main": 0}


def as_given(model: Model, frame: Frame, texts: Sequence[Sequence[int]]) -> Given:
    """Ids as they are; a `Seq2Seq` reads them, and writes the same."""
    device = next(model.parameters()).device
    ids = Ragged.from_list([torch.tensor(list(text)) for text in texts]).to(device)
    if not isinstance(model, Seq2Seq):
        return Given(ids=ids)
    target = Ragged.from_list([torch.tensor([frame.start, *text]) for text in texts]).to(device)
    return Given(ids=target, source=ids)


def repeated_tokens(model: Model, sequences: int, seed: int = 0) -> list[list[int]]:
    """A first token, then a block of random tokens, all different, twice.

    Blocks have 24 to 48 tokens, fewer where the model reads no more. The first token is what the
    model's texts begin with, or else one more random token.
    """
    reader = reads_texts(model)
    frame, pool = Frame.of(reader), _plain_ids(reader)
    room = find_longest(reader, None)
    if room is not None:
        # The token that a Seq2Seq writes after takes a place too.
        room = (room - max(1, len(frame.before)) - len(frame.after) - 1) // 2
    most = min(each for each in (LONGEST_BLOCK, room, len(pool) - 1) if each is not None)
    if most < 2:
        raise InputError(
            f"a model of {len(pool)} words and {find_longest(reader, None)} positions cannot "
            "repeat anything",
            "use a larger one",
        )
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(sequences):
        size = int(torch.randint(max(2, most // 2), most + 1, (1,), generator=generator))
        drawn = torch.randperm(len(pool), generator=generator)[: size + 1].tolist()
        other, *block = (pool[place] for place in drawn)
        found.append([*(frame.before or (other,)), *block, *block, *frame.after])
    return found


def _plain_ids(model: TextReader) -> list[int]:
    """All words but the special ones and those the tokenizer does not have."""
    vocabulary = model.config.embedding.vocabulary
    if model.tokenizer is None:
        return list(range(vocabulary))
    special = token_classes(model.tokenizer, vocabulary, ("special",))["special"]
    known = min(vocabulary, model.tokenizer.get_vocab_size())
    return [token for token in range(known) if not special[token]]


def plain_words(tokenizer: Any, most: int = 400, seed: int = 0) -> list[str]:
    """Short words that are one token each, drawn from the tokenizer; else a few of our own."""
    tokenizer = plain_copy(tokenizer)
    known = list(range(tokenizer.get_vocab_size()))
    random.Random(seed).shuffle(known)
    texts = tokenizer.decode_batch([[token] for token in known])
    found: dict[str, None] = {}
    for text in texts:
        word = text.strip()
        if not (3 <= len(word) <= 8 and word.isalpha() and word.islower() and word not in found):
            continue
        if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1:
            found[word] = None
        if len(found) == most:
            break
    return list(found) if len(found) >= FEWEST_WORDS else list(OWN_WORDS)


def punctuated_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> list[str]:
    """Random words with commas, stops and the like between some of them."""
    draw = random.Random(seed)
    found = []
    for _ in range(texts):
        parts = []
        for _ in range(draw.randint(5, 8)):
            clause = " ".join(draw.choice(words) for _ in range(draw.randint(2, 8)))
            parts.append(clause + draw.choice(STOPS))
        found.append(" ".join(parts))
    return found


def bracketed_texts(words: Sequence[str], texts: int = 48, seed: int = 0) -> Iterator[Written]:
    """Random words in brackets, nested and side by side, or in quotes.

    Between a bracket and its partner stand others of the same kind, so that the nearest is often
    wrong; of quotes, which look alike on both sides, only closing ones are asked. All other marks
    of a text are rivals of the right one.
    """
    draw = random.Random(seed)
    for place in range(texts):
        said: list[str] = []
        pairs: list[Pair] = []
        if place % 3:
            marks = BRACKETS[place // 3 % len(BRACKETS)]
            for _ in range(2):
                _nest(draw, words, marks, 2, said, pairs)
        else:
            for _ in range(5):
                said += _some(draw, words)
                opening = len(said)
                said += [QUOTE, *_some(draw, words, 10), QUOTE]
                pairs.append(_matching("quotes", len(said) - 1, opening))
        marked = sorted({pair.source for pair in pairs} | {pair.targets[0] for pair in pairs})
        yield Written.spaced(
            [*said, *_some(draw, words)], [_beside(pair, marked) for pair in pairs]
        )


def _beside(pair: Pair, marks: Sequence[int]) -> Pair:
    asked = {pair.source, *pair.targets}
    return replace(pair, rivals=tuple(place for place in marks if place not in asked))


def _nest(
    draw: random.Random,
    words: Sequence[str],
    marks: str,
    depth: int,
    said: list[str],
    pairs: list[Pair],
) -> None:
    said += _some(draw, words)
    opening = len(said)
    said.append(marks[0])
    for _ in range(draw.randint(1, 2) if depth else 0):
        _nest(draw, words, marks, depth - 1, said, pairs)
    said += _some(draw, words)
    closing = len(said)
    said.append(marks[1])
    pairs.append(_matching("brackets", closing, opening))
    pairs.append(_matching("brackets, ahead", opening, closing))


def _matching(task: str, source: int, target: int) -> Pair:
    return Pair(task=task, source=source, targets=(target,))


def _some(draw: random.Random, words: Sequence[str], most: int = 4) -> list[str]:
    return [draw.choice(words) for _ in range(draw.randint(1, most))]


def numbered_lists(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[Written]:
    """Lists of a few words a line, each line with a dash and its number.

    A number should look at the one before it, and the end of a line at the line's own, which the
    next follows from. What followed the line's end before is the dash: there an induction head
    looks, which needs to know no numbers.
    """
    draw = random.Random(seed)
    for _ in range(texts):
        first = draw.randint(1, 4)
        said: list[str] = []
        pairs: list[Pair] = []
        before: int | None = None
        for number in range(first, first + 5):
            said.append("-")
            if before is not None:
                pairs.append(Pair(task="numbers", source=len(said), targets=(before,)))
            before = len(said)
            count = draw.randint(1, 9)
            said += [str(number), ".", *(draw.choice(words) for _ in range(count)), "\n"]
            pairs.append(Pair(task="line ends", source=len(said) - 1, targets=(before,)))
        yield Written.spaced(said, pairs)


def images(model: Vision, count: int = 16, seed: int = 0) -> list[Tensor]:
    """Soft random colours with a little noise, of the size the model reads."""
    patches = model.config.patches
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, patches.channels, 4, 4, generator=generator)
    side = (patches.image, patches.image)
    soft = torch.nn.functional.interpolate(coarse, side, mode="bilinear")
    noise = torch.randn(soft.shape, generator=generator)
    device = next(model.parameters()).device
    return list((soft + 0.2 * noise).to(device))


# A text that has said already how its last name goes on.
BEGUN = (
    "The town of Harlow Bridge stands where the old road crosses the river Tamsel. The market of "
    "Harlow"
)


def passages() -> list[str]:
    """A few short articles in the manner of an encyclopedia, written for this library.

    >>> len(passages())
    6
    """
    told = files(__package__).joinpath("passages.toml").read_text("utf-8")
    return list(tomllib.loads(told)["passages"])


def own_texts(model: Model, seed: int = 0) -> Any:
    """The articles, as source and target at once for a `Seq2Seq`; random images for a `Vision`."""
    if isinstance(model, Vision):
        return images(model, seed=seed)
    if isinstance(model, Seq2Seq):
        return [(each, each) for each in passages()]
    return passages()
