"""Documents in chunks of tokens, with overlap, exact character offsets and titles."""

import re
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from manyheads.encoding.text_reader import require_text_model, resolve_max_length
from manyheads.errors import InputError, check_int
from manyheads.models.build import Model
from manyheads.tasks.search.code_chunks import is_python, python_spans
from manyheads.tasks.search.documents import Document
from manyheads.tokenizers import plain_copy, surrogates_refused

CHUNK_TOKENS, OVERLAP = 256, 32
# A title takes at most this fraction of a chunk.
TITLE_FRACTION = 0.25
# How far back, as a fraction of a chunk, a border may move to the beginning of a word or line.
SEARCH_BACK = 0.25
# A chunk of a text may have a few tokens more than it had within the text.
MARGIN = 2


class Chunk(NamedTuple):
    """A part of a document: characters `start` to `end` of its text."""

    number: int
    title: str
    text: str
    start: int
    end: int

    @property
    def encoded(self) -> str:
        """What the model reads: the title and the text."""
        return f"{self.title}\n{self.text}" if self.title else self.text


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkSettings:
    """How documents are split: `chunk_tokens` per chunk, title and special tokens included.

    Neighbors share `overlap` tokens. With `whole` a document is one chunk. With `code` Python is
    split by functions and classes, and other texts at the ends of lines.
    """

    chunk_tokens: int = CHUNK_TOKENS
    overlap: int = OVERLAP
    whole: bool = False
    code: bool = False

    def __post_init__(self) -> None:
        check_int("chunk_tokens", self.chunk_tokens, minimum=8)
        check_int("overlap", self.overlap, minimum=0)
        if 2 * self.overlap > self.chunk_tokens:
            raise InputError(
                f"overlap={self.overlap} is more than half of chunk_tokens={self.chunk_tokens}",
                f"use at most {self.chunk_tokens // 2}",
            )


WORD = re.compile(r"\w+|[^\w\s]")


