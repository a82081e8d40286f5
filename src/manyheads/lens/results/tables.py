"""Results as tables: values by head, by layer and by pair of heads."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError, MissingPackageError, ShapeError
from manyheads.formatting import UNKNOWN, plain_table, pluralise
from manyheads.lens.results import html_tables
from manyheads.lens.results.addresses import Address, Block, HeadName, pick_head
from manyheads.lens.results.files import Metadata, Result
from manyheads.lens.results.measure_names import describe_measure, format_value
from manyheads.taps import Sublayer

FloatsByHead = Float[np.ndarray, " h"]

# One page of a terminal; frame() and save() have all rows.
MAX_ROWS = 40


class Tabular(Result):
    """A result that is also a list of records, and some lines of text."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(self._lines())

    def __repr__(self) -> str:
        return str(self)

    def _lines(self) -> Iterator[str]:
        raise NotImplementedError

    def rows(self) -> list[dict[str, Any]]:
        """One record per measured item."""
        raise NotImplementedError

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return to_frame(self.rows())

    def _repr_html_(self) -> str:
        return html_tables.html_table(self.rows())


class OfBlocks:
    """Values of the heads of some blocks, in their order."""

    __slots__ = ()
    blocks: tuple[Block, ...]

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def _index_of(self, head: HeadName) -> int:
        """The place of a head among all; an `Address` is found without listing them."""
        address = head if isinstance(head, Address) else pick_head(self.addresses, head)
        start, number = 0, address.head.head
        for block in self.blocks:
            same = (block.stack, block.sublayer) == (address.stack, address.sublayer)
            if same and block.layer == address.head.layer and 0 <= number < block.heads:
                return start + number
            start += block.heads
        # Raises the error that says which heads there are.
        return self.addresses.index(pick_head(self.addresses, address))


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Column(OfBlocks):
    """One measure of every head: means, and their standard errors (NaN where unknown).

    >>> Column("entropy", (Block(0, 2),), np.array([1.0, 2.5]), np.full(2, np.nan))
    entropy of 2 heads: mean 1.75, from 1 (L0H0) to 2.5 (L0H1)
    """

    name: str
    blocks: tuple[Block, ...]
    means: FloatsByHead
    errors: FloatsByHead

    def of(self, head: HeadName) -> float:
        """The mean of one head."""
        return float(self.means[self._index_of(head)])

    def error_of(self, head: HeadName) -> float:
        return float(self.errors[self._index_of(head)])

    def layers(
        self, stack: str = "main", sublayer: Sublayer = Sublayer.ATTENTION
    ) -> dict[int, FloatsByHead]:
        """The means of each layer, which may differ in heads."""
        means, start = {}, 0
        for block in self.blocks:
            if (block.stack, block.sublayer) == (stack, sublayer):
                means[block.layer] = self.means[start : start + block.heads]
            start += block.heads
        return means

    def items(self) -> Iterator[tuple[Address, float]]:
        yield from zip(self.addresses, self.means.tolist(), strict=True)

    def ranked(self, *, smallest: bool = False) -> list[tuple[Address, float]]:
        """Heads by their means, largest first; NaN values are left out."""
        measured = [(address, mean) for address, mean in self.items() if not np.isnan(mean)]
        return sorted(measured, key=lambda item: item[1], reverse=not smallest)

    def __repr__(self) -> str:
        return f"{self.name} of {pluralise(len(self.means), 'head')}: {self._spread() or UNKNOWN}"

    def _spread(self) -> str:
        """The mean, and the heads at both ends; empty where nothing was measured."""
        if not (ranked := self.ranked()):
            return ""
        (high, largest), (low, smallest) = ranked[0], ranked[-1]
        ends = f"from {smallest:.3g} ({low}) to {largest:.3g} ({high})"
        return f"mean {np.nanmean(self.means):.3g}, {ends}"


