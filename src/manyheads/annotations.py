"""Annotations as data: what a field or an argument may hold, and the ranges of numbers.

One reader for all who go by annotations: the checks of arguments, the codec of files, the results
of the lens and the options of the command line.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

Form = Literal[
    "any",
    "none",
    "union",
    "literal",
    # Items of one kind in any number; a tuple has a fixed number, each of its own kind.
    "sequence",
    "tuple",
    "mapping",
    "callable",
    "class",
    # Annotations that are not read further, such as a generic class with its parameters.
    "other",
]


@dataclass(frozen=True, slots=True)
class AtLeast:
    """A finite number of at least `minimum`, as in `Annotated[int, AtLeast(1)]`."""

    minimum: int | float
    remedy: str = ""

    def __str__(self) -> str:
        return f"at least {self.minimum}"

    def allows(self, value: int | float) -> bool:
        return self.minimum <= value < math.inf


@dataclass(frozen=True, slots=True)
class Above:
    """A finite number above `limit`."""

    limit: int | float
    remedy: str = ""

    def __str__(self) -> str:
        return f"above {self.limit}"

    def allows(self, value: int | float) -> bool:
        return self.limit < value < math.inf


@dataclass(frozen=True, slots=True)
class Between:
    """A number of an interval, whose `ends` are part of it at a square bracket.

    >>> str(Between(0, 1, "(]")), Between(0, 1, "(]").allows(0), Between(0, 1, "(]").allows(1)
    ('in (0, 1]', False, True)
    """

    low: int | float
    high: int | float
    ends: Literal["[]", "(]", "[)", "()"] = "[]"
    remedy: str = ""

    def __str__(self) -> str:
        return f"in {self.ends[0]}{self.low}, {self.high}{self.ends[1]}"

    def allows(self, value: int | float) -> bool:
        above = self.low <= value if self.ends[0] == "[" else self.low < value
        return above and (value <= self.high if self.ends[1] == "]" else value < self.high)


Range = AtLeast | Above | Between
PositiveInt = Annotated[int, AtLeast(1)]
NonNegativeInt = Annotated[int, AtLeast(0)]
PositiveFloat = Annotated[float, Above(0)]
NonNegativeFloat = Annotated[float, AtLeast(0)]
# A share that is not nothing, such as top_p.
Share = Annotated[float, Between(0, 1, "(]")]
Probability = Annotated[float, Between(0, 1)]
DropoutRate = Annotated[float, Between(0, 1, "[)")]


@dataclass(frozen=True, slots=True)
class Annotation:
    """One annotation: its `form`, its `kind` (a class, or that of the container) and its `items`.

    The items of a union are its members, those of a mapping its keys and values. `values` are the
    choices of a Literal, and `extras` what `Annotated` adds. `hint` is the annotation without it.
    """

    form: Form
    hint: Any
    kind: Any = object
    items: "tuple[Annotation, ...]" = ()
    values: tuple[Any, ...] = ()
    extras: tuple[Any, ...] = ()

    @property
    def members(self) -> "tuple[Annotation, ...]":
        """Those of a union, otherwise the annotation alone."""
        return self.items if self.form == "union" else (self,)

    @property
    def ranges(self) -> tuple[Range, ...]:
        return tuple(extra for extra in self.extras if isinstance(extra, Range))

    def is_choice(self, value: object) -> bool:
        """Whether a value is one of a Literal; True is not 1."""
        return any(type(value) is type(choice) and value == choice for choice in self.values)


def read_annotation(hint: Any) -> Annotation:
    """
    >>> read = read_annotation(tuple[int, ...] | Literal["all"])
    >>> read.form, [member.form for member in read.members]
    ('union', ['sequence', 'literal'])
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin is Annotated:
        read = read_annotation(inner[0])
        return replace(read, extras=(*read.extras, *inner[1:]))
    if hint is Any or hint is object:
        return Annotation("any", hint)
    if hint is None or hint is NoneType:
        return Annotation("none", NoneType)
    if isinstance(hint, TypeVar):
        members = hint.__constraints__ or (hint.__bound__ or Any,)
        return Annotation("union", hint, items=_read_all(members))
    if origin in (Union, UnionType):
        return Annotation("union", hint, items=_read_all(inner))
    if origin is Literal:
        return Annotation("literal", hint, values=inner)
    if origin is Callable:
        return Annotation("callable", hint)
    if origin is tuple and inner[1:] != (...,):
        return Annotation("tuple", hint, tuple, _read_all(inner))
    if origin in (tuple, list, Sequence, Iterable):
        return Annotation("sequence", hint, origin, _read_all(inner[:1]))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Annotation("mapping", hint, origin, _read_all(inner))
    if isinstance(hint, type) and origin is None:
        return Annotation("class", hint, hint)
    return Annotation("other", hint, origin or hint)


@cache
def annotations_of(owner: Any) -> dict[str, Annotation]:
    """The annotations of a function, or of the fields of a class.

    Those of `Branch[MLP]` have MLP in place of the type variable.
    """
    origin = get_origin(owner)
    hints = get_type_hints(origin or owner, include_extras=True)
    if origin is not None:
        meaning = dict(zip(origin.__parameters__, get_args(owner), strict=True))
        hints = {name: meaning.get(hint, hint) for name, hint in hints.items()}
    return {name: read_annotation(hint) for name, hint in hints.items()}


def _read_all(hints: Iterable[Any]) -> tuple[Annotation, ...]:
    return tuple(map(read_annotation, hints))
