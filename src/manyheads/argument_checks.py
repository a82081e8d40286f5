"""The arguments of public functions, checked against their annotations before any work."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import is_dataclass
from functools import cache, wraps
from inspect import Parameter, isfunction, signature
from numbers import Integral, Real
from os import PathLike, fspath
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from manyheads.errors import ArgumentError, short_repr

Function = TypeVar("Function", bound=Callable[..., Any])
Config = TypeVar("Config")

# What a seed may be everywhere: torch takes 64 bits with a sign, numpy no negative numbers.
MAX_SEED = 2**63


def checked_functions(names: Mapping[str, Any]) -> dict[str, Any]:
    """The functions among these, each refusing arguments that do not fit its annotations."""
    return {name: checked(each) for name, each in names.items() if isfunction(each)}


def checked(function: Function) -> Function:
    """The function, with an ArgumentError for the first argument that does not fit its annotation.

    Only what can be said of a value without the others is checked here: that a count is an integer,
    a name one of those allowed, a rate a number. Ranges are the function's own matter.
    """
    parameters = signature(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = parameters.bind(*args, **kwargs)
        except TypeError:
            # Python's own words for a missing or unknown argument.
            return function(*args, **kwargs)
        hints = _hints(function)
        for name, value in bound.arguments.items():
            if name in hints:
                various = parameters.parameters[name].kind is Parameter.VAR_POSITIONAL
                for each in value if various else (value,):
                    check_argument(name, each, hints[name])
                if isinstance(value, Integral) and not isinstance(value, int):
                    # An integer of NumPy, which random generators do not take.
                    bound.arguments[name] = int(value)
        return function(*bound.args, **bound.kwargs)

    return call  # type: ignore[return-value]


def check_fields(kind: type[Config]) -> type[Config]:
    """The dataclass, with an ArgumentError for the first field that does not fit its annotation."""
    initialize = kind.__init__
    parameters = signature(initialize)

    @wraps(initialize)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        try:
            given = parameters.bind(self, *args, **kwargs).arguments
        except TypeError:
            return initialize(self, *args, **kwargs)
        known: Any = kind
        hints = _hints(known)
        for name, value in given.items():
            if name in hints and not _fits(value, hints[name]):
                problem = f"{name} must be {_words(hints[name])}, got {short_repr(value)}"
                raise ArgumentError(problem)
        return initialize(self, *args, **kwargs)

    kind.__init__ = init  # type: ignore[method-assign]
    return kind


def check_fields_of(names: Mapping[str, Any]) -> None:
    """Check the fields of every dataclass among these."""
    for each in names.values():
        if isinstance(each, type) and is_dataclass(each):
            check_fields(each)


def check_argument(name: str, value: object, hint: Any) -> None:
    """
    >>> check_argument("top_k", 2.5, int | None)
    Traceback (most recent call last):
    manyheads.errors.ArgumentError: top_k must be an integer or None, got 2.5.
    """
    if not _fits(value, hint):
        raise ArgumentError(f"{name} must be {_words(hint)}, got {short_repr(value)}")
    if name == "seed" and isinstance(value, Integral) and not 0 <= int(value) < MAX_SEED:
        raise ArgumentError(f"seed must be in 0 to {MAX_SEED - 1}, got {value}")


@cache
def _hints(function: Any) -> dict[str, Any]:
    """The annotations of a function, or of the fields of a class."""
    try:
        return get_type_hints(function)
    except NameError:
        # An annotation that only type checkers can resolve.
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value fits an annotation; unknown kinds of annotations fit everything."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        if Path in inner and isinstance(value, str):
            return _fits_class(value, Path)
        return any(_fits(value, each) for each in inner)
    if origin is Literal:
        return any(type(value) is type(each) and value == each for each in inner)
    if origin is Callable:
        return callable(value)
    if origin in (Sequence, list, tuple, Iterable, Mapping, dict):
        return _fits_container(value, origin, inner)
    if hint in (None, NoneType):
        return value is None
    if isinstance(hint, TypeVar):
        options = hint.__constraints__ or (hint.__bound__ or Any,)
        return any(_fits(value, each) for each in options)
    if hint is Any:
        return True
    return not isinstance(hint, type) or origin is not None or _fits_class(value, hint)


def _fits_class(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, bool)
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not _is_nan(value)
    if kind is str:
        return isinstance(value, str)
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


def _fits_container(value: Any, origin: Any, inner: tuple[Any, ...]) -> bool:
    # A list does where a tuple is meant.
    kinds: Any = (list, tuple) if origin is tuple else origin
    if isinstance(value, str | bytes) or not isinstance(value, kinds):
        return False
    if isinstance(value, Mapping) and origin in (Mapping, dict):
        return all(_fits(key, inner[0]) and _fits(each, inner[1]) for key, each in value.items())
    if not inner or (origin is Iterable and not isinstance(value, Collection)):
        # An iterator could be read only once.
        return True
    if origin is tuple and inner[-1] is not ...:
        return len(value) == len(inner) and all(map(_fits, value, inner))
    return all(_fits(each, inner[0]) for each in value)


def _is_nan(value: Any) -> bool:
    try:
        return math.isnan(value)
    except OverflowError:
        return False


def _words(hint: Any) -> str:
    """An annotation in words.

    >>> _words(int | None), _words(Literal["zero", "mean"]), _words(Sequence[int])
    ('an integer or None', "'zero' or 'mean'", 'a sequence of integers')
    """
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        models = [each for each in inner if hasattr(each, "copy_provenance")]
        words = [_words(each) for each in inner if len(models) < 2 or each not in models]
        return " or ".join(dict.fromkeys([*(["a model"] if len(models) > 1 else []), *words]))
    if origin is Literal:
        return " or ".join(map(repr, inner))
    names = {bool: "True or False", int: "an integer", float: "a number", str: "a string"}
    if origin in (Sequence, list, tuple, Iterable):
        plural = {int: " of integers", float: " of numbers", str: " of strings"}
        return "a sequence" + (plural.get(inner[0], "") if inner else "")
    if origin in (Mapping, dict):
        return "a mapping"
    if hint in (None, NoneType):
        return "None"
    if isinstance(hint, TypeVar):
        return " or ".join(dict.fromkeys(map(_words, hint.__constraints__ or (hint.__bound__,))))
    if isinstance(hint, type) and issubclass(hint, Path):
        return "a path"
    if hasattr(hint, "copy_provenance"):
        return f"a model of type {hint.__name__}"
    return names.get(hint, getattr(hint, "__name__", str(hint)))
