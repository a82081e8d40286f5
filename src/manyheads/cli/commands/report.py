"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT,
    DeviceName,
    JsonFile,
    ModelName,
    TextFile,
    check_folder,
    check_json,
    open_model,
    write_json,
)
from manyheads.errors import InputError, TruncationWarning

# The folder that training saves a model to, inside the folder of the run.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a name on the hub, or house-gpt."""

    text: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """The text to read; without --text and --file, short articles that come with manyheads."""

    file: TextFile = None
    """A UTF-8 file with the text to read."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="")] = None
    """A PNG or JPEG file to read instead of a text, for a vision model."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")] = Path("report.html")
    """The HTML file to write; it opens without a network and without other files."""

    tokens: int = 4096
    """How many tokens of the text to measure on."""

    shown: int = 256
    """How many tokens to show with their attention patterns."""

    by: Literal["auto", "ablation", "gradient", "none"] = "auto"
    """How to measure the importance of a head: exactly by ablation, or by gradients."""

    pictures: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(none are drawn)")
    ] = None
    """A folder to draw the atlas, one head and one layer into, as PNG files."""

    json: JsonFile = None
    """A JSON file to write every measure of every head to."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Measure, write the file, print the heads and what to try next."""
        from manyheads.report import check_report_path, render_report, write_report

        check_report_path(self.out)
        check_json(self.json)
        check_folder(self.pictures)
        text = self._input()

        from rich.console import Console

        from manyheads.cli.pages.report_page import show
        from manyheads.report import collect_report

        name = name_of_model(self.model)
        model = open_model(self.model, self.device)
        started = time.monotonic()
        with warnings.catch_warnings():
            # The text is cut on purpose, and the page says so.
            warnings.simplefilter("ignore", TruncationWarning)
            report = collect_report(
                model,
                text,
                name=name,
                by=self.by,
                measured=self.tokens,
                shown=self.shown,
                on_progress=lambda step: print(step, file=sys.stderr, flush=True),
            )
        typed = "articles that come with manyheads" if self.text is None else "the text of --text"
        read = self.image or self.file
        source = typed if read is None else read.name
        made = f"Made on {time.strftime('%d %B %Y')} from {source}."
        # The file that the suggested commands read.
        file = "text.txt" if self.file is None else str(self.file)
        page = render_report(report, model_path=self.model, text_file=file, made=made)
        size = write_report(page, self.out)
        show(Console(), report, where=self.model, file=file)
        if self.json is not None:
            from manyheads.report import report_json

            write_json(self.json, report_json(report))
        if self.pictures is not None:
            from manyheads.cli.pages.report_page import draw_all

            for path in draw_all(report, self.pictures):
                print(f"saved {path}")
        seconds = time.monotonic() - started
        print(f"saved the report to {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)")
        return 0

    def _input(self) -> str | Path:
        """The text, or the path of an image."""
        if self.text is not None and self.file is not None:
            raise InputError("--text and --file exclude each other", "pass one of them")
        if self.image is not None and (self.text is not None or self.file is not None):
            raise InputError("--image excludes --text and --file", "pass one of them")
        if self.image is not None:
            return self.image
        if self.text is not None:
            return self.text
        if self.file is None:
            from manyheads.lens.inputs.synthetic import passages

            return "\n\n".join(passages())
        from manyheads.report.inputs import read_file

        return read_file(self.file, max(self.tokens, self.shown))


def name_of_model(model: str) -> str:
    """The name of a model: that of its folder, or of the run that saved it.

    >>> name_of_model("gpt2/"), name_of_model("org/name"), name_of_model("runs/first/model")
    ('gpt2', 'name', 'first')
    """
    place = Path(model)
    above = place.resolve().parent.name if place.name == MODEL else ""
    return above or place.name or model
