"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.cli import arguments, inputs
from manyheads.cli.options import AnnotatedTextOptions, DeviceOptions
from manyheads.errors import InputError, TruncationWarning

if TYPE_CHECKING:
    from manyheads.lens.circuit_discovery.circuit import Circuit
    from manyheads.report.data import ReportData

# The folder that training saves a model to, inside the folder of the run.
MODEL = "model"


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html

    Of two models it compares the heads: manyheads report house-gpt house-gpt-gated -o both.html
    """

    model: arguments.AnyModel = arguments.DEFAULT_MODEL

    second: Annotated[arguments.PositionalText, arguments.metavar("[OTHER]", "(none)")] = ""
    """A second model, to compare with the first on the same text."""

    text: arguments.OptionalText = None
    """The text to read; without --text and --file, short articles that come with manyheads. For
    an encoder-decoder: a source, a tab and its target."""

    file: arguments.TextFile = None
    """A file of texts separated by blank lines, or one per line without any; for an encoder-decoder
    lines of source, tab and target."""

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

    circuit: Annotated[Path | None, arguments.metavar("FILE")] = None
    """A circuit of the model, saved by manyheads circuit, to explore in the report."""

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
        if self.second and (self.pictures or self.circuit):
            flag = "--pictures are" if self.pictures else "--circuit is"
            raise InputError(f"{flag} of one model, not of two", "leave one of them out")
        circuit = self._circuit()
        text = self._input()
        started = time.monotonic()
        source = "articles that come with manyheads" if self.text is None else "the text of --text"
        path = self.image or self.file
        source = source if path is None else path.name
        origin = f"Made on {time.strftime('%d %B %Y')} from {source}."
        size = self._compare(text, origin) if self.second else self._report(text, origin, circuit)
        seconds = time.monotonic() - started
        print(f"saved the report to {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)")

    def _collect(self, name: str, text: Any) -> "ReportData":
        """Measure one model."""
        from manyheads.report import collect_report

        model = self.compute.open(name)
        if model.reads_pairs and not isinstance(text, Path):
            texts = [text] if isinstance(text, str) else text
            is_default = self.text is None and self.file is None
            text = [(part, part) for part in texts] if is_default else inputs.split_pairs(texts)
        with warnings.catch_warnings():
            # The text is cut on purpose, and the page says so.
            warnings.simplefilter("ignore", TruncationWarning)
            return collect_report(
                model,
                text,
                name=name_of_model(name),
                by=self.by,
                tokens=self.tokens,
                pattern_tokens=self.pattern_tokens,
                syntax=self.annotated.syntax,
                coreference=self.annotated.coreference or None,
                on_progress=lambda step: print(step, file=sys.stderr, flush=True),
            )

    def _circuit(self) -> "Circuit | None":
        """The circuit of the file, read before anything is measured."""
        if self.circuit is None:
            return None
        from manyheads.lens import load
        from manyheads.lens.circuit_discovery.circuit import Circuit

        circuit = load(self.circuit)
        if not isinstance(circuit, Circuit):
            raise InputError(
                f"--circuit {self.circuit} holds no circuit: its type is {type(circuit).__name__}",
                "name a file of manyheads circuit -o",
            )
        return circuit

    def _report(self, text: Any, origin: str, circuit: "Circuit | None") -> int:
        """Write the page of one model, and return its size."""
        from manyheads.report import render_report, report_json, write_report
        from manyheads.report.terminal import print_report

        report = self._collect(self.model, text)
        # The file that the suggested commands read.
        file = "text.txt" if self.file is None else str(self.file)
        page = render_report(
            report, model_path=self.model, text_file=file, made=origin, circuit=circuit
        )
        size = write_report(page, self.out)
        print_report(report, model_path=self.model, text_file=file)
        if self.json is not None:
            arguments.write_json(self.json, report_json(report))
        if self.pictures is not None:
            from manyheads.report.pictures import draw_pictures

            for path in draw_pictures(report, self.pictures):
                print(f"saved {path}")
        return size

    def _compare(self, text: Any, origin: str) -> int:
        """Write the page that compares two models, and return its size."""
        from manyheads.report import (
            compare_reports,
            comparison_json,
            render_comparison,
            write_report,
        )
        from manyheads.report.terminal import print_comparison

        comparison = compare_reports(
            self._collect(self.model, text), self._collect(self.second, text)
        )
        size = write_report(render_comparison(comparison, origin=origin), self.out)
        print_comparison(comparison)
        if self.json is not None:
            arguments.write_json(self.json, comparison_json(comparison))
        return size

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
