"""The models of a studio by name: what each reads and answers, and its tokens in letters."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from manyheads.data.image_preprocessing import image_normalisation, image_size, to_greyscale
from manyheads.decoding.request import check_generates
from manyheads.encoding.text_reader import find_longest, open_texts, reads_texts
from manyheads.errors import InputError, ManyheadsError
from manyheads.lens.inputs.texts import Given
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.build import Model
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, TokenHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.parts.positions import Learned
from manyheads.ragged import Ragged
from manyheads.studio.requests import LIMITS, Pixels

# What a model says at a place: the word after it, the word that stands there, its class, or the
# class of the whole; or nothing.
Answers = Literal["next", "here", "token classes", "classes", "nothing"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Text:
    """What a model was given, as it reads it and as a person does."""

    given: Given
    pieces: tuple[str, ...]
    key: tuple[Any, ...]
    cut: bool = False

    def __len__(self) -> int:
        return len(self.pieces)

    def beginning(self, most: int) -> "Text":
        """The first tokens of a text; an image is never so long."""
        if self.given.ids is None or len(self) <= most:
            return self
        ids = Ragged.from_list([self.given.ids.values[:most]])
        return Text(given=Given(ids=ids), pieces=self.pieces[:most], key=(*self.key, most))


@dataclass(frozen=True, slots=True, eq=False)
class Book:
    """One model on the shelf."""

    name: str
    model: Model

    @property
    def answers(self) -> Answers:
        match self.model.config.readout:
            case NoReadout():
                return "nothing"
            case ClassHead():
                return "classes"
            case TokenHead():
                return "token classes"
            case LanguageHead():
                return "next" if self.writes else "here"

    @property
    def writes(self) -> bool:
        """Whether it goes on from a text."""
        try:
            check_generates(self.model)
        except ManyheadsError:
            return False
        return True

    @property
    def longest(self) -> int:
        """How many tokens of a text it can read here: as far as its positions go."""
        if isinstance(self.model, Vision):
            return LIMITS.tokens
        position = reads_texts(self.model).config.embedding.position
        return min(
            position.longest if isinstance(position, Learned) else LIMITS.tokens, LIMITS.tokens
        )

    @property
    def trained(self) -> int | None:
        """How many tokens its folder says it was made for; some models can read on."""
        if isinstance(self.model, Vision):
            return None
        return find_longest(reads_texts(self.model), None)

    def described(self) -> dict[str, Any]:
        """What the page needs to know before it asks anything."""
        model = self.model
        found: dict[str, Any] = {
            "name": self.name,
            "reads": "image" if isinstance(model, Vision) else "text",
            "answers": self.answers,
            "writes": self.writes,
            "parameters": sum(each.numel() for each in model.parameters()),
            "layers": [{"layer": each.layer, "heads": each.heads} for each in blocks_of(model)],
            "longest": self.longest,
            "trained": self.trained,
        }
        if isinstance(model, Vision):
            found["image"] = {"side": image_size(model), "patch": model.config.patches.size}
        return found

    def read_text(self, text: str) -> Text:
        """The tokens of a text, cut where the model's positions end."""
        if isinstance(self.model, Vision):
            raise InputError(f"{self.name} reads images", "drop an image")
        reader = open_texts(reads_texts(self.model), [text], self.longest)
        [ids], cut = reader.read(range(1))
        if not len(ids):
            raise InputError("there is no text", "type at least one letter")
        given = Given(ids=Ragged.from_list([torch.from_numpy(ids)]).to(self._device))
        numbers = ids.tolist()
        return Text(
            given=given,
            pieces=tuple(self._pieces(text, numbers)),
            key=("text", self.name, *numbers),
            cut=bool(cut),
        )

    def read_ids(self, ids: Sequence[int]) -> Given:
        return Given(ids=Ragged.from_list([torch.tensor(list(ids))]).to(self._device))

    def read_image(self, pixels: Pixels) -> Text:
        """The patches of an image behind the class token."""
        if not isinstance(self.model, Vision):
            raise InputError(f"{self.name} reads texts", "type one")
        size, channels = self.model.config.patches.size, self.model.config.patches.channels
        if pixels.width % size or pixels.height % size:
            raise InputError(
                f"an image of {pixels.width} x {pixels.height} has no whole patches",
                f"give multiples of {size}",
            )
        rows, columns = pixels.height // size, pixels.width // size
        if rows * columns >= LIMITS.tokens:
            raise InputError(f"an image of {rows * columns:,} patches is too large", "shrink it")
        raw = np.frombuffer(pixels.data, dtype=np.uint8).astype(np.float32) / 255
        image = torch.from_numpy(raw.reshape(pixels.height, pixels.width, 3).transpose(2, 0, 1))
        if channels == 1:
            image = to_greyscale(image)
        mean, std = image_normalisation(self.model, channels)
        scaled = ((image - mean) / std).contiguous().to(self._device)
        places = [
            f"row {row + 1}, column {column + 1}"
            for row in range(rows)
            for column in range(columns)
        ]
        return Text(
            given=Given(images=(scaled,)),
            pieces=("[class]", *places),
            key=("image", self.name, pixels.width, pixels.height, pixels.data),
        )

    def word(self, number: int) -> str:
        """An answer in letters: a word of the vocabulary or the name of a class."""
        if self.answers in ("classes", "token classes"):
            names = (self.model.described or {}).get("id2label") or {}
            return str(names.get(str(number), names.get(number, f"class {number}")))
        return self._word(number)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device

    def _word(self, number: int) -> str:
        tokenizer = self.model.tokenizer
        letters: str = tokenizer.decode([number], skip_special_tokens=True)
        return letters or str(tokenizer.id_to_token(number) or f"token {number}")

    def _pieces(self, text: str, ids: list[int]) -> list[str]:
        """Each token in the letters of the text; one without any by its own name."""
        encoding = self.model.tokenizer.encode(text)
        if list(encoding.ids[: len(ids)]) != ids:
            return [self._word(number) for number in ids]
        found, before = [], (-1, -1)
        for number, span in zip(ids, encoding.offsets, strict=False):
            letters = text[span[0] : span[1]]
            # Tokens within one letter share its place in the text.
            found.append(letters if letters and span != before else self._word(number))
            before = span
        return found