class ByName:
    """Measures by name, each with one mean per head or layer and perhaps its standard error."""

    __slots__ = ()
    means: Mapping[str, Float[np.ndarray, " _"]]
    errors: Mapping[str, Float[np.ndarray, " _"]]

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.means)

    def _check_shapes(self, count: int, what: str) -> None:
        for name, values in (*self.means.items(), *self.errors.items()):
            if values.shape != (count,):
                raise ShapeError(
                    f"{name} has shape {values.shape}", f"pass one value for each of {count} {what}"
                )

    def _at(self, index: int) -> dict[str, float]:
        return {name: float(values[index]) for name, values in self.means.items()}

    def _record(self, index: int) -> dict[str, float]:
        """The means at an index, each followed by its error, if known, as `<name>_error`."""
        record = {}
        for name, value in self._at(index).items():
            record[name] = value
            if name in self.errors:
                record[f"{name}_error"] = float(self.errors[name][index])
        return record


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ByHead(OfBlocks, ByName, Tabular):
    """Measures by name, each with one mean per head and optionally its standard error.

    `kind` names the result, and `metadata` has the rest: texts, tokens, thresholds. Heads are in
    the order of `blocks`, layer by layer.

    >>> result = ByHead(kind="example", blocks=(Block(0, 2), Block(1, 1)),
    ...                 means={"entropy": np.array([1.0, 2.0, 0.5])})
    >>> result["entropy"].of("L0H1"), [str(a) for a, _ in result["entropy"].ranked()]
    (2.0, ['L0H1', 'L0H0', 'L1H0'])
    """

    kind: str
    blocks: tuple[Block, ...]
    means: Mapping[str, FloatsByHead]
    errors: Mapping[str, FloatsByHead] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_shapes(sum(block.heads for block in self.blocks), "heads")

    def __contains__(self, name: str) -> bool:
        return name in self.means

    def __getitem__(self, name: str) -> Column:
        if name not in self.means:
            raise InputError(f"{name!r} was not measured", f"use {', '.join(self.means)}")
        unknown = np.full_like(self.means[name], np.nan)
        return Column(name, self.blocks, self.means[name], self.errors.get(name, unknown))

    def of(self, head: HeadName) -> dict[str, float]:
        """All measures of one head."""
        return self._at(self._index_of(head))

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: its address, its means, and their errors as `<name>_error`."""
        return [
            address.record() | self._record(index) for index, address in enumerate(self.addresses)
        ]

    def table(
        self,
        names: Sequence[str] | None = None,
        *,
        by: str | None = None,
        max_rows: int | None = MAX_ROWS,
    ) -> Any:
        """A rich table of some measures or all; heads in order, or sorted by one measure."""
        names = self.names if names is None else names
        columns = [self[name] for name in names]
        indices = list(range(len(self.addresses)))
        if by is not None:
            order = {address: index for index, address in enumerate(self.addresses)}
            indices = [order[address] for address, _ in self[by].ranked()]
        about = [describe_measure(name) for name in names]
        table = titled_table(self.kind, ["Head"], [info.title for info in about])
        for index in indices[:max_rows]:
            values = [
                format_value(float(column.means[index]), info.unit, float(column.errors[index]))
                for column, info in zip(columns, about, strict=True)
            ]
            table.add_row(str(self.addresses[index]), *values)
        return caption_more(table, len(indices), max_rows)

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} of {len(self.addresses)} heads in {len(self.blocks)} attentions"
        width = max(map(len, self.names), default=0)
        for name in self.names:
            if spread := self[name]._spread():
                yield f"  {name:<{width}}  {spread}"


def titled_table(title: str, words: Sequence[str], numbers: Sequence[str]) -> Any:
    """An empty rich table: columns of words, then columns of numbers on the right."""
    table = plain_table(words, numbers, ())
    table.title, table.title_justify = title, "left"
    return table


def caption_more(table: Any, heads: int, max_rows: int | None) -> Any:
    """Say below a table how many heads it leaves out."""
    if max_rows is not None and heads > max_rows:
        more = f"{heads - max_rows} more heads: table(max_rows=None), frame() or save()"
        table.caption, table.caption_justify = more, "left"
    return table


def to_frame(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of records; needs pandas."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise MissingPackageError("a DataFrame", "pandas") from None
    return pandas.DataFrame(list(rows))


def format_change(change: float, error: float) -> str:
    """Format a change, with its standard error unless that is NaN.

    >>> format_change(0.01234, 0.0021), format_change(-0.5, np.nan)
    ('+0.0123 ±0.0021', '-0.5000')
    """
    return f"{change:+.4f}" + ("" if np.isnan(error) else f" ±{error:.2g}")


FloatsByLayer = Float[np.ndarray, " l"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ByLayer(ByName, Tabular):
    """Measures by name, one mean per layer and optionally its error; layer -1 is the embeddings.

    >>> result = ByLayer(kind="example", layers=(-1, 0), means={"accuracy": np.array([0.5, 0.75])})
    >>> print(result)
    example of 2 layers
      accuracy  embeddings 0.5, L0 0.75
    """

    kind: str
    layers: tuple[int, ...]
    means: Mapping[str, FloatsByLayer]
    errors: Mapping[str, FloatsByLayer] = field(default_factory=dict)
    metadata: Metadata = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._check_shapes(len(self.layers), "layers")

    def of(self, layer: int) -> dict[str, float]:
        """All measures of one layer."""
        if layer not in self.layers:
            raise InputError(
                f"layer {layer} was not measured", f"use one of {', '.join(map(str, self.layers))}"
            )
        return self._at(self.layers.index(layer))

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer: its means, and their errors as `<name>_error`."""
        return [{"layer": layer} | self._record(index) for index, layer in enumerate(self.layers)]

    def table(self) -> Any:
        """A rich table."""
        titles = [describe_measure(name).title for name in self.names]
        table = titled_table(self.kind, ["layer"], titles)
        for record in self.rows():
            values = [
                format_value(record[name], error=record.get(f"{name}_error", np.nan))
                for name in self.names
            ]
            table.add_row(_layer_name(record["layer"]), *values)
        return table

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} of {len(self.layers)} layers"
        width = max(map(len, self.names), default=0)
        for name, values in self.means.items():
            pairs = zip(self.layers, values, strict=True)
            text = ", ".join(f"{_layer_name(layer)} {value:.3g}" for layer, value in pairs)
            yield f"  {name:<{width}}  {text}"


