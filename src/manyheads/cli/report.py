"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import json
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.errors import CutWarning

if TYPE_CHECKING:
    from manyheads.report.examine import Findings

__all__ = ["Report"]

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model with a tokenizer, a name on the hub, or house-gpt."""

    file: Annotated[Path, tyro.conf.arg(metavar="TEXTFILE")]
    """The text, in UTF-8."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")] = Path("report.html")
    """The file to write; it needs no network and nothing beside it."""

    tokens: int = 4096
    """How much of the text is measured on."""

    shown: int = 256
    """How many of its first tokens have their patterns in the file."""

    by: Literal["auto", "ablation", "gradient", "none"] = "auto"
    """How a head's worth is told: exactly by ablation, or estimated from gradients."""

    pictures: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(none are drawn)")
    ] = None
    """Where to draw the atlas, a head and a layer as PNG as well."""

    json: Flag = False
    """Print what was found about each head as JSON instead of a table."""

    device: str = "cpu"
    """Where to compute: cpu or cuda."""

    def run(self) -> int:
        """Measure, write the file, print the heads and what to try next."""
        from manyheads.report.reading import read_file
        from manyheads.report.writing import check_page_path, write_page

        check_page_path(self.out)
        text = read_file(self.file, max(self.tokens, self.shown))

        from manyheads.checkpoints.folder import load
        from manyheads.report.examine import examine
        from manyheads.report.page import compose

        name = Path(self.model).name or self.model
        model = load(self.model, device=self.device)
        started = time.monotonic()
        with warnings.catch_warnings():
            # The text is cut on purpose, and the page says where.
            warnings.simplefilter("ignore", CutWarning)
            found = examine(
                model,
                text,
                name=name,
                by=self.by,
                measured=self.tokens,
                shown=self.shown,
                say=lambda step: print(step, file=sys.stderr, flush=True),
            )
        made = f"Made on {time.strftime('%d %B %Y')} from {self.file.name}."
        page = compose(found, where=self.model, file=str(self.file), made=made)
        size = write_page(page, self.out)
        self._print(found)
        place = sys.stderr if self.json else sys.stdout
        if self.pictures is not None:
            from manyheads.cli.report_page import draw_all

            for drawn in draw_all(found, self.pictures):
                print(f"drawn: {drawn}", file=place)
        seconds = time.monotonic() - started
        print(f"the report is in {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)", file=place)
        return 0

    def _print(self, found: "Findings") -> None:
        if self.json:
            print(json.dumps(found.kinds.rows(), indent=1))
            return
        from rich.console import Console

        from manyheads.cli.report_page import show

        show(Console(), found, where=self.model, file=str(self.file))
