"""Dataclasses from plain data: what fits is decoded by its annotation, the rest is refused."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import pytest

from manyheads.dataclass_codec import DataclassCodec
from manyheads.errors import ConfigError

Inner = TypeVar("Inner")


@dataclass(frozen=True)
class Shape(ABC):
    @abstractmethod
    def area(self) -> float: ...


@dataclass(frozen=True)
class Square(Shape):
    side: float

    def __post_init__(self) -> None:
        if self.side < 0:
            raise ConfigError(f"side={self.side:g} is negative", "use 0 or more")

    def area(self) -> float:
        return self.side**2


@dataclass(frozen=True)
class LongDisk(Shape):
    radius: float = 1.0

    def area(self) -> float:
        return 3.0 * self.radius**2


@dataclass(frozen=True)
class Boxed(Generic[Inner]):
    inner: Inner
    label: str | None = None


@dataclass(frozen=True)
class Drawing:
    shape: Shape
    boxed: Boxed[Square] | None = None
    other: Square | LongDisk = LongDisk()
    sizes: tuple[int, ...] = ()
    pair: tuple[int, float] = (0, 0.0)
    mode: int | Literal["even"] = "even"
    paper: Path = Path("a4")
    notes: Mapping[str, float] = field(default_factory=dict)
    shown: bool = True


CODEC = DataclassCodec("kind", (Drawing, Boxed, Square, LongDisk))
SQUARE = {"kind": "square", "side": 2}


def decoded(**values: Any) -> Drawing:
    drawing: Drawing = CODEC.decode_table(Drawing, {"shape": SQUARE, **values}, "drawing")
    return drawing


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({}, {}),
        ({"shape": {"kind": "long-disk"}}, {"shape": LongDisk()}),
        ({"boxed": {"inner": {"side": 1}}}, {"boxed": Boxed(Square(1.0))}),
        ({"boxed": None}, {"boxed": None}),
        ({"other": {"radius": 3}}, {"other": LongDisk(3.0)}),
        ({"other": {"kind": "Square", "side": 3}}, {"other": Square(3.0)}),
        ({"sizes": [1, 2]}, {"sizes": (1, 2)}),
        ({"sizes": 1}, {"sizes": (1,)}),
        ({"pair": [1, 2]}, {"pair": (1, 2.0)}),
        ({"mode": 3}, {"mode": 3}),
        ({"paper": "a5"}, {"paper": Path("a5")}),
        ({"notes": {"a": 1}}, {"notes": {"a": 1.0}}),
    ],
)
def test_values_are_decoded_as_annotated(
    values: dict[str, Any], expected: dict[str, object]
) -> None:
    assert decoded(**values) == Drawing(**{"shape": Square(2.0), **expected})


@pytest.mark.parametrize(
    ("values", "problem", "remedy"),
    [
        ({"sizs": 1}, "drawing.sizs is not a known key", "drawing.sizes"),
        ({"shape": {}}, "drawing.shape.kind is missing", "'Square' or 'LongDisk'"),
        ({"shape": {"kind": "Disk"}}, "drawing.shape.kind is 'Disk'", "'Square' or 'LongDisk'"),
        ({"shape": {"kind": 3}}, "drawing.shape.kind is 3", "'Square'"),
        ({"shape": {"kind": "Square"}}, "drawing.shape.side is missing", "add it"),
        ({"shape": {"kind": "Square", "side": -1}}, "drawing.shape: side=-1", "0 or more"),
        ({"shape": 3}, "drawing.shape is 3", "a table"),
        ({"other": 3}, "drawing.other is 3", "a table"),
        ({"boxed": 3}, "drawing.boxed is 3", "a table"),
        ({"sizes": [1, "b"]}, "drawing.sizes.1 is 'b'", "an integer"),
        ({"sizes": True}, "drawing.sizes is True", "an integer"),
        ({"pair": [1]}, "drawing.pair is [1]", "a list of 2"),
        ({"mode": "odd"}, "drawing.mode is 'odd'", "an integer or 'even'"),
        ({"paper": 3}, "drawing.paper is 3", "a path"),
        ({"shown": 1}, "drawing.shown is 1", "true or false"),
        ({"notes": {"a": "b"}}, "drawing.notes.a is 'b'", "a number"),
    ],
)
def test_what_does_not_fit_is_refused_by_its_path(
    values: dict[str, Any], problem: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as refusal:
        decoded(**values)
    assert problem in refusal.value.problem
    assert remedy in refusal.value.remedy


def test_a_missing_table_is_refused_by_its_missing_keys() -> None:
    with pytest.raises(ConfigError, match=r"^shape\.kind is missing: use 'Square' or 'LongDisk'"):
        CODEC.decode_table(Drawing, {})


def test_known_values_are_taken_as_they_are() -> None:
    shape = Square(1.0)
    assert CODEC.decode_table(Drawing, {}, known={"shape": shape}).shape is shape


def test_what_is_encoded_is_decoded_again() -> None:
    drawing = Drawing(shape=Square(2.0), boxed=Boxed(Square(1.0), "b"), sizes=(1, 2), mode=4)
    plain = CODEC.encode(drawing) | {"paper": "a4"}
    assert plain["boxed"]["kind"] == "Boxed"
    assert CODEC.decode(Drawing, plain, "drawing") == drawing


def test_arguments_are_decoded_as_the_signature_declares() -> None:
    def draw(shape: Shape, *, times: int = 1) -> None: ...

    assert CODEC.decode_arguments(draw, {"times": 2}, "draw") == {"times": 2}
    with pytest.raises(ConfigError, match=r"draw\.tims is not a known key: use draw\.times"):
        CODEC.decode_arguments(draw, {"tims": 2}, "draw")