def _layer_name(layer: int) -> str:
    return "embeddings" if layer < 0 else f"L{layer}"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ByPair(OfBlocks, Tabular):
    """One value for each ordered pair of heads; NaN where there is none.

    >>> pairs = ByPair(kind="example", blocks=(Block(0, 2),), values=np.array([[0, 1], [2, 0.0]]))
    >>> pairs.of("L0H1", "L0H0")
    2.0
    """

    kind: str
    blocks: tuple[Block, ...]
    values: Float[np.ndarray, "h h"]
    metadata: Metadata = field(default_factory=dict)

    def of(self, one: HeadName, other: HeadName) -> float:
        return float(self.values[self._index_of(one), self._index_of(other)])

    def ranked(self, top_k: int = 20) -> list[tuple[Address, Address, float]]:
        """Pairs of different heads by value, largest first."""
        values = self.values.copy()
        np.fill_diagonal(values, np.nan)
        order = np.argsort(-values, axis=None, kind="stable")[:top_k]
        indices = [np.unravel_index(index, values.shape) for index in order]
        pairs = [(one, other) for one, other in indices if not np.isnan(values[one, other])]
        names = self.addresses
        return [(names[one], names[other], float(values[one, other])) for one, other in pairs]

    def rows(self) -> list[dict[str, Any]]:
        """One record per pair that has a value."""
        names = [str(address) for address in self.addresses]
        return [
            {"from": names[one], "to": names[other], "value": float(self.values[one, other])}
            for one, other in np.argwhere(~np.isnan(self.values))
        ]

    def table(self, max_rows: int = 20) -> Any:
        """A rich table of the largest values."""
        table = titled_table(self.kind, ["from", "to"], ["value"])
        for one, other, value in self.ranked(max_rows):
            table.add_row(str(one), str(other), f"{value:.3g}")
        return table

    def _lines(self) -> Iterator[str]:
        yield f"{self.kind} of {len(self.addresses)} heads; the largest:"
        for one, other, value in self.ranked(5):
            yield f"  {one} to {other}  {value:.3g}"
