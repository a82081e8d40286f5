"""Synthetic inputs that show what heads do, made of the model's own tokens."""

import random
import re
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.encoding.text_reader import TextReader, require_text_model, resolve_max_length
from manyheads.errors import InputError
from manyheads.lens.inputs.annotated import AnnotatedText, WordPair
from manyheads.lens.inputs.token_classes import token_classes
from manyheads.models import build, decoder, model_interface, vision
from manyheads.ragged import Ragged
from manyheads.tokenizers import plain_tokenizer

# The random block that is repeated: long enough that uniform attention scores low, and of varying
# length, so that no fixed offset looks like induction.
MAX_BLOCK = 48
# As many texts as `random_images` has images.
DEFAULT_SEQUENCES = 16
MIN_WORDS = 40
FALLBACK_WORDS = (
    *("river", "stone", "house", "green", "cloud", "paper", "table", "light", "garden", "winter"),
    *("bread", "music", "horse", "field", "small", "silver", "window", "letter", "market", "glass"),
    *("north", "summer", "coat", "road", "apple", "door", "quiet", "bridge", "yellow", "forest"),
    *("water", "seven", "sugar", "engine", "circle", "morning", "paint", "ship", "valley", "round"),
)
BRACKETS = ("()", "[]", "{}")
QUOTE = '"'
STOPS = (",", ".", ";", "!", "?")


@dataclass(frozen=True, slots=True)
class SpecialTokens:
    """The tokens before and after a text, and the first token of a `Seq2Seq` target.

    `bos` is the part of `prefix` that the tokenizer does not add by itself.
    """

    prefix: tuple[int, ...] = ()
    suffix: tuple[int, ...] = ()
    bos: tuple[int, ...] = ()
    decoder_start: int = 0

    @classmethod
    def of(cls, model: build.Model) -> "SpecialTokens":
        """From the tokenizer of a model, or else from its configuration."""
        reader = require_text_model(model)
        prefix: tuple[int, ...] = ()
        suffix: tuple[int, ...] = ()
        if reader.tokenizer is not None:
            encoded = plain_tokenizer(reader.tokenizer).encode("a")
            inner = [at for at, special in enumerate(encoded.special_tokens_mask) if not special]
            first, last = (inner[0], inner[-1] + 1) if inner else (len(encoded.ids),) * 2
            prefix, suffix = tuple(encoded.ids[:first]), tuple(encoded.ids[last:])
        settings = dict(reader.source_config or {}) | dict(reader.generation)
        bos_id = settings.get("bos_token_id")
        bos: tuple[int, ...] = ()
        if not prefix and isinstance(bos_id, int) and isinstance(reader, decoder.Decoder):
            prefix = bos = (bos_id,)
        start = settings.get("decoder_start_token_id")
        return cls(prefix, suffix, bos, start if isinstance(start, int) else 0)

    def shifts(self, model: build.Model) -> dict[str, int]:
        """By stack, how many tokens are inserted before those of the tokenizer."""
        return {"encoder": 0, "decoder": 1} if model.reads_pairs else {model.readout_stack: 0}


def inputs_from_ids(
    model: build.Model, special: SpecialTokens, texts: Sequence[Sequence[int]]
) -> model_interface.ModelInputs:
    """Inputs from token ids; for a `Seq2Seq`, as source and target."""
    device = next(model.parameters()).device
    ids = Ragged.from_list([torch.tensor(list(text)) for text in texts]).to(device)
    if not model.reads_pairs:
        return model_interface.ModelInputs(ids=ids)
    target = Ragged.from_list([torch.tensor([special.decoder_start, *text]) for text in texts]).to(
        device
    )
    return model_interface.ModelInputs(ids=target, source=ids)


def random_pool(reader: TextReader) -> list[int]:
    """The tokens that random texts are made of: all but the special ones."""
    vocabulary = reader.config.embedding.vocabulary
    pool = list(range(vocabulary))
    if reader.tokenizer is None:
        return pool
    excluded = token_classes(reader.tokenizer, vocabulary, ("special",))["special"].tolist()
    return [token for token in pool[: reader.tokenizer.get_vocab_size()] if not excluded[token]]


