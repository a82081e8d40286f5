"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

from manyheads.cli import arguments, inputs
from manyheads.cli.options import AnnotatedTextOptions, DeviceOptions
from manyheads.errors import InputError, TruncationWarning

# The folder that training saves a model to, inside the folder of the run.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    text: arguments.OptionalText = None
    """The text to read; without --text and --file, short articles that come with manyheads."""

    file: arguments.TextFile = None
    """A file of texts separated by blank lines, or one per line without any."""

    image: Annotated[Path | None, arguments.metavar("IMAGE")] = None
    """A PNG or JPEG file to read instead of a text, for a vision model."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")] = Path("report.html")
    """The HTML file to write; it opens without a network and without other files."""

    tokens: int = 4096
    """How many tokens of the text to measure on."""

    pattern_tokens: int = 256
    """How many tokens to show with their attention patterns."""

    by: Literal["auto", "ablation", "gradient", "none"] = "auto"
    """How to measure the importance of a head: exactly by ablation, or by gradients."""

    pictures: Annotated[Path | None, arguments.metavar("FOLDER", "(none are drawn)")] = None
    """A folder to draw the atlas, one head and one layer into, as PNG files."""

    json: arguments.JsonFile = None
    """A JSON file to save every measure of every head to; - prints it instead."""

    annotated: AnnotatedTextOptions = AnnotatedTextOptions()
    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Measure, write the file, print the heads and what to try next."""
        from manyheads.report import check_report_path

        check_report_path(self.out)
        arguments.check_json(self.json)
        arguments.check_out_folder(self.pictures, flag="--pictures")
        text = self._input()

        from manyheads.report import collect_report, render_report, report_json, write_report
        from manyheads.report.terminal import print_report

        model = self.compute.open(self.model)
        started = time.monotonic()
        with warnings.catch_warnings():
            # The text is cut on purpose, and the page says so.
            warnings.simplefilter("ignore", TruncationWarning)
            report = collect_report(
                model,
                text,
                name=name_of_model(self.model),
                by=self.by,
                tokens=self.tokens,
                pattern_tokens=self.pattern_tokens,
                syntax=self.annotated.syntax,
                coreference=self.annotated.coreference or None,
                on_progress=lambda step: print(step, file=sys.stderr, flush=True),
            )
        source = "articles that come with manyheads" if self.text is None else "the text of --text"
        path = self.image or self.file
        source = source if path is None else path.name
        origin = f"Made on {time.strftime('%d %B %Y')} from {source}."
        # The file that the suggested commands read.
        file = "text.txt" if self.file is None else str(self.file)
        page = render_report(report, model_path=self.model, text_file=file, made=origin)
        size = write_report(page, self.out)
        print_report(report, model_path=self.model, text_file=file)
        if self.json is not None:
            arguments.write_json(self.json, report_json(report))
        if self.pictures is not None:
            from manyheads.report.pictures import draw_pictures

            for path in draw_pictures(report, self.pictures):
                print(f"saved {path}")
        seconds = time.monotonic() - started
        print(f"saved the report to {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)")

    def _input(self) -> str | list[str] | Path:
        """The texts, or the path of an image."""
        arguments.check_exclusive("--text and --file", self.text, self.file)
        if self.image is not None:
            if self.text is not None or self.file is not None:
                raise InputError("--image excludes --text and --file", "give one of them")
            return self.image
        if self.text is not None:
            return self.text
        if self.file is None:
            from manyheads.lens.inputs.synthetic import passages

            return passages()
        return inputs.read_texts(self.file)


def name_of_model(model: str) -> str:
    """The name of a model: that of its folder, or of the run that saved it.

    >>> name_of_model("gpt2/"), name_of_model("org/name"), name_of_model("runs/first/model")
    ('gpt2', 'name', 'first')
    """
    path = Path(model)
    run = path.resolve().parent.name if path.name == MODEL else ""
    return run or path.name or model
