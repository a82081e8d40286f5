"""What a command can be given, read from its own fields: for those who complete at the shell."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

__all__ = ["Kind", "Option", "options_of", "places_of"]

# What may follow: nothing, a file or folder, a model, one of some words, or what nobody can guess.
Kind = Literal["flag", "file", "model", "choice", "other"]

MODELS = ("MODEL", "BEFORE", "AFTER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something to give: by name, such as --out and its short form, or by place and without one."""

    names: tuple[str, ...] = ()
    metavar: str
    kind: Kind
    choices: tuple[str, ...] = ()
    repeats: bool = False


def options_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """The options of a command in its own order.

    >>> from manyheads.cli.train import Train
    >>> [option.names for option in options_of(Train)]
    [('--help', '-h'), ('--set',), ('--from',), ('--fresh',)]
    """
    asked = [field.option() for field in _fields(command) if not field.positional]
    return (Option(names=("--help", "-h"), metavar="", kind="flag"), *asked)


def places_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """What a command takes by place, the model first; the last may stand for many.

    >>> from manyheads.cli.train import Train
    >>> [(place.metavar, place.kind) for place in places_of(Train)]
    [('RUN.TOML', 'file')]
    """
    return tuple(field.option() for field in _fields(command) if field.positional)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    type: Any
    positional: bool
    appended: bool
    given_name: str | None
    metavar: str | None
    aliases: tuple[str, ...]

    def option(self) -> Option:
        kind, choices = self._kind()
        name = "--" + (self.given_name or self.name).replace("_", "-")
        return Option(
            names=() if self.positional else (name, *self.aliases),
            metavar=(self.metavar or self.name.upper()).strip("[]. "),
            kind=kind,
            choices=choices,
            repeats=self.appended or (self.positional and get_origin(self.type) is tuple),
        )

    def _kind(self) -> tuple[Kind, tuple[str, ...]]:
        metavar, inner = self.metavar or "", _bare(self.type)
        if inner is bool:
            return "flag", ()
        if get_origin(inner) is Literal:
            # A choice of several words is a default that nobody types.
            return "choice", tuple(each for each in get_args(inner) if " " not in each)
        if metavar.startswith("{"):
            return "choice", tuple(metavar.strip("{}").split(","))
        if self.positional and any(each in metavar for each in MODELS):
            return "model", ()
        if inner is Path or (self.positional and "FILE" in metavar):
            return "file", ()
        return "other", ()


def _fields(command: Callable[..., object]) -> list[_Field]:
    hints = get_type_hints(command, include_extras=True)
    return [_field(each.name, hints[each.name]) for each in fields(command)]  # type: ignore[arg-type]


def _field(name: str, hint: Any) -> _Field:
    inner, marks = (hint, ()) if get_origin(hint) is not Annotated else _split(hint)

    def told(attribute: str) -> Any:
        values = (getattr(mark, attribute, None) for mark in marks)
        return next((value for value in values if value is not None), None)

    return _Field(
        name=name,
        type=inner,
        positional=tyro.conf.Positional in marks,
        appended=any(repr(mark) == "UseAppendAction" for mark in marks),
        given_name=told("name"),
        metavar=told("metavar"),
        aliases=tuple(told("aliases") or ()),
    )


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    inner, *marks = get_args(hint)
    return inner, tuple(marks)


def _bare(kind: Any) -> Any:
    """The type without None, and of many that of each."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        return get_args(kind)[0]
    return kind
