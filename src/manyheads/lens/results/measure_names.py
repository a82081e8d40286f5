"""The names, units and meanings of measures, and how their values are written."""

import math
import tomllib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Literal

from manyheads.formatting import number, percent

Unit = Literal["percent", "nats", "tokens", "number"]


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasureInfo:
    """The label of a measure, the unit of its values and its meaning."""

    label: str
    unit: Unit
    about: str

    @property
    def title(self) -> str:
        """The label, with the unit unless the values show it."""
        return self.label if self.unit in ("percent", "number") else f"{self.label} ({self.unit})"


@cache
def describe_measure(name: str) -> MeasureInfo:
    """Look a measure up by its key.

    >>> describe_measure("max_weight").label, describe_measure("entropy").title
    ('Max weight', 'Entropy (nats)')
    >>> describe_measure("offset-4").label, describe_measure("gate_output_closed").label
    ('Offset -4', 'Closed gates, output')

    A key without an entry, such as a column of another result, is its own label.

    >>> describe_measure("copying_eigenvalues").label
    'Copying eigenvalues'
    """
    table = _table()
    if name in table:
        return table[name]
    family = _family(name)
    if family is None:
        return MeasureInfo(label=_in_words(name).capitalize(), unit="number", about="")
    start, end = family.split("*")
    info, rest = table[family], name.removeprefix(start).removesuffix(end)
    return MeasureInfo(label=info.label.format(_in_words(rest)), unit=info.unit, about=info.about)


def format_value(value: float, unit: Unit = "number", error: float = math.nan) -> str:
    """Format a value for a table, with its standard error unless that is NaN.

    >>> format_value(0.1234, "percent", 0.021), format_value(2.5, "nats", 0.123)
    ('12% ±2.1%', '2.50 ±0.12')
    """
    text = percent(value) if unit == "percent" else number(value)
    if math.isnan(value) or math.isnan(error):
        return text
    return f"{text} ±{percent(error) if unit == 'percent' else f'{error:.2g}'}"


def sort_measures(names: Iterable[str]) -> tuple[str, ...]:
    """Sort measures in the order of the table, unknown ones last.

    >>> sort_measures(["gate_key", "on_digits", "induction_score", "entropy"])
    ('entropy', 'on_digits', 'induction_score', 'gate_key')
    """
    return tuple(sorted(names, key=_rank))


def _rank(name: str) -> int:
    keys = list(_table())
    key = name if name in keys else _family(name)
    return len(keys) if key is None else keys.index(key)


def _family(name: str) -> str | None:
    for key in _table():
        start, star, end = key.partition("*")
        if star and name.startswith(start) and name.endswith(end):
            return key
    return None


def _in_words(name: str) -> str:
    return name.replace("_", " ")


@cache
def _table() -> dict[str, MeasureInfo]:
    text = files(__package__).joinpath("measures.toml").read_text("utf-8")
    return {name: MeasureInfo(**entry) for name, entry in tomllib.loads(text).items()}
