"""What two models have come to, head by head: a result to be read, printed and saved."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.lens.measure.measure_table import describe_measure, format_value
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.by_head import ByHead, Tabular
from manyheads.lens.results.files import Facts
from manyheads.taps import Head

KIND = "comparison"
# So many measures of a head are told, those that changed most beyond their error.
TOLD = 3


@dataclass(frozen=True, slots=True)
class Difference:
    """One measure of one head in both models; `z` is the change in its standard errors."""

    before: float
    after: float
    change: float
    error: float
    z: float


@dataclass(frozen=True, slots=True)
class Losses:
    """The loss of both models on the same answers, and the change with its standard error."""

    before: float
    after: float
    change: float
    error: float | None

    def __str__(self) -> str:
        error = "" if self.error is None else f" ±{self.error:.2g}"
        return f"loss {self.before:.4f} before, {self.after:.4f} after ({self.change:+.4f}{error})"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class Comparison(Tabular):
    """Every measure of every head before and after, by the addresses that heads had before.

    `change` has the standard errors of the changes, `weights` how far each head's weights moved.
    `after_at` says where a head is now, None for one that is gone. `died` and `revived` give the
    reasons, `roles` the kinds before and after of heads whose kinds changed.
    """

    before: ByHead
    after: ByHead
    change: ByHead
    weights: ByHead
    after_at: Mapping[Address, Address | None]
    losses: Losses | None = None
    died: Mapping[Address, tuple[str, ...]] = field(default_factory=dict)
    revived: Mapping[Address, tuple[str, ...]] = field(default_factory=dict)
    roles: Mapping[Address, tuple[tuple[str, ...], tuple[str, ...]]] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    @property
    def addresses(self) -> tuple[Address, ...]:
        return self.before.addresses

    @property
    def names(self) -> tuple[str, ...]:
        """Measures, those that only one of the models has too."""
        return self.change.names

    @property
    def gone(self) -> tuple[Address, ...]:
        """Heads that the second model has no more."""
        return tuple(head for head, other in self.after_at.items() if other is None)

    def z(self, name: str) -> Float[np.ndarray, " h"]:
        """The change of a measure in standard errors; 0 where nothing changed."""
        column = self.change[name]
        known = np.where(column.errors > 0, column.errors, np.nan)
        return np.asarray(np.where(column.means == 0, 0.0, column.means / known))

    def shift(self) -> Float[np.ndarray, " h"]:
        """How far each head moved over all measures, in units of how much heads differ.

        The root mean square over measures of the change divided by the standard deviation of the
        measure over all heads of both models: with many texts every change is many errors large,
        and this says which are large.
        """
        squares = []
        for name in self.names:
            both = np.concatenate((self.before.means[name], self.after.means[name]))
            spread = both[~np.isnan(both)].std() if (~np.isnan(both)).any() else 0.0
            if spread > 1e-12:
                squares.append(np.square(self.change.means[name] / spread))
        if not squares:
            return np.full(len(self.addresses), np.nan)
        stacked = np.array(squares)
        known = ~np.isnan(stacked)
        summed = np.where(known, stacked, 0.0).sum(0)
        count = known.sum(0)
        return np.asarray(np.sqrt(np.where(count > 0, summed / np.maximum(count, 1), np.nan)))

    def ranked(self, name: str | None = None) -> list[tuple[Address, float]]:
        """Heads by how far one measure changed, either way, or by `shift`; the gone left out."""
        values = self.shift() if name is None else self.change[name].means
        pairs = zip(self.addresses, values.tolist(), strict=True)
        known = [(head, value) for head, value in pairs if not np.isnan(value)]
        return sorted(known, key=lambda pair: -abs(pair[1]))

    def of(self, head: Head | Address) -> dict[str, Difference]:
        """All measures of one head."""
        one, two, moved = (each.of(head) for each in (self.before, self.after, self.change))
        return {
            name: Difference(
                one[name],
                two[name],
                moved[name],
                self.change[name].error_of(head),
                float(self.z(name)[self._place(head)]),
            )
            for name in self.names
        }

    def rows(self) -> list[dict[str, Any]]:
        """One record per head and measure."""
        values = {name: self.z(name) for name in self.names}
        return [
            {
                "head": str(address),
                "measure": name,
                "before": float(self.before.means[name][place]),
                "after": float(self.after.means[name][place]),
                "change": float(self.change.means[name][place]),
                "error": float(self.change[name].errors[place]),
                "z": float(values[name][place]),
            }
            for place, address in enumerate(self.addresses)
            for name in self.names
        ]

    def table(self, max_rows: int = 20) -> Any:
        """A rich table of the heads that moved most, with the measures that changed most."""
        from rich.table import Table

        table = Table("head", box=None, pad_edge=False, title=KIND, title_justify="left")
        for name in ("shift", "weights"):
            table.add_column(name, justify="right")
        for name in ("most changed", "kinds"):
            table.add_column(name)
        for address, shift in self.ranked()[:max_rows]:
            moved = self.weights["all"].of(address)
            table.add_row(
                str(address),
                f"{shift:.2g}",
                f"{moved:.2g}",
                self._told(address),
                self._role(address),
            )
        return table

    def __str__(self) -> str:
        return "\n".join(self._lines())

    __repr__ = __str__

    def _lines(self) -> Iterator[str]:
        yield f"{len(self.addresses)} heads compared by {len(self.names)} measures"
        if self.losses is not None:
            yield f"  {self.losses}"
        moved = [(address, shift) for address, shift in self.ranked() if shift > 0]
        for address, shift in moved[:5]:
            yield f"  {address} moved by {shift:.2g}: {self._told(address)}"
        if not moved:
            yield "  no head moved"
        for name, found in (("died", self.died), ("came to life", self.revived)):
            for address, why in found.items():
                yield f"  {address} {name} ({', '.join(why)})"
        for address in self.roles:
            yield f"  {address} {self._role(address)}"
        if self.gone:
            yield f"  gone: {', '.join(map(str, self.gone))}"
        if not self.facts.get("complete", True):
            yield "  interrupted before all texts were read"

    def _place(self, head: Head | Address) -> int:
        address = Address(head) if isinstance(head, Head) else head
        return self.addresses.index(address)

    def _told(self, address: Address) -> str:
        """The measures of a head that changed most beyond their error."""
        known = [(name, each) for name, each in self.of(address).items() if not np.isnan(each.z)]
        known = [(name, each) for name, each in known if each.change]
        known.sort(key=lambda pair: -abs(pair[1].z))
        return ", ".join(
            f"{about.label} {format_value(each.before, about.unit)} to "
            f"{format_value(each.after, about.unit)} (z {each.z:+.1f})"
            for about, each in ((describe_measure(name), each) for name, each in known[:TOLD])
        )

    def _role(self, address: Address) -> str:
        if address not in self.roles:
            return ""
        one, two = (", ".join(each) or "of no kind" for each in self.roles[address])
        return f"was {one}, is {two}"
