"""A text as a report needs it: pieces to measure on, and its beginning in the letters of tokens."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from manyheads.encoding.reading import TextReader, find_longest, open_texts, reads_texts
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.report.image import Picture, read_image

__all__ = ["Reading", "check_model", "read_file", "read_picture", "read_text", "word_of"]

# Letters that a token has at the most, on average: what lies beyond is not read.
LETTERS_A_TOKEN = 16
# Errors are over pieces: some eight of them, neither too short to show anything nor too long.
PIECES, SHORTEST, LONGEST = 8, 32, 256


@dataclass(frozen=True, slots=True, eq=False)
class Reading:
    """Pieces that are measured, and the ids and letters of the tokens that are shown."""

    measured: tuple[Any, ...]
    ids: tuple[int, ...]
    letters: tuple[str, ...]
    picture: Picture | None = None

    @property
    def shown(self) -> list[Any]:
        """What the patterns are of, as the lens takes it."""
        return [list(self.ids)] if self.picture is None else [self.picture.pixels]

    def __len__(self) -> int:
        return len(self.letters)


def check_model(model: Model, name: str) -> TextReader:
    """Refuse what a report of a text cannot show, in plain words."""
    if isinstance(model, Vision):
        raise InputError(f"{name} reads images", "give it one with --image")
    if isinstance(model, Seq2Seq):
        raise InputError(
            f"{name} has an encoder and a decoder, and a report shows one stack of layers",
            "see the heads of both and those across with: manyheads inspect",
        )
    if model.tokenizer is None:
        raise InputError(f"{name} has no tokenizer", "put a tokenizer.json into its folder")
    return reads_texts(model)


def read_file(file: Path, tokens: int) -> str:
    """The beginning of a file, long enough for so many tokens."""
    if not file.is_file():
        raise InputError(f"there is no file {file}", "name one with a text")
    with file.open("rb") as opened:
        raw = opened.read(LETTERS_A_TOKEN * tokens + 4)
        whole = not opened.read(1)
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        # A letter may be cut in two where the reading stopped.
        if not whole and error.start >= len(raw) - 4:
            return raw[: error.start].decode("utf-8")
        raise InputError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}", "convert it first"
        ) from None


def read_text(model: Model, name: str, text: str, *, measured: int, shown: int) -> Reading:
    """So many tokens of a text in pieces to measure on, and the first of them to be shown."""
    reader = check_model(model, name)
    if not text.strip():
        raise InputError("there is no text", "give one with at least two words")
    limit = find_longest(reader, None)
    most = shown if limit is None else min(shown, limit)
    [ids], _ = open_texts(reader, [text], most).read(range(1))
    if len(ids) < 2:
        raise InputError(f"a text of {len(ids)} token shows nothing", "give a longer one")
    numbers = [int(each) for each in ids]
    pieces = _pieces(model.tokenizer, text, measured, limit)
    return Reading(tuple(pieces), tuple(numbers), tuple(_letters(model.tokenizer, text, numbers)))


def read_picture(model: Model, name: str, file: Path) -> Reading:
    """One image, its patches in place of tokens."""
    if not isinstance(model, Vision):
        raise InputError(f"{name} reads no images", "give it a text with --text or --file")
    picture = read_image(model, file)
    return Reading((picture.pixels,), (), tuple(picture.patches), picture)


def _pieces(tokenizer: Any, text: str, measured: int, limit: int | None) -> list[str]:
    spans = tokenizer.encode(text, add_special_tokens=False).offsets[:measured]
    size = max(SHORTEST, min(LONGEST, len(spans) // PIECES))
    if limit is not None:
        # Room for the special tokens that are put around each piece.
        size = max(1, min(size, limit - 4))
    found: list[str] = []
    for start in range(0, len(spans), size):
        some = spans[start : start + size]
        piece = text[some[0][0] : some[-1][1]]
        # A short rest says little and would weigh as much as a whole piece.
        if piece.strip() and (len(some) >= size // 2 or not found):
            found.append(piece)
    return found


def _letters(tokenizer: Any, text: str, ids: list[int]) -> list[str]:
    """Each token in the letters of the text; one without any by its own name."""
    encoding = tokenizer.encode(text)
    if list(encoding.ids[: len(ids)]) != ids:
        return [word_of(tokenizer, number) for number in ids]
    found, before = [], (-1, -1)
    for number, span in zip(ids, encoding.offsets, strict=False):
        mine = text[span[0] : span[1]]
        # Tokens within one letter share its place in the text.
        found.append(mine if mine and span != before else word_of(tokenizer, number))
        before = span
    return found


def word_of(tokenizer: Any, number: int) -> str:
    """A token in letters, or by its own name where it has none."""
    letters: str = tokenizer.decode([number], skip_special_tokens=True)
    return letters or str(tokenizer.id_to_token(number) or f"token {number}")