class Shelf:
    """The models that were opened with the studio; no request adds to them."""

    def __init__(self, models: Sequence[tuple[str, Model]]) -> None:
        if not models:
            raise InputError("a studio without a model shows nothing", "name one or more")
        self.books: dict[str, Book] = {}
        for name, model in models:
            _check(name, model)
            self.books[_fresh(name, self.books)] = Book(_fresh(name, self.books), model)

    def __getitem__(self, name: str) -> Book:
        if name not in self.books:
            known = ", ".join(self.books)
            raise InputError(f"there is no model {name[:80]!r} here", f"use {known}")
        return self.books[name]


def name_of(where: str) -> str:
    """What a model is called on the page: the last part of its folder or its name.

    >>> name_of("runs/tiny/"), name_of("org/model"), name_of("house-gpt")
    ('tiny', 'model', 'house-gpt')
    """
    return where.replace("\\", "/").rstrip("/").rpartition("/")[2] or where


def _check(name: str, model: Model) -> None:
    if isinstance(model, Seq2Seq):
        raise InputError(
            f"{name} reads one text and writes another, and the studio shows one text",
            "use another model, or see its heads with: manyheads inspect",
        )
    if not isinstance(model, Vision) and model.tokenizer is None:
        raise InputError(
            f"{name} has no tokenizer to read what is typed",
            "save a tokenizer.json beside its weights",
        )


def _fresh(name: str, taken: dict[str, Book]) -> str:
    """Two folders may end in one name."""
    found, count = name, 2
    while found in taken:
        found, count = f"{name} ({count})", count + 1
    return found