class Chunker:
    """Splits documents by the tokens of a model, or by words where there is no model.

    With `late` a chunk has room for what the model puts in front of a document.
    """

    def __init__(
        self, settings: ChunkSettings, model: Model | None = None, *, late: bool = False
    ) -> None:
        self.settings = settings
        self.limit = settings.chunk_tokens
        self.special = 0
        self._tokenizer: Any = None
        if model is not None:
            reader = require_text_model(model)
            if reader.tokenizer is None:
                raise InputError(
                    "this model has no tokenizer",
                    "load it from a folder with tokenizer.json, or set model.tokenizer",
                )
            self._tokenizer = tokenizer = plain_copy(reader.tokenizer)
            self.special = tokenizer.num_special_tokens_to_add(False)
            max_length = resolve_max_length(reader, None)
            if late and model.late is not None:
                max_length = model.late.length("document") or max_length
                prompt = tokenizer.encode(model.late.document_prompt, add_special_tokens=False)
                self.special += len(prompt.ids)
            self.limit = min(self.limit, max_length or self.limit)

    def split(self, documents: Sequence[Document]) -> list[list[Chunk]]:
        """The chunks of each document."""
        if self.settings.whole:
            return [
                [Chunk(0, document.title, document.text, 0, len(document.text))]
                for document in documents
            ]
        offsets = self._offsets([document.text for document in documents])
        titles = self._offsets([document.title for document in documents])
        return [
            self._split(document, tokens, title)
            for document, tokens, title in zip(documents, offsets, titles, strict=True)
        ]

    def _offsets(self, texts: Sequence[str]) -> list[Sequence[tuple[int, int]]]:
        """The character offsets of each token of each text, or of each word without a model."""
        if self._tokenizer is None:
            return [[match.span() for match in WORD.finditer(text)] for text in texts]
        with surrogates_refused(texts):
            encoded = self._tokenizer.encode_batch(list(texts), add_special_tokens=False)
        return [encoding.offsets for encoding in encoded]

    def _split(
        self,
        document: Document,
        tokens: Sequence[tuple[int, int]],
        title_tokens: Sequence[tuple[int, int]],
    ) -> list[Chunk]:
        most = max(1, int(self.limit * TITLE_FRACTION))
        title = document.title
        if len(title_tokens) > most:
            title, title_tokens = title[: title_tokens[most - 1][1]], title_tokens[:most]
        if self.settings.code and is_python(document):
            return self._split_python(document, tokens, title)
        room = self._room(len(title_tokens))
        spans = _spans(document.text, tokens, room, self._overlap(room), self.settings.code)
        # A text whose letters the tokenizer drops still is a document.
        return [
            Chunk(number, title, document.text[start:end], start, end)
            for number, (start, end) in enumerate(spans or [(0, len(document.text))])
        ]

    def _split_python(
        self, document: Document, tokens: Sequence[tuple[int, int]], title: str
    ) -> list[Chunk]:
        parts = python_spans(document)
        names = self._offsets([part.name for part in parts])
        starts = [start for start, _ in tokens]
        chunks: list[Chunk] = []
        for part, name in zip(parts, names, strict=True):
            inside = tokens[bisect_left(starts, part.start) : bisect_left(starts, part.end)]
            room = self._room(min(len(name), self.limit // 2))
            for start, end in _spans(document.text, inside, room, self._overlap(room), True):
                text = document.text[start:end]
                chunks.append(Chunk(len(chunks), part.name or title, text, start, end))
        return chunks

    def _room(self, title_tokens: int) -> int:
        return max(1, self.limit - self.special - title_tokens - MARGIN)

    def _overlap(self, room: int) -> int:
        return min(self.settings.overlap, room // 2)


def _spans(
    text: str, tokens: Sequence[tuple[int, int]], room: int, overlap: int, lines: bool
) -> list[tuple[int, int]]:
    """Characters of each chunk of at most `room` tokens; borders are between words, or lines.

    >>> _spans("aa bb cc dd", [(0, 2), (3, 5), (6, 8), (9, 11)], 3, 1, False)
    [(0, 8), (6, 11)]
    """
    # Marks that a tokenizer adds cover no letters.
    tokens = [token for token in tokens if token[0] < token[1]]
    if not tokens:
        return []
    spans = []
    first = 0
    while True:
        stop = min(first + room, len(tokens))
        if stop < len(tokens):
            earliest = max(first + 1, stop - int(room * SEARCH_BACK))
            stop = _border(text, tokens, stop, earliest, lines)
        # White space at both ends is left out, and lines stay indented.
        start, end = tokens[first][0], tokens[stop - 1][1]
        if lines and first and _begins_line(text, tokens, first):
            start = tokens[first - 1][1]
        part = text[start:end]
        blank = part[: len(part) - len(part.lstrip())]
        front = blank.rfind("\n") + 1 if lines else len(blank)
        spans.append((start + front, start + max(front, len(part.rstrip()))))
        if stop == len(tokens):
            break
        following = max(first + 1, stop - overlap)
        first = _border(text, tokens, following, max(first + 1, following - overlap), lines)
    return spans


def _border(
    text: str, tokens: Sequence[tuple[int, int]], index: int, earliest: int, lines: bool
) -> int:
    """The last token up to `index` that begins a line or a word; `index` where there is none."""
    for begins in (_begins_line, _begins_word) if lines else (_begins_word,):
        for token in range(index, earliest - 1, -1):
            if begins(text, tokens, token):
                return token
    return index


def _begins_word(text: str, tokens: Sequence[tuple[int, int]], index: int) -> bool:
    start = tokens[index][0]
    return text[start].isspace() or text[start - 1].isspace()


def _begins_line(text: str, tokens: Sequence[tuple[int, int]], index: int) -> bool:
    """Whether only white space with a line end in it separates a token from the one before."""
    start, end = tokens[index]
    token = text[start:end]
    blank = token[: len(token) - len(token.lstrip())]
    return "\n" in blank or "\n" in text[tokens[index - 1][1] : start]
