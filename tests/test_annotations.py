"""Annotations read as data, and the ranges of numbers."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Generic, Literal, TypeVar

import pytest

from manyheads.annotations import (
    Above,
    AtLeast,
    Between,
    PositiveInt,
    Probability,
    Range,
    annotations_of,
    read_annotation,
)
from manyheads.argument_checks import check_fields, checked
from manyheads.errors import ArgumentError
from tests.messages import refuses

Inner = TypeVar("Inner")


@dataclass(frozen=True)
class Box(Generic[Inner]):
    inner: Inner
    count: PositiveInt = 1


@pytest.mark.parametrize(
    ("hint", "form"),
    [
        (Any, "any"),
        (object, "any"),
        (None, "none"),
        (int | None, "union"),
        (Literal["a", 1], "literal"),
        (tuple[int, ...], "sequence"),
        (list[int], "sequence"),
        (Iterable[str], "sequence"),
        (tuple[int, str], "tuple"),
        (Mapping[str, int], "mapping"),
        (dict[str, int], "mapping"),
        (Callable[[int], str], "callable"),
        (int, "class"),
        (Box, "class"),
        (Box[int], "other"),
        (Annotated[int, AtLeast(1)], "class"),
    ],
)
def test_every_annotation_has_one_form(hint: Any, form: str) -> None:
    assert read_annotation(hint).form == form


def test_members_of_a_union_stay_in_order() -> None:
    assert [member.hint for member in read_annotation(str | int).members] == [str, int]
    assert [member.hint for member in read_annotation(int | str).members] == [int, str]


def test_a_choice_has_the_type_of_the_literal() -> None:
    literal = read_annotation(Literal[1, "one"])
    assert [literal.is_choice(value) for value in (1, True, 1.0, "one")] == [
        True,
        False,
        False,
        True,
    ]


def test_the_parameter_of_a_generic_class_takes_the_place_of_its_variable() -> None:
    assert annotations_of(Box[str])["inner"].hint is str
    assert annotations_of(Box[str])["count"].ranges == (AtLeast(1),)


@pytest.mark.parametrize(
    ("limits", "inside", "outside"),
    [
        (AtLeast(1), (1, 2.5), (0, 0.99, math.inf, math.nan)),
        (Above(0), (0.1,), (0, -1, math.inf, math.nan)),
        (Between(0, 1), (0, 1), (-0.1, 1.1, math.nan)),
        (Between(0, 1, "(]"), (0.1, 1), (0, math.nan)),
        (Between(0, 1, "[)"), (0, 0.9), (1, math.inf)),
    ],
)
def test_ranges_allow_what_is_inside(
    limits: Range, inside: tuple[float, ...], outside: tuple[float, ...]
) -> None:
    assert all(limits.allows(value) for value in inside)
    assert not any(limits.allows(value) for value in outside)


@check_fields
@dataclass(frozen=True)
class Settings:
    size: PositiveInt | Literal["even"] = "even"
    shares: tuple[Probability, ...] = ()
    limit: Annotated[float, Above(0, "use None for no limit")] | None = None


def test_fields_outside_their_range_are_refused_with_the_remedy_of_the_range() -> None:
    assert Settings(size=3, shares=(0, 0.5), limit=None).size == 3
    with refuses(ArgumentError, "size must be at least 1, got 0"):
        Settings(size=0)
    with refuses(ArgumentError, "shares must be in [0, 1], got 1.5"):
        Settings(shares=(0.5, 1.5))
    with refuses(ArgumentError, "limit must be above 0, got -1", "use None for no limit"):
        Settings(limit=-1)


def test_arguments_outside_their_range_are_refused() -> None:
    @checked
    def repeat(count: PositiveInt) -> int:
        return count

    assert repeat(2) == 2
    with refuses(ArgumentError, "count must be at least 1, got 0"):
        repeat(0)
