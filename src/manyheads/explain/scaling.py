"""Why scores are divided by sqrt(d): what happens to softmax with and without, measured."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from einops import einsum
from jaxtyping import Float
from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text
from torch import Tensor

from manyheads.console import TerminalPage, heat
from manyheads.errors import InputError

SIZES = (8, 16, 32, 64, 128, 256, 512)
ROWS = 512
KEYS = 64


@dataclass(frozen=True, slots=True)
class Measured:
    """Scores of one kind: their variance, and what softmax makes of a row of them."""

    variance: float
    largest_weight: float
    slope: float


@dataclass(frozen=True, slots=True)
class Scaling:
    """Heads of `size` channels: q.k as it is (`plain`), and divided by sqrt(size) (`scaled`)."""

    size: int
    plain: Measured
    scaled: Measured


def measure(
    sizes: Sequence[int] = SIZES, *, rows: int = ROWS, keys: int = KEYS, seed: int = 0
) -> tuple[Scaling, ...]:
    """Draw queries and keys of unit variance, `rows` of each size, and look at their scores.

    >>> (found,) = measure([64])
    >>> found.plain.variance > 50, found.scaled.variance < 1.2
    (True, True)
    """
    if any(size < 1 for size in sizes):
        raise InputError(f"sizes {tuple(sizes)} hold an empty head", "use 1 or more channels")
    generator = torch.Generator().manual_seed(seed)
    found = []
    for size in sizes:
        query = torch.randn(rows, size, generator=generator)
        key = torch.randn(rows, keys, size, generator=generator)
        product = einsum(query, key, "n d, n s d -> n s")
        found.append(Scaling(size, _measured(product), _measured(product / size**0.5)))
    return tuple(found)


def mean_slope(weights: Float[Tensor, "n s"]) -> Float[Tensor, " n"]:
    """The mean of |dp_i / ds_j| over all pairs of a row.

    dp_i / ds_j is p_i (1 - p_i) where i = j and -p_i p_j elsewhere, so the s^2 of them add up in
    size to 2 (1 - sum of p^2).
    """
    return 2 * (1 - weights.square().sum(-1)) / weights.shape[-1] ** 2


def _measured(scores: Float[Tensor, "n s"]) -> Measured:
    weights = scores.double().softmax(-1)
    return Measured(
        variance=float(scores.var()),
        largest_weight=float(weights.amax(-1).mean()),
        slope=float(mean_slope(weights).mean()),
    )


class ScalingPage:
    """Prints a row a head size, and what follows from them."""

    def __init__(
        self, found: Sequence[Scaling], words: Mapping[str, str], console: Console, *, seed: int
    ) -> None:
        self.found, self.words, self.page, self.seed = found, words, TerminalPage(console), seed

    def show(self) -> None:
        self.page.title(self.words["scaling.title"])
        text = self.words["scaling.text"]
        self.page.paragraph(text.format(rows=ROWS, keys=KEYS, seed=self.seed))
        self.page.show(self._table())
        last = self.found[-1]
        conclusion = self.words["scaling.conclusion"].format(
            size=last.size,
            variance=last.plain.variance,
            largest=last.plain.largest_weight,
            ratio=last.scaled.slope / last.plain.slope,
        )
        self.page.paragraph(conclusion, "bold")

    def draw(self, path: Path) -> None:
        """The same as curves."""
        from manyheads.pictures import ScalingCurves, ScalingLabels, draw_scaling

        panels = [
            ScalingCurves(
                title=self.words[f"scaling.{name}"],
                plain=[_columns(row.plain)[name] for row in self.found],
                scaled=[_columns(row.scaled)[name] for row in self.found],
                logarithmic=name == "variance",
            )
            for name in ("variance", "largest", "slope")
        ]
        draw_scaling(
            [row.size for row in self.found],
            panels,
            path,
            labels=ScalingLabels(
                title=self.words["scaling.title"],
                size=self.words["picture.size"],
                plain=self.words["scaling.plain"],
                scaled=self.words["scaling.scaled"],
            ),
        )
        self.page.paragraph(self.words["picture.written"].format(path=path))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        plain, scaled = self.words["scaling.plain"], self.words["scaling.scaled"]
        table.add_column("\nd", justify="right")
        for name in ("variance", "largest", "slope"):
            title = self.words[f"scaling.{name}"]
            table.add_column(f"{title}\n{plain}", justify="right", no_wrap=True)
            table.add_column(f"\n{scaled}", justify="right", no_wrap=True)
        for row in self.found:
            pair = [_columns(row.plain), _columns(row.scaled)]
            table.add_row(
                Text(str(row.size), style="bold"),
                *[f"{each['variance']:.2f}" for each in pair],
                *[Text(f" {each['largest']:.3f} ", style=heat(each["largest"])) for each in pair],
                *[f"{each['slope']:.2f}" for each in pair],
            )
        return table


def _columns(measured: Measured) -> dict[str, float]:
    """What is shown; slopes are so small that they are shown ten thousand times larger."""
    return {
        "variance": measured.variance,
        "largest": measured.largest_weight,
        "slope": measured.slope * 1e4,
    }
