"""Requests of the page: JSON fields, checked one by one before any model runs."""

import json
import math
from base64 import b64decode
from binascii import Error as Base64Error
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar, cast

from manyheads.errors import InputError
from manyheads.lens.results.addresses import find_heads, head_names
from manyheads.models.build import Model
from manyheads.taps import Head

# The status that servers log for a client that has disconnected.
CLIENT_CLOSED_REQUEST = 499


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of a single request; `queued` and `cache_bytes` are those of all requests together.

    >>> LIMITS.tokens >= 8192
    True
    """

    body_bytes: int = 4_000_000
    body_seconds: float = 30.0
    header_seconds: float = 10.0
    connections_per_address: int = 64
    characters: int = 400_000
    tokens: int = 16_384
    heads: int = 12
    edited_heads: int = 4096
    top_k: int = 64
    rows: int = 256
    cells: int = 512
    max_new_tokens: int = 512
    temperature: float = 5.0
    predictions: int = 20
    # Statistics need every pair of tokens in every head, so they use the beginning of a long text.
    statistics_tokens: int = 2048
    # As `lens.kinds` by default, so that both give the same labels; fewer for a large model.
    large_parameters: int = 50_000_000
    # Patching runs the model once per head, or once per layer and token.
    patching_tokens: int = 256
    # The worth of heads too, though only from the layer of a head on.
    worth_tokens: int = 1024
    # Attribution records every layer at every token.
    attribution_tokens: int = 1024
    cut_links: int = 64
    circuit_edges: int = 1000
    queued: int = 32
    cache_bytes: int = 1_500_000_000


LIMITS = Limits()


class RequestError(Exception):
    """A request that is refused, with its HTTP status and the reason.

    >>> RequestError(404, "There is nothing at this address.").status
    404
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status
        self.message = message


class DisconnectedError(Exception):
    """The client has disconnected, and its work is dropped."""


ReplaceWith = Literal["zero", "mean"]
REPLACEMENTS: tuple[ReplaceWith, ...] = ("zero", "mean")
Option = TypeVar("Option", bound=str)


@dataclass(frozen=True, slots=True, kw_only=True)
class RawImage:
    """The pixels of an image in rows of red, green and blue, one byte each."""

    width: int
    height: int
    data: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadEdits:
    """Heads that are ablated, heads patched from another text, and attention links that are cut.

    A link is a head, a query and a key.
    """

    ablated: tuple[Head, ...] = ()
    replace_with: ReplaceWith = "zero"
    patched: tuple[Head, ...] = ()
    source: str | None = None
    links: tuple[tuple[Head, int, int], ...] = ()

    @property
    def empty(self) -> bool:
        return not (self.ablated or self.patched or self.links)

    @property
    def layers(self) -> frozenset[int]:
        """The layers with edits."""
        linked = (head for head, _, _ in self.links)
        return frozenset(head.layer for head in (*self.ablated, *self.patched, *linked))


def parse_body(body: bytes) -> "RequestBody":
    """Parse the JSON object of a request.

    >>> parse_body(b'{"model": "house-gpt"}').name("model")
    'house-gpt'
    """
    try:
        fields = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise RequestError(400, f"The body is not valid JSON: {_shorten(str(error))}.") from None
    if not isinstance(fields, dict):
        raise RequestError(400, "The body must be a JSON object, as in {}.")
    return RequestBody(fields)


