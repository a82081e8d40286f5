"""The measurement of 1/sqrt(d) as a page of the terminal, and as a picture."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.cli.ink import Ink, heat
from manyheads.lens.scaling import KEYS, ROWS, Measured, Scaling

__all__ = ["ScalingPage"]


class ScalingPage:
    """Prints a row a head size, and what follows from them."""

    def __init__(
        self, found: Sequence[Scaling], words: Mapping[str, str], console: Console, *, seed: int
    ) -> None:
        self.found, self.words, self.ink, self.seed = found, words, Ink(console), seed

    def show(self) -> None:
        self.ink.title(self.words["scaling.title"])
        text = self.words["scaling.text"]
        self.ink.say(text.format(rows=ROWS, keys=KEYS, seed=self.seed))
        self.ink.show(self._table())
        last = self.found[-1]
        conclusion = self.words["scaling.conclusion"].format(
            size=last.size,
            variance=last.plain.variance,
            largest=last.plain.largest_weight,
            ratio=last.scaled.slope / last.plain.slope,
        )
        self.ink.say(conclusion, "bold")

    def draw(self, path: Path) -> None:
        """The same as curves."""
        from manyheads.pictures.scaling import Curves, ScalingWords, draw_scaling

        panels = [
            Curves(
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
            words=ScalingWords(
                title=self.words["scaling.title"],
                size=self.words["picture.size"],
                plain=self.words["scaling.plain"],
                scaled=self.words["scaling.scaled"],
            ),
        )
        self.ink.say(self.words["picture.written"].format(path=path))

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
