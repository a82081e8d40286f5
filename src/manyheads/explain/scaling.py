"""Why scores are divided by sqrt(d): softmax with and without the division, measured."""

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
class ScoreStatistics:
    """The variance of scores, and the largest weight and mean gradient of their softmax."""

    variance: float
    largest_weight: float
    gradient: float


@dataclass(frozen=True, slots=True)
class ScalingRow:
    """Heads of `size` channels: plain q.k, and q.k scaled by 1/sqrt(size)."""

    size: int
    plain: ScoreStatistics
    scaled: ScoreStatistics


def measure(
    sizes: Sequence[int] = SIZES, *, rows: int = ROWS, keys: int = KEYS, seed: int = 0
) -> tuple[ScalingRow, ...]:
    """Measure the scores of random queries and keys of unit variance, `rows` per size.

    >>> (row,) = measure([64])
    >>> row.plain.variance > 50, row.scaled.variance < 1.2
    (True, True)
    """
    if any(size < 1 for size in sizes):
        raise InputError(f"sizes must be at least 1, got {tuple(sizes)}")
    generator = torch.Generator().manual_seed(seed)
    measured = []
    for size in sizes:
        query = torch.randn(rows, size, generator=generator)
        key = torch.randn(rows, keys, size, generator=generator)
        product = einsum(query, key, "n d, n s d -> n s")
        measured.append(ScalingRow(size, _statistics(product), _statistics(product / size**0.5)))
    return tuple(measured)


def mean_gradient(weights: Float[Tensor, "n s"]) -> Float[Tensor, " n"]:
    """The mean of |dp_i / ds_j| over all pairs of a row.

    dp_i / ds_j is p_i (1 - p_i) where i = j and -p_i p_j elsewhere, so the s^2 of them add up in
    size to 2 (1 - sum of p^2).
    """
    return 2 * (1 - weights.square().sum(-1)) / weights.shape[-1] ** 2


def _statistics(scores: Float[Tensor, "n s"]) -> ScoreStatistics:
    weights = scores.double().softmax(-1)
    return ScoreStatistics(
        variance=float(scores.var()),
        largest_weight=float(weights.amax(-1).mean()),
        gradient=float(mean_gradient(weights).mean()),
    )


class ScalingPage:
    """Prints one row per head size, and a conclusion."""

    def __init__(
        self, rows: Sequence[ScalingRow], words: Mapping[str, str], console: Console, *, seed: int
    ) -> None:
        self.rows, self.words, self.page, self.seed = rows, words, TerminalPage(console), seed

    def show(self) -> None:
        self.page.title(self.words["scaling.title"])
        text = self.words["scaling.text"]
        self.page.paragraph(text.format(rows=ROWS, keys=KEYS, seed=self.seed))
        self.page.show(self._table())
        last = self.rows[-1]
        conclusion = self.words["scaling.conclusion"].format(
            size=last.size,
            variance=last.plain.variance,
            largest=last.plain.largest_weight,
            ratio=last.scaled.gradient / last.plain.gradient,
        )
        self.page.paragraph(conclusion, "bold")

    def draw(self, path: Path) -> None:
        """Draw the same as curves."""
        from manyheads.pictures import ScalingCurves, ScalingLabels, draw_scaling

        panels = [
            ScalingCurves(
                title=self.words[f"scaling.{name}"],
                plain=[_columns(row.plain)[name] for row in self.rows],
                scaled=[_columns(row.scaled)[name] for row in self.rows],
                logarithmic=name == "variance",
            )
            for name in ("variance", "largest", "gradient")
        ]
        names = {name: self.words[f"scaling.{name}"] for name in ("title", "plain", "scaled")}
        labels = ScalingLabels(size=self.words["picture.size"], **names)
        draw_scaling([row.size for row in self.rows], panels, path, labels=labels)
        self.page.paragraph(self.words["picture.written"].format(path=path))

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0))
        plain, scaled = self.words["scaling.plain"], self.words["scaling.scaled"]
        table.add_column("\nd", justify="right")
        for name in ("variance", "largest", "gradient"):
            title = self.words[f"scaling.{name}"]
            table.add_column(f"{title}\n{plain}", justify="right", no_wrap=True)
            table.add_column(f"\n{scaled}", justify="right", no_wrap=True)
        for row in self.rows:
            pair = [_columns(row.plain), _columns(row.scaled)]
            largest = [columns["largest"] for columns in pair]
            table.add_row(
                Text(str(row.size), style="bold"),
                *[f"{columns['variance']:.2f}" for columns in pair],
                *[Text(f" {weight:.3f} ", style=heat(weight)) for weight in largest],
                *[f"{columns['gradient']:.2f}" for columns in pair],
            )
        return table


def _columns(statistics: ScoreStatistics) -> dict[str, float]:
    """The columns of the page; gradients are small and shown times ten thousand."""
    return {
        "variance": statistics.variance,
        "largest": statistics.largest_weight,
        "gradient": statistics.gradient * 1e4,
    }
