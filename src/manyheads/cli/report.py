"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli.asked import (
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
from manyheads.errors import CutWarning, InputError

__all__ = ["Report"]

# What training calls the folder of a model, beside which all else of a run lies.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html
    """

    model: ModelName = DEFAULT
    """The folder of a model with a tokenizer, a name on the hub, or house-gpt."""

    text: Annotated[str | None, tyro.conf.arg(metavar="TEXT", help_behavior_hint="")] = None
    """The text to read; without it and a file some short articles of our own."""

    file: TextFile = None
    """The text to read, all of a file, in UTF-8."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="")] = None
    """For a model that reads images: a PNG or a JPEG in place of a text."""

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

    json: JsonFile = None
    """Where every figure of every head goes as JSON, whole or not at all."""

    device: DeviceName = "auto"
    """Where to compute: cpu, cuda, cuda:1; by default on CUDA where torch finds it."""

    def run(self) -> int:
        """Measure, write the file, print the heads and what to try next."""
        from manyheads.report.writing import check_page_path, write_page

        check_page_path(self.out)
        check_json(self.json)
        check_folder(self.pictures)
        text = self._given()

        from rich.console import Console

        from manyheads.cli.report_page import show
        from manyheads.report.examine import examine
        from manyheads.report.page import compose

        name = called(self.model)
        model = open_model(self.model, self.device)
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
        own = "articles of our own" if self.text is None else "a text that was typed"
        read = self.image or self.file
        source = own if read is None else read.name
        made = f"Made on {time.strftime('%d %B %Y')} from {source}."
        # What the next commands shall read.
        file = "text.txt" if self.file is None else str(self.file)
        size = write_page(compose(found, where=self.model, file=file, made=made), self.out)
        show(Console(), found, where=self.model, file=file)
        if self.json is not None:
            from manyheads.report.figures import figures_of

            write_json(self.json, figures_of(found))
        if self.pictures is not None:
            from manyheads.cli.report_page import draw_all

            for drawn in draw_all(found, self.pictures):
                print(f"drawn: {drawn}")
        seconds = time.monotonic() - started
        print(f"the report is in {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)")
        return 0

    def _given(self) -> str | Path:
        """A text, or the path of an image."""
        if self.text is not None and self.file is not None:
            raise InputError("the text comes from --text or from --file", "give one of both")
        if self.image is not None and (self.text is not None or self.file is not None):
            raise InputError("a model reads a text or an image", "give one of both")
        if self.image is not None:
            return self.image
        if self.text is not None:
            return self.text
        if self.file is None:
            from manyheads.lens.passages import passages

            return "\n\n".join(passages())
        from manyheads.report.reading import read_file

        return read_file(self.file, max(self.tokens, self.shown))


def called(model: str) -> str:
    """What a reader calls a model: its folder's name, or that of the run which left it there.

    >>> called("gpt2/"), called("org/name"), called("runs/first/model")
    ('gpt2', 'name', 'first')
    """
    place = Path(model)
    above = place.resolve().parent.name if place.name == MODEL else ""
    return above or place.name or model