def repeated_tokens(model: build.Model, sequences: int, seed: int = 0) -> list[list[int]]:
    """Sequences of a first token and a block of distinct random tokens, repeated once.

    Blocks have 24 to 48 tokens, fewer where the model's context is short. The first token is the
    prefix of the model's texts, or else one more random token.
    """
    reader = require_text_model(model)
    special, pool = SpecialTokens.of(reader), random_pool(reader)
    context = resolve_max_length(reader, None)
    longest = min(MAX_BLOCK, len(pool) - 1)
    if context is not None:
        # The first token of a Seq2Seq target takes a position too.
        outside = max(1, len(special.prefix)) + len(special.suffix) + 1
        longest = min(longest, (context - outside) // 2)
    if longest < 2:
        raise InputError(
            f"{len(pool)} tokens and {context} positions are too few for a repeated block",
            "use a larger model",
        )
    generator = torch.Generator().manual_seed(seed)
    texts = []
    for _ in range(sequences):
        size = int(torch.randint(max(2, longest // 2), longest + 1, (1,), generator=generator))
        drawn = torch.randperm(len(pool), generator=generator)[: size + 1].tolist()
        other, *block = (pool[index] for index in drawn)
        texts.append([*(special.prefix or (other,)), *block, *block, *special.suffix])
    return texts


def plain_words(tokenizer: Any, max_words: int = 400, seed: int = 0) -> list[str]:
    """Short words that are single tokens of the tokenizer, or a fixed list if it has few."""
    tokenizer = plain_tokenizer(tokenizer)
    ids = list(range(tokenizer.get_vocab_size()))
    random.Random(seed).shuffle(ids)
    texts = tokenizer.decode_batch([[token] for token in ids])
    words: dict[str, None] = {}
    for text in texts:
        word = text.strip()
        if not (3 <= len(word) <= 8 and word.isalpha() and word.islower() and word not in words):
            continue
        if len(tokenizer.encode(f" {word}", add_special_tokens=False).ids) == 1:
            words[word] = None
        if len(words) == max_words:
            break
    return list(words) if len(words) >= MIN_WORDS else list(FALLBACK_WORDS)


def single_token(tokenizer: Any, word: str) -> int | None:
    """The token of a word within a text; None where it has several, or is unknown."""
    ids = tokenizer.encode(f" {word}", add_special_tokens=False).ids
    unknown = tokenizer.token_to_id(getattr(tokenizer.model, "unk_token", None) or "")
    return ids[0] if len(ids) == 1 and ids[0] != unknown else None


def capital_words(tokenizer: Any, words: Sequence[str]) -> list[str]:
    """The words that are single tokens with a capital letter too, or all of them if few are."""
    single = [word for word in words if single_token(tokenizer, word.capitalize()) is not None]
    return single if len(single) >= MIN_WORDS // 2 else list(words)


def punctuated_texts(words: Sequence[str], texts: int = 32, seed: int = 0) -> list[str]:
    """Random words with punctuation between some of them."""
    draw = random.Random(seed)

    def clause() -> str:
        inside = " ".join(draw.choice(words) for _ in range(draw.randint(2, 8)))
        return inside + draw.choice(STOPS)

    return [" ".join(clause() for _ in range(draw.randint(5, 8))) for _ in range(texts)]


def bracketed_texts(
    words: Sequence[str], texts: int = 48, seed: int = 0
) -> Iterator[AnnotatedText]:
    """Random words in nested and consecutive brackets, or in quotes.

    Other brackets of the same kind lie between a bracket and its partner, so that the nearest is
    often wrong. Only closing quotes have a target. All other marks of a text are rivals.
    """
    draw = random.Random(seed)
    # The words of a text, and the task, source and target of each of its pairs.
    text: list[str] = []
    pairs: list[tuple[str, int, int]] = []

    def add_words(max_words: int = 4) -> int:
        """Add random words, and return the place of what comes next."""
        text.extend(draw.choice(words) for _ in range(draw.randint(1, max_words)))
        return len(text)

    def nest(marks: str, depth: int) -> None:
        opening = add_words()
        text.append(marks[0])
        for _ in range(draw.randint(1, 2) if depth else 0):
            nest(marks, depth - 1)
        closing = add_words()
        text.append(marks[1])
        pairs.extend((("brackets", closing, opening), ("brackets, ahead", opening, closing)))

    for number in range(texts):
        text.clear()
        pairs.clear()
        if number % 3:
            for _ in range(2):
                nest(BRACKETS[number // 3 % len(BRACKETS)], 2)
        else:
            for _ in range(5):
                opening = add_words()
                text.append(QUOTE)
                pairs.append(("quotes", add_words(10), opening))
                text.append(QUOTE)
        add_words()
        marks = {place for _, *ends in pairs for place in ends}
        yield AnnotatedText.from_words(
            text,
            [
                WordPair(
                    task=task,
                    source=source,
                    targets=(target,),
                    rivals=tuple(sorted(marks - {source, target})),
                )
                for task, source, target in pairs
            ],
        )


def numbered_lists(words: Sequence[str], texts: int = 32, seed: int = 0) -> Iterator[AnnotatedText]:
    """Lists with a few words per line, each line with a dash and its number.

    A number should attend to the number before it, and the end of a line to the number of that
    line. An induction head, which knows no numbers, attends to the dash that followed earlier line
    ends instead.
    """
    draw = random.Random(seed)
    for _ in range(texts):
        first = draw.randint(1, 4)
        text: list[str] = []
        pairs: list[WordPair] = []
        before: int | None = None
        for number in range(first, first + 5):
            text.append("-")
            if before is not None:
                pairs.append(WordPair(task="numbers", source=len(text), targets=(before,)))
            before = len(text)
            count = draw.randint(1, 9)
            text += [str(number), ".", *(draw.choice(words) for _ in range(count)), "\n"]
            pairs.append(WordPair(task="line ends", source=len(text) - 1, targets=(before,)))
        yield AnnotatedText.from_words(text, pairs)


@dataclass(frozen=True, slots=True)
class Needle:
    """Token ids that contain a needle twice, the second time as an answer.

    Each of `copies` has the position before a token of the answer, and that of the same token in
    the needle.
    """

    ids: tuple[int, ...]
    copies: tuple[tuple[int, int], ...]


# What the needle and the question begin with.
NEEDLE = " The secret words of {name} are"
NEEDLE_NAMES = ("Anna", "Paul", "Maria", "Peter", "Laura", "Simon", "Helen", "Martin")
ANSWER_WORDS = 5
# The words of an article on either side of a needle.
HAYSTACK_WORDS = (8, 24)


def needle_texts(
    model: build.Model,
    words: Sequence[str],
    texts: int = 10,
    seed: int = 0,
    haystack_words: tuple[int, int] = HAYSTACK_WORDS,
) -> list[Needle]:
    """Random words hidden in an article, and asked for after it (arXiv 2404.15574).

    Between `haystack_words` words are on either side. Texts that do not fit into the model's
    context are left out.
    """
    reader = require_text_model(model)
    tokenizer, special = plain_tokenizer(reader.tokenizer), SpecialTokens.of(reader)
    context = resolve_max_length(reader, None)
    draw = random.Random(seed)
    articles = [re.sub(r"[^\w\s.,]", "", text).split() for text in passages()]
    in_articles = {word.strip(".,").lower() for article in articles for word in article}
    rare = [word for word in words if word not in in_articles]
    words = rare if len(rare) > ANSWER_WORDS else words

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    def haystack() -> list[int]:
        article, count = draw.choice(articles), draw.randint(*haystack_words)
        # A long haystack begins the article again.
        first = draw.randrange(max(1, len(article) - count))
        sequence = [article[place % len(article)] for place in range(first, first + count)]
        return encode(" " + " ".join(sequence) + ".")

    needles = []
    for _ in range(texts):
        question = encode(NEEDLE.format(name=draw.choice(NEEDLE_NAMES)))
        answer = encode(" " + " ".join(draw.sample(words, ANSWER_WORDS)))
        before = [*special.prefix, *haystack(), *question]
        between = [*encode("."), *haystack(), *question]
        needle, last = len(before), len(before) + len(answer) + len(between) - 1
        ids = (*before, *answer, *between, *answer)
        if context is None or len(ids) <= context:
            copies = tuple((last + index, needle + index) for index in range(len(answer)))
            needles.append(Needle(ids, copies))
    return needles


def copied_tokens(
    model: build.Model, hidden: Float[Tensor, "t c"], needle: Needle
) -> Bool[Tensor, " k"]:
    """Which tokens of the answer are the most likely ones, by what the readout receives."""
    assert model.readout is not None, "models that predict tokens have a readout"
    before, target = torch.tensor(needle.copies).T
    likely = model.readout.logits(hidden[before.to(hidden.device)], model.table).argmax(-1).cpu()
    return likely == torch.tensor(needle.ids)[target]


# The length of texts whose patterns are compared, and the smallest that says something.
PAIR_TOKENS, MIN_PAIR_TOKENS = 64, 16


def unrelated_pairs(model: build.Model, pairs: int = 10, seed: int = 0) -> list[list[int]]:
    """Pairs of texts that share nothing but their length, one after the other.

    The first of a pair is part of an article, the second a block of random tokens over and over.
    Without a tokenizer both are blocks, of different lengths.
    """
    reader = require_text_model(model)
    special, context = SpecialTokens.of(reader), resolve_max_length(reader, None)
    # The first token of a Seq2Seq target takes a position too.
    length = PAIR_TOKENS if context is None else min(PAIR_TOKENS, context - 1)
    inside = length - len(special.prefix) - len(special.suffix)
    if inside < MIN_PAIR_TOKENS:
        return []
    draw = random.Random(seed)
    articles: list[list[int]] = []
    if reader.tokenizer is not None:
        encodings = plain_tokenizer(reader.tokenizer).encode_batch(
            passages(), add_special_tokens=False
        )
        articles = [encoded.ids for encoded in encodings if len(encoded.ids) >= inside]
    pool = random_pool(reader)

    def block(size: int) -> list[int]:
        tokens = draw.sample(pool, min(size, len(pool)))
        return (tokens * (inside // len(tokens) + 1))[:inside]

    texts = []
    for _ in range(pairs):
        if articles:
            article = draw.choice(articles)
            first = draw.randint(0, len(article) - inside)
            texts.append(article[first : first + inside])
        else:
            texts.append(block(draw.randint(inside // 4, inside // 3)))
        texts.append(block(draw.randint(inside // 3 + 1, inside // 2)))
    return [[*special.prefix, *text, *special.suffix] for text in texts]


def random_images(model: vision.Vision, count: int = 16, seed: int = 0) -> list[Tensor]:
    """Smooth random colors with a little noise, of the size that the model reads."""
    patches = model.config.patches
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(count, patches.channels, 4, 4, generator=generator)
    side = (patches.image, patches.image)
    soft = torch.nn.functional.interpolate(coarse, side, mode="bilinear")
    noise = torch.randn(soft.shape, generator=generator)
    device = next(model.parameters()).device
    return list((soft + 0.2 * noise).to(device))


# A text whose last name has occurred before, so that its continuation is known.
UNFINISHED_PASSAGE = (
    "The town of Harlow Bridge stands where the old road crosses the river Tamsel. The market of "
    "Harlow"
)


def passages() -> list[str]:
    """A few short encyclopedic articles, written for this library.

    >>> len(passages())
    6
    """
    text = files(__package__).joinpath("passages.toml").read_text("utf-8")
    return list(tomllib.loads(text)["passages"])


def default_texts(model: build.Model, seed: int = 0) -> Any:
    """The articles (both as source and target for a `Seq2Seq`), or random images for a `Vision`.

    Without a tokenizer, random tokens, each text repeated once.
    """
    if isinstance(model, vision.Vision):
        return random_images(model, seed=seed)
    texts: list[Any] = passages()
    if model.tokenizer is None:
        texts = repeated_tokens(model, DEFAULT_SEQUENCES, seed)
    return [(text, text) for text in texts] if model.reads_pairs else texts
