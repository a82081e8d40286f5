"""What a page asks for, read from JSON field by field and checked before any model runs."""

import json
import math
from base64 import b64decode
from binascii import Error as NotBase64
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, cast

from manyheads.errors import InputError
from manyheads.taps import Head


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Bounds of single requests; `waiting` and `kept_bytes` are bounds of all of them together.

    >>> LIMITS.tokens >= 8192
    True
    """

    body_bytes: int = 4_000_000
    body_seconds: float = 30.0
    letters: int = 400_000
    tokens: int = 16_384
    heads: int = 12
    switched: int = 4096
    keys: int = 64
    rows: int = 256
    cells: int = 512
    max_new_tokens: int = 512
    answers: int = 20
    # The atlas needs every pair of tokens in every head; of a longer text it shows the beginning.
    atlas_tokens: int = 2048
    kind_sequences: int = 8
    # Patching runs the model once a head: it is for prompts, not for books.
    patched_tokens: int = 256
    waiting: int = 32
    kept_bytes: int = 1_500_000_000


LIMITS = Limits()


# Nobody is there to read it; the number is the one that servers write into their logs.
GONE = 499


class RefusedError(Exception):
    """A request that is not answered, with the reason in a sentence.

    >>> RefusedError(404, "There is nothing at /attic.").status
    404
    """

    def __init__(self, status: int, sentence: str) -> None:
        super().__init__(sentence)
        self.status = status
        self.sentence = sentence


class LeftError(Exception):
    """Whoever asked has gone; the work is dropped."""


How = Literal["zero", "mean"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Pixels:
    """An image as the page drew it: rows of red, green and blue, a byte each."""

    width: int
    height: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Edit:
    """Heads that are switched off, and heads whose output comes from another text."""

    off: tuple[Head, ...] = ()
    how: How = "zero"
    patched: tuple[Head, ...] = ()
    source: str | None = None

    @property
    def empty(self) -> bool:
        return not (self.off or self.patched)


def parse(body: bytes) -> "Asked":
    """The object that a body holds.

    >>> parse(b'{"model": "house-gpt"}').word("model")
    'house-gpt'
    """
    try:
        found = json.loads(body.decode("utf-8"), parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        raise RefusedError(400, f"The body is no JSON: {_short(str(error))}.") from None
    if not isinstance(found, dict):
        raise RefusedError(400, "The body is no JSON object: send one, as in {}.")
    return Asked(found)


class Asked:
    """The fields of one request; each is read by what it must be."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def allow(self, *names: str) -> "Asked":
        """Refuse fields that nobody reads, which are mistakes more often than not."""
        for name in self._fields:
            if name not in names:
                known = ", ".join(names)
                raise InputError(f"there is no field {_short(name)!r} here", f"use {known}")
        return self

    def word(self, name: str) -> str:
        value = self._get(name)
        if not isinstance(value, str) or not value or len(value) > 1000:
            raise InputError(f"{name} is {_told(value)}", "give a short string")
        return value

    def text(self, name: str = "text") -> str:
        value = self._get(name)
        if not isinstance(value, str):
            raise InputError(f"{name} is {_told(value)}", "give a string")
        if len(value) > LIMITS.letters:
            raise InputError(
                f"{name} has {len(value):,} characters", f"give at most {LIMITS.letters:,}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{name} holds half a character at {error.start}", "send whole ones"
            ) from None
        return value

    def number(self, name: str, least: int, most: int, default: int | None = None) -> int:
        value = self._fields.get(name, default)
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most:
            raise InputError(
                f"{name} is {_told(value)}", f"give a whole number from {least:,} to {most:,}"
            )
        return value

    def real(self, name: str, least: float, most: float, default: float) -> float:
        value = self._fields.get(name, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise InputError(f"{name} is {_told(value)}", f"give {least} to {most}")
        if not (math.isfinite(value) and least <= value <= most):
            raise InputError(f"{name}={_told(value)} is out of bounds", f"use {least} to {most}")
        return float(value)

    def span(self, name: str, length: int, most: int) -> range:
        """A run of places within a text."""
        value = self._get(name)
        sound = isinstance(value, list) and len(value) == 2 and all(map(_whole, value))
        if not sound or not 0 <= value[0] < value[1] <= length:
            raise InputError(
                f"{name} is {_told(value)}", f"give [start, stop] within 0 to {length:,}"
            )
        if value[1] - value[0] > most:
            raise InputError(f"{name} spans {value[1] - value[0]:,}", f"ask for {most:,} at most")
        return range(value[0], value[1])

    def heads(self, name: str = "heads", most: int = LIMITS.heads) -> tuple[Head, ...]:
        value = self._fields.get(name, [])
        if not isinstance(value, list) or not all(isinstance(each, str) for each in value):
            raise InputError(f"{name} is {_told(value)}", 'give addresses, as in ["L5H1"]')
        if len(value) > most:
            raise InputError(f"{name} names {len(value)} heads", f"name {most} at most")
        return tuple(dict.fromkeys(_head(each) for each in value))

    def edit(self) -> Edit:
        value = self._fields.get("edit", {})
        if not isinstance(value, dict):
            raise InputError(f"edit is {_told(value)}", "give an object, as in {}")
        inner = Asked(value).allow("off", "how", "patched", "source")
        how = value.get("how", "zero")
        if how not in ("zero", "mean"):
            raise InputError(f"how is {_told(how)}", 'use "zero" or "mean"')
        patched = inner.heads("patched", LIMITS.switched)
        source = inner.text("source") if patched else None
        off = inner.heads("off", LIMITS.switched)
        # Said in one order, so that the same wish is known again.
        return Edit(
            off=tuple(sorted(off)),
            how=cast(How, how),
            patched=tuple(sorted(set(patched) - set(off))),
            source=source,
        )

    def pixels(self) -> Pixels | None:
        """The image, where one was sent instead of a text."""
        value = self._fields.get("image")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise InputError(f"image is {_told(value)}", "give width, height and data")
        inner = Asked(value).allow("width", "height", "data")
        width, height = (inner.number(side, 1, 1024) for side in ("width", "height"))
        data = value.get("data")
        try:
            raw = b64decode(data, validate=True) if isinstance(data, str) else b""
        except (NotBase64, ValueError):
            raise InputError("the data of the image is no base64", "encode its bytes") from None
        if len(raw) != width * height * 3:
            raise InputError(
                f"the image has {len(raw):,} bytes",
                f"give {width} x {height} pixels of 3 bytes, {width * height * 3:,} in all",
            )
        return Pixels(width=width, height=height, data=raw)

    def _get(self, name: str) -> Any:
        if name not in self._fields:
            raise InputError(f"{name} is missing", "send it")
        return self._fields[name]


def _head(text: str) -> Head:
    # A number of many digits is no layer, and int() would refuse it in other words.
    return Head.parse(text if len(text) < 16 else f"{text[:16]}…")


def _whole(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _told(value: object) -> str:
    return _short(json.dumps(value, ensure_ascii=True))


def _short(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _no_constant(name: str) -> float:
    raise ValueError(f"{name} is no number")
