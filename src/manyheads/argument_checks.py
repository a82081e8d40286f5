"""The arguments of public functions, checked against their annotations before any work."""

import math
from collections.abc import Callable, Collection, Iterable
from functools import wraps
from inspect import Parameter, signature
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from typing import Any, TypeVar, cast

from manyheads.annotations import Annotation, Range, annotations_of, read_annotation
from manyheads.errors import ArgumentError, short_repr

Function = TypeVar("Function", bound=Callable[..., Any])
Config = TypeVar("Config")

# What a seed may be everywhere: torch takes 64 bits with a sign, numpy no negative numbers.
MAX_SEED = 2**63


def checked(function: Function) -> Function:
    """The function, with an ArgumentError for the first argument that does not fit its annotation.

    Only what can be said of a value without the others is checked here: that a count is an integer
    of its range, a name one of those allowed, a rate a number.
    """
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError:
            # Python's own words for a missing or unknown argument.
            return function(*args, **kwargs)
        annotations = _annotations(function)
        for name, value in bound.arguments.items():
            if name in annotations:
                various = parameters.parameters[name].kind is Parameter.VAR_POSITIONAL
                for item in value if various else (value,):
                    _check(name, item, annotations[name])
                if isinstance(value, Integral) and not isinstance(value, int):
                    # An integer of NumPy, which random generators do not take.
                    bound.arguments[name] = int(value)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def check_fields(kind: type[Config]) -> type[Config]:
    """The dataclass, with an ArgumentError for the first field that does not fit its annotation.

    >>> from dataclasses import dataclass
    >>> from typing import Annotated
    >>> from manyheads.annotations import AtLeast
    >>> @check_fields
    ... @dataclass(frozen=True)
    ... class Grid:
    ...     rows: Annotated[int, AtLeast(1)]
    >>> Grid(0)
    Traceback (most recent call last):
    manyheads.errors.ArgumentError: rows must be at least 1, got 0.
    """
    initialize = kind.__init__
    parameters = signature(initialize)

    @wraps(initialize)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            values = parameters.bind(self, *args, **kwargs).arguments
        except TypeError:
            return initialize(self, *args, **kwargs)
        annotations = _annotations(kind)
        for name, value in values.items():
            if name in annotations:
                _check_value(name, value, annotations[name])
        return initialize(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def check_argument(name: str, value: object, hint: Any) -> None:
    """
    >>> check_argument("top_k", 2.5, int | None)
    Traceback (most recent call last):
    manyheads.errors.ArgumentError: top_k must be an integer or None, got 2.5.
    """
    _check(name, value, read_annotation(hint))


def _check(name: str, value: object, annotation: Annotation) -> None:
    _check_value(name, value, annotation)
    if name == "seed" and isinstance(value, Integral) and not 0 <= int(value) < MAX_SEED:
        raise ArgumentError(f"seed must be in 0 to {MAX_SEED - 1}, got {value}")


def _check_value(name: str, value: object, annotation: Annotation) -> None:
    if not _fits(value, annotation):
        raise ArgumentError(f"{name} must be {_words(annotation)}, got {short_repr(value)}")
    if broken := _broken_range(value, annotation):
        limits, number = broken
        raise ArgumentError(f"{name} must be {limits}, got {number}", limits.remedy)


def _annotations(owner: Any) -> dict[str, Annotation]:
    try:
        return annotations_of(owner)
    except NameError:
        # An annotation that only type checkers can resolve.
        return {}


def _fits(value: Any, annotation: Annotation) -> bool:
    """Whether a value is of the annotated type; unknown kinds of annotations fit everything."""
    items = annotation.items
    match annotation.form:
        case "union":
            if isinstance(value, str) and any(item.hint is Path for item in items):
                return _fits_class(value, Path)
            return any(_fits(value, item) for item in items)
        case "literal":
            return annotation.is_choice(value)
        case "callable":
            return callable(value)
        case "mapping":
            return isinstance(value, annotation.kind) and all(
                _fits(key, items[0]) and _fits(item, items[1]) for key, item in value.items()
            )
        case "sequence" | "tuple":
            return _fits_sequence(value, annotation)
        case "none":
            return value is None
        case "class":
            return _fits_class(value, annotation.kind)
    return True


def _fits_class(value: Any, kind: type) -> bool:
    if kind in (bool, str):
        return isinstance(value, kind)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not _is_nan(value)
    if issubclass(kind, Path):
        return isinstance(value, PathLike | str) and "\0" not in str(fspath(value))
    if hasattr(kind, "copy_provenance"):
        # A model of `transformers` that was wrapped stands for any of ours.
        wrapped = hasattr(value, "copy_provenance") and not getattr(value, "native", True)
        return wrapped or isinstance(value, kind)
    # A tensor of any shape and dtype: the function says what is wrong with it.
    kind = getattr(kind, "array_type", kind)
    try:
        return getattr(kind, "_is_protocol", False) or isinstance(value, kind)
    except TypeError:
        # A class that knows no instances.
        return True


def _fits_sequence(value: Any, annotation: Annotation) -> bool:
    # A list does where a tuple is meant.
    kinds: Any = (list, tuple) if annotation.kind is tuple else annotation.kind
    if isinstance(value, str | bytes) or not isinstance(value, kinds):
        return False
    if annotation.form == "tuple":
        return len(value) == len(annotation.items) and all(map(_fits, value, annotation.items))
    if annotation.kind is Iterable and not isinstance(value, Collection):
        # An iterator could be read only once.
        return True
    return all(_fits(item, annotation.items[0]) for item in value)


def _broken_range(value: Any, annotation: Annotation) -> tuple[Range, object] | None:
    """The first range that a number of this value is outside of, and the number."""
    if isinstance(value, Real) and not isinstance(value, bool):
        try:
            number = float(value)
        except OverflowError:
            number = math.inf if cast(Any, value) > 0 else -math.inf
        for limits in annotation.ranges:
            if not limits.allows(number):
                return limits, short_repr(value)
    if annotation.form == "union":
        broken = [_broken_range(value, item) for item in annotation.items if _fits(value, item)]
        return broken[0] if broken and all(broken) else None
    if annotation.form in ("sequence", "tuple") and isinstance(value, list | tuple):
        items = annotation.items if annotation.form == "tuple" else annotation.items * len(value)
        return next(filter(None, map(_broken_range, value, items)), None)
    return None


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(value)
    except OverflowError:
        return False


NAMES = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
PLURALS = {int: " of integers", float: " of numbers", str: " of strings"}


def _words(annotation: Annotation) -> str:
    """An annotation in words.

    >>> from typing import Literal
    >>> hints = int | None, Literal["zero", "mean"], list[int]
    >>> [_words(read_annotation(hint)) for hint in hints]
    ['an integer or None', "'zero' or 'mean'", 'a sequence of integers']
    """
    hint = annotation.hint
    match annotation.form:
        case "union":
            models = [item for item in annotation.items if hasattr(item.hint, "copy_provenance")]
            several = ["a model"] if len(models) > 1 else []
            words = [_words(item) for item in annotation.items if not several or item not in models]
            return " or ".join(dict.fromkeys([*several, *words]))
        case "literal":
            return " or ".join(map(repr, annotation.values))
        case "sequence" | "tuple":
            return "a sequence" + PLURALS.get(annotation.items[0].hint, "")
        case "mapping":
            return "a mapping"
        case "none":
            return "None"
        case "class" if issubclass(hint, Path):
            return "a path"
        case "class" if hasattr(hint, "copy_provenance"):
            return f"a model of type {hint.__name__}"
    return NAMES.get(hint, getattr(hint, "__name__", str(hint)))
