"""A value for every pair of heads, to be read, printed, put into a frame or saved."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.files import Facts
from manyheads.taps import Head


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ByPair(Tabular):
    """One value from each head to each other; NaN where two heads have none.

    >>> pairs = ByPair(kind="example", blocks=(Block(0, 2),), values=np.array([[0, 1], [2, 0.0]]))
    >>> pairs.of(Head(0, 1), Head(0, 0))
    2.0
    """

    kind: str
    blocks: tuple[Block, ...]
    values: Float[np.ndarray, "h h"]
    facts: Facts = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return tuple(address for block in self.blocks for address in block.addresses)

    def of(self, one: Head | Address, other: Head | Address) -> float:
        return float(self.values[self._place(one), self._place(other)])

    def ranked(self, top_k: int = 20) -> list[tuple[Address, Address, float]]:
        """Pairs of different heads by value, largest first."""
        values = self.values.copy()
        np.fill_diagonal(values, np.nan)
        order = np.argsort(-values, axis=None, kind="stable")[:top_k]
        places = [np.unravel_index(place, values.shape) for place in order]
        known = [(one, other) for one, other in places if not np.isnan(values[one, other])]
        names = self.addresses
        return [(names[one], names[other], float(values[one, other])) for one, other in known]

    def rows(self) -> list[dict[str, Any]]:
        """One record per pair that has a value."""
        names = [str(address) for address in self.addresses]
        return [
            {"from": names[one], "to": names[other], "value": float(self.values[one, other])}
            for one, other in np.argwhere(~np.isnan(self.values))
        ]

    def table(self, max_rows: int = 20) -> Any:
        """A rich table of the largest."""
        from rich.table import Table

        table = Table("from", "to", box=None, pad_edge=False, title=self.kind, title_justify="left")
        table.add_column("value", justify="right")
        for one, other, value in self.ranked(max_rows):
            table.add_row(str(one), str(other), f"{value:.3g}")
        return table

    def __str__(self) -> str:
        lines = [f"{self.kind} of {len(self.addresses)} heads; the largest:"]
        lines += [f"  {one} to {other}  {value:.3g}" for one, other, value in self.ranked(5)]
        return "\n".join(lines)

    __repr__ = __str__

    def _place(self, head: Head | Address) -> int:
        names = self.addresses
        address = head
        if isinstance(head, Head):
            first = self.blocks[0]
            address = Address(head, first.stack, first.sublayer)
        if address not in names:
            raise InputError(f"there is no head {address}", f"use {names[0]} to {names[-1]}")
        return names.index(address)
