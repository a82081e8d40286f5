"""Values by layer, to be read, printed, put into a frame or saved."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from jaxtyping import Float

from manyheads.errors import InputError, ShapeError
from manyheads.lens.measure.measure_table import describe_measure
from manyheads.lens.results.by_head import Tabular, told, values_at
from manyheads.lens.results.files import Facts

FloatsByLayer = Float[np.ndarray, " l"]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class ByLayer(Tabular):
    """Measures by name, one mean per layer and perhaps its standard error; -1 is the embeddings.

    >>> result = ByLayer(kind="example", layers=(-1, 0), means={"accuracy": np.array([0.5, 0.75])})
    >>> print(result)
    example of 2 layers
      accuracy  embeddings 0.5, L0 0.75
    """

    kind: str
    layers: tuple[int, ...]
    means: Mapping[str, FloatsByLayer]
    errors: Mapping[str, FloatsByLayer] = field(default_factory=dict)
    facts: Facts = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name, values in (*self.means.items(), *self.errors.items()):
            if values.shape != (len(self.layers),):
                raise ShapeError(
                    f"{name} has shape {values.shape}",
                    f"give one value for each of {len(self.layers)} layers",
                )

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(self.means)

    def of(self, layer: int) -> dict[str, float]:
        """All measures of one layer."""
        if layer not in self.layers:
            raise InputError(
                f"layer {layer} was not measured", f"use one of {', '.join(map(str, self.layers))}"
            )
        place = self.layers.index(layer)
        return {name: float(values[place]) for name, values in self.means.items()}

    def rows(self) -> list[dict[str, Any]]:
        """One record per layer: its means, and their errors as `<name>_error`."""
        return [
            {"layer": layer} | values_at(self.means, self.errors, place)
            for place, layer in enumerate(self.layers)
        ]

    def table(self) -> Any:
        """A rich table."""
        from rich.table import Table

        table = Table("layer", box=None, pad_edge=False, title=self.kind, title_justify="left")
        for name in self.names:
            table.add_column(describe_measure(name).title, justify="right")
        for record in self.rows():
            values = [
                told(record[name], record.get(f"{name}_error", np.nan)) for name in self.names
            ]
            table.add_row(_named(record["layer"]), *values)
        return table

    def __str__(self) -> str:
        lines = [f"{self.kind} of {len(self.layers)} layers"]
        width = max((len(name) for name in self.names), default=0)
        for name, values in self.means.items():
            told = zip(self.layers, values, strict=True)
            each = ", ".join(f"{_named(layer)} {value:.3g}" for layer, value in told)
            lines.append(f"  {name:<{width}}  {each}")
        return "\n".join(lines)

    __repr__ = __str__


def _named(layer: int) -> str:
    return "embeddings" if layer < 0 else f"L{layer}"
