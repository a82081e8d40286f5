"""What the lens hands back: values by head, to be read, printed, put into a frame or saved."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError, MissingExtraError, ShapeError
from manyheads.lens.measure.measure_table import describe_measure, format_value
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.files import Facts, Result
from manyheads.taps import Head, Sublayer

FloatsByHead = Float[np.ndarray, " h"]

# A page of a terminal; the whole is in the frame and in the file.
MOST_ROWS = 40


class Tabular(Result):
    """A result that is also a list of records."""

    __slots__ = ()

    def rows(self) -> list[dict[str, Any]]:
        """One record for each thing that was measured."""
        raise NotImplementedError

    def frame(self) -> Any:
        """A pandas DataFrame of `rows`."""
        return frame_of(self.rows())


@dataclass(frozen=True, slots=True, eq=False)
class Column:
    """One measure of every head: means, and their standard errors (NaN where unknown)."""

    name: str
    blocks: tuple[Block, ...]
    means: FloatsByHead
    errors: FloatsByHead

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def of(self, head: Head | Address) -> float:
        """The mean of one head; a `Head` alone is one of the self-attention of the only stack."""
        return float(self.means[_place(self.blocks, head)])

    def error_of(self, head: Head | Address) -> float:
        return float(self.errors[_place(self.blocks, head)])

    def layers(
        self, stack: str = "main", sublayer: Sublayer = Sublayer.ATTENTION
    ) -> dict[int, FloatsByHead]:
        """The means of each layer; layers may differ in heads."""
        found, start = {}, 0
        for block in self.blocks:
            if (block.stack, block.sublayer) == (stack, sublayer):
                found[block.layer] = self.means[start : start + block.heads]
            start += block.heads
        return found

    def items(self) -> Iterator[tuple[Address, float]]:
        yield from zip(self.addresses, self.means.tolist(), strict=True)

    def ranked(self, *, smallest: bool = False) -> list[tuple[Address, float]]:
        """Heads by their means, largest first; those without one are left out."""
        known = [(address, mean) for address, mean in self.items() if not np.isnan(mean)]
        return sorted(known, key=lambda item: item[1], reverse=not smallest)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ByHead(Tabular):
    """Measures by name, each with one mean per head and perhaps its standard error.

    `kind` says what it is a result of, and `facts` what else is known: texts, tokens, a threshold.
    Heads lie in the order of `blocks`, layer after layer.

    >>> result = ByHead(kind="example", blocks=(Block(0, 2), Block(1, 1)),
    ...                 means={"entropy": np.array([1.0, 2.0, 0.5])})
    >>> result["entropy"].of(Head(0, 1)), [str(a) for a, _ in result["entropy"].ranked()]
    (2.0, ['L0H1', 'L0H0', 'L1H0'])
    """

    kind: str
    blocks: tuple[Block, ...]
    means: Mapping[str, FloatsByHead]
    errors: Mapping[str, FloatsByHead] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        heads = sum(block.heads for block in self.blocks)
        for name, values in (*self.means.items(), *self.errors.items()):
            if values.shape != (heads,):
                raise ShapeError(
                    f"{name} has shape {values.shape}", f"give one value for each of {heads} heads"
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.means)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def __contains__(self, name: str) -> bool:
        return name in self.means

    def __getitem__(self, name: str) -> Column:
        if name not in self.means:
            raise InputError(f"{name!r} was not measured", f"use {', '.join(self.means)}")
        unknown = np.full_like(self.means[name], np.nan)
        return Column(name, self.blocks, self.means[name], self.errors.get(name, unknown))

    def of(self, head: Head | Address) -> dict[str, float]:
        """All measures of one head."""
        place = _place(self.blocks, head)
        return {name: float(values[place]) for name, values in self.means.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One record per head: where it is, its means, and their errors as `<name>_error`."""
        return [
            address.record() | values_at(self.means, self.errors, place)
            for place, address in enumerate(self.addresses)
        ]

    def table(
        self,
        names: Sequence[str] | None = None,
        *,
        by: str | None = None,
        max_rows: int | None = MOST_ROWS,
    ) -> Any:
        """A rich table: some measures or all, heads in order or by one measure, largest first."""
        from rich.table import Table

        names = self.names if names is None else names
        columns = [self[name] for name in names]
        places = list(range(len(self.addresses)))
        if by is not None:
            order = {address: place for place, address in enumerate(self.addresses)}
            places = [order[address] for address, _ in self[by].ranked()]
        table = Table("Head", box=None, pad_edge=False, title=self.kind, title_justify="left")
        about = [describe_measure(name) for name in names]
        for each in about:
            table.add_column(each.title, justify="right")
        for place in places[:max_rows]:
            values = [
                format_value(float(column.means[place]), each.unit, float(column.errors[place]))
                for column, each in zip(columns, about, strict=True)
            ]
            table.add_row(str(self.addresses[place]), *values)
        if max_rows is not None and len(places) > max_rows:
            table.caption = (
                f"{len(places) - max_rows} more heads: table(max_rows=None), frame() or save()"
            )
            table.caption_justify = "left"
        return table

    def __str__(self) -> str:
        heads, attentions = len(self.addresses), len(self.blocks)
        lines = [f"{self.kind} of {heads} heads in {attentions} attentions"]
        width = max((len(name) for name in self.names), default=0)
        for name in self.names:
            ranked = self[name].ranked()
            if not ranked:
                continue
            (high, most), (low, least) = ranked[0], ranked[-1]
            mean = np.nanmean(self.means[name])
            line = f"  {name:<{width}}  mean {mean:.3g}, from {least:.3g} ({low})"
            lines.append(f"{line} to {most:.3g} ({high})")
        return "\n".join(lines)

    __repr__ = __str__


def values_at(means: Mapping[str, Any], errors: Mapping[str, Any], place: int) -> dict[str, float]:
    """The means at one place, each followed by its error as `<name>_error` where it is known."""
    record = {}
    for name, values in means.items():
        record[name] = float(values[place])
        if name in errors:
            record[f"{name}_error"] = float(errors[name][place])
    return record


def frame_of(rows: Sequence[Mapping[str, Any]]) -> Any:
    """A pandas DataFrame of records, where pandas is installed."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        raise MissingExtraError("a frame needs the package pandas", "pip install pandas") from None
    return pandas.DataFrame(list(rows))


def _place(blocks: tuple[Block, ...], head: Head | Address) -> int:
    address = Address(head) if isinstance(head, Head) else head
    start = 0
    for block in blocks:
        same = (block.layer, block.stack, block.sublayer) == (
            address.head.layer,
            address.stack,
            address.sublayer,
        )
        if same and 0 <= address.head.head < block.heads:
            return start + address.head.head
        start += block.heads
    stacks = sorted({block.stack for block in blocks})
    remedy = f"use a head of the stacks {', '.join(stacks)}, as in Address(Head(0, 0), stack=...)"
    raise InputError(
        f"there is no head {address}", "use one it has" if "main" in stacks else remedy
    )


def told(mean: float, error: float) -> str:
    """A mean for a table, with its error where one is known.

    >>> told(0.12345, 0.0123), told(2.0, np.nan), told(np.nan, np.nan)
    ('0.123 ±0.012', '2.00', '–')
    """
    return format_value(float(mean), error=float(error))


def told_change(change: float, error: float) -> str:
    """A change for a line, with its error where one is known: of an only text none is.

    >>> told_change(0.01234, 0.0021), told_change(-0.5, np.nan)
    ('+0.0123 ±0.0021', '-0.5000')
    """
    return f"{change:+.4f}" + ("" if np.isnan(error) else f" ±{error:.2g}")