class RequestBody:
    """The fields of a request, each read by its type."""

    def __init__(self, fields: Mapping[str, Any]) -> None:
        self._fields = fields

    def check_fields(self, *names: str) -> "RequestBody":
        """Raise an InputError for an unknown field."""
        for name in self._fields:
            if name not in names:
                raise InputError(f"unknown field {_shorten(name)!r}", f"use {', '.join(names)}")
        return self

    def name(self, field: str) -> str:
        value = self._get(field)
        if not isinstance(value, str) or not value or len(value) > 1000:
            raise _wrong(field, "a short string", value)
        return value

    def text(self, field: str = "text") -> str:
        value = self._get(field)
        if not isinstance(value, str):
            raise _wrong(field, "a string", value)
        if len(value) > LIMITS.characters:
            raise InputError(
                f"{field} has {len(value):,} characters", f"send at most {LIMITS.characters:,}"
            )
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise InputError(
                f"{field} has an incomplete character at {error.start}", "send valid Unicode"
            ) from None
        return value

    def flag(self, field: str, default: bool = False) -> bool:
        value = self._fields.get(field, default)
        if not isinstance(value, bool):
            raise _wrong(field, "true or false", value)
        return value

    def choice(self, field: str, options: Sequence[Option]) -> Option:
        """One of some words, by default the first."""
        value = self._fields.get(field, options[0])
        if value not in options:
            raise _wrong(field, " or ".join(f'"{option}"' for option in options), value)
        return cast(Option, value)

    def integer(self, field: str, minimum: int, maximum: int, default: int | None = None) -> int:
        value = self._fields.get(field, default)
        if not _is_integer(value) or not minimum <= cast(int, value) <= maximum:
            raise _wrong(field, f"an integer from {minimum:,} to {maximum:,}", value)
        return cast(int, value)

    def number(self, field: str, minimum: float, maximum: float, default: float) -> float:
        value = self._fields.get(field, default)
        sound = isinstance(value, int | float) and not isinstance(value, bool)
        if not (sound and math.isfinite(value) and minimum <= value <= maximum):
            raise _wrong(field, f"a number from {minimum} to {maximum}", value)
        return float(value)

    def span(self, field: str, length: int, max_length: int) -> range:
        """A range of positions within a text."""
        value = self._get(field)
        sound = isinstance(value, list) and len(value) == 2 and all(map(_is_integer, value))
        if not sound or not 0 <= value[0] < value[1] <= length:
            raise _wrong(field, f"[start, stop] within 0 and {length:,}", value)
        if value[1] - value[0] > max_length:
            raise InputError(
                f"{field} spans {value[1] - value[0]:,} tokens", f"use at most {max_length:,}"
            )
        return range(value[0], value[1])

    def heads(
        self, model: Model, field: str = "heads", max_heads: int = LIMITS.heads
    ) -> tuple[Head, ...]:
        """The heads of a model that the request names."""
        value = self._fields.get(field, [])
        if isinstance(value, str):
            value = [value]
        if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
            raise _wrong(field, 'a list of heads, as in ["L5H1"]', value)
        names = head_names(value)
        heads = find_heads(model, names) if len(names) <= max_heads else ()
        count = max(len(names), len(heads))
        if count > max_heads:
            raise InputError(f"{field} has {count} heads", f"use at most {max_heads}")
        return tuple(address.head for address in heads)

    def objects(self, field: str, count: int) -> list["RequestBody"]:
        """A list of so many objects, each with fields of its own."""
        value = self._get(field)
        if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
            raise _wrong(field, "a list of objects", value)
        if len(value) != count:
            raise InputError(f"{field} has {len(value)} objects", f"send {count}")
        return [RequestBody(item) for item in value]

    def edits(self, model: Model) -> HeadEdits:
        value = self._fields.get("edits", {})
        if not isinstance(value, dict):
            raise _wrong("edits", "an object, as in {}", value)
        inner = RequestBody(value).check_fields(
            "ablated", "replace_with", "patched", "source", "links"
        )
        patched = inner.heads(model, "patched", LIMITS.edited_heads)
        source = inner.text("source") if patched else None
        ablated = inner.heads(model, "ablated", LIMITS.edited_heads)
        # Sorted, so that the same edits have the same key in the cache.
        return HeadEdits(
            ablated=tuple(sorted(ablated)),
            replace_with=inner.choice("replace_with", REPLACEMENTS),
            patched=tuple(sorted(set(patched) - set(ablated))),
            source=source,
            links=inner._links(model),
        )

    def _links(self, model: Model) -> tuple[tuple[Head, int, int], ...]:
        value = self._fields.get("links", [])
        if not isinstance(value, list) or not all(map(_is_link, value)):
            raise _wrong("links", 'a list of links, as in [["L5H1", 7, 2]]', value)
        if len(value) > LIMITS.cut_links:
            raise InputError(f"{len(value)} links are cut", f"cut at most {LIMITS.cut_links}")
        links = {
            (address.head, query, key)
            for name, query, key in value
            for address in find_heads(model, [name])
        }
        return tuple(sorted(links))

    def edges(self) -> list[tuple[str, str]]:
        """The edges of a circuit: writers and readers by name."""
        value = self._get("edges")
        if not isinstance(value, list) or not all(map(_is_edge, value)):
            raise _wrong("edges", 'a list of edges, as in [["L0H3", "L2H1 key"]]', value)
        if len(value) > LIMITS.circuit_edges:
            raise InputError(
                f"the circuit has {len(value):,} edges", f"send at most {LIMITS.circuit_edges:,}"
            )
        return [(writer, reader) for writer, reader in value]

    def token(self, field: str) -> int | str | None:
        """A token or class by its number or as a word; None if the request leaves it out."""
        value = self._fields.get(field)
        if value is None or _is_integer(value):
            return cast(int | None, value)
        return self.name(field)

    def image(self) -> RawImage | None:
        """The image, if the request has one instead of a text."""
        value = self._fields.get("image")
        if value is None:
            return None
        if not isinstance(value, dict):
            raise _wrong("image", "an object of width, height and data", value)
        inner = RequestBody(value).check_fields("width", "height", "data")
        width, height = (inner.integer(side, 1, 1024) for side in ("width", "height"))
        data = value.get("data")
        try:
            raw = b64decode(data, validate=True) if isinstance(data, str) else b""
        except (Base64Error, ValueError):
            raise InputError("the image data is not valid base64", "encode its bytes") from None
        if len(raw) != width * height * 3:
            raise InputError(
                f"the image has {len(raw):,} bytes",
                f"send {width} x {height} pixels of 3 bytes, {width * height * 3:,} in total",
            )
        return RawImage(width=width, height=height, data=raw)

    def _get(self, field: str) -> Any:
        if field not in self._fields:
            raise InputError(f"{field} is missing", "send it")
        return self._fields[field]


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_link(value: object) -> bool:
    match value:
        case [str(), int() as query, int() as key]:
            return _is_integer(query) and _is_integer(key) and min(query, key) >= 0
    return False


def _is_edge(value: object) -> bool:
    match value:
        case [str(), str()]:
            return True
    return False


def _wrong(field: str, expected: str, value: object) -> InputError:
    got = _shorten(json.dumps(value, ensure_ascii=True))
    return InputError(f"{field} must be {expected}, got {got}", "change it")


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"{text[:79]}…"


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a number in JSON")
