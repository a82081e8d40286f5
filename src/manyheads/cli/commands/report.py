"""manyheads report: one HTML file that shows what every head of a model does on a text."""

import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from manyheads.cli.arguments import (
    DEFAULT_MODEL,
    DeviceName,
    JsonFile,
    LineFiles,
    OneText,
    OptionalModel,
    TextFile,
    check_json,
    check_out_folder,
    open_model,
    write_json,
)
from manyheads.errors import InputError, TruncationWarning
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    import numpy as np
    from jaxtyping import Float
    from rich.table import Table

    from manyheads.lens.results.addresses import Address
    from manyheads.report.data import ReportData
    from manyheads.report.inputs import ReportImage

# The folder that training saves a model to, inside the folder of the run.
MODEL = "model"
MAX_ROWS = 32
MAX_TOKENS = 48
COLUMNS = ("normalized_entropy", "previous_token", "first_token")


@dataclass(frozen=True, slots=True)
class Report:
    """Write one HTML file that shows what every head of a model does on a text.

    For example: manyheads report house-gpt --file text.txt -o report.html
    """

    model: OptionalModel = DEFAULT_MODEL
    """The folder of a model with a tokenizer, a bundled model, or a model of the hub: org/name."""

    text: OneText = None
    """The text to read; without --text and --file, short articles that come with manyheads."""

    file: TextFile = None
    """A UTF-8 file with the text to read."""

    image: Annotated[Path | None, tyro.conf.arg(metavar="IMAGE", help_behavior_hint="")] = None
    """A PNG or JPEG file to read instead of a text, for a vision model."""

    out: Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="HTML")] = Path("report.html")
    """The HTML file to write; it opens without a network and without other files."""

    tokens: int = 4096
    """How many tokens of the text to measure on."""

    pattern_tokens: int = 256
    """How many tokens to show with their attention patterns."""

    by: Literal["auto", "ablation", "gradient", "none"] = "auto"
    """How to measure the importance of a head: exactly by ablation, or by gradients."""

    syntax: TextFile = None
    """A treebank in CoNLL-U, to find syntactic heads with."""

    coreference: LineFiles = ()
    """Two files of counterbalanced text with mentions and pronouns in brackets, as of WinoBias."""

    pictures: Annotated[
        Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(none are drawn)")
    ] = None
    """A folder to draw the atlas, one head and one layer into, as PNG files."""

    json: JsonFile = None
    """A JSON file to save every measure of every head to."""

    device: DeviceName = "auto"
    """The device to compute on: cpu, cuda or cuda:1; by default CUDA where available."""

    def run(self) -> int:
        """Measure, write the file, print the heads and what to try next."""
        from manyheads.report import check_report_path, render_report, write_report

        check_report_path(self.out)
        check_json(self.json)
        check_out_folder(self.pictures, flag="--pictures")
        text = self._input()

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
                tokens=self.tokens,
                pattern_tokens=self.pattern_tokens,
                syntax=self.syntax,
                coreference=self.coreference or None,
                on_progress=lambda step: print(step, file=sys.stderr, flush=True),
            )
        source = "articles that come with manyheads" if self.text is None else "the text of --text"
        path = self.image or self.file
        source = source if path is None else path.name
        made = f"Made on {time.strftime('%d %B %Y')} from {source}."
        # The file that the suggested commands read.
        file = "text.txt" if self.file is None else str(self.file)
        page = render_report(report, model_path=self.model, text_file=file, made=made)
        size = write_report(page, self.out)
        _print(report, model_path=self.model, text_file=file)
        if self.json is not None:
            from manyheads.report import report_json

            write_json(self.json, report_json(report))
        if self.pictures is not None:
            for path in _draw_pictures(report, self.pictures):
                print(f"saved {path}")
        seconds = time.monotonic() - started
        print(f"saved the report to {self.out} ({size / 1e6:.2f} MB, {seconds:.0f} s)")
        return 0

    def _input(self) -> str | Path:
        """The text, or the path of an image."""
        if self.text is not None and self.file is not None:
            raise InputError("--text and --file exclude each other", "give one of them")
        if self.image is not None and (self.text is not None or self.file is not None):
            raise InputError("--image excludes --text and --file", "give one of them")
        if self.image is not None:
            return self.image
        if self.text is not None:
            return self.text
        if self.file is None:
            from manyheads.lens.inputs.synthetic import passages

            return "\n\n".join(passages())
        from manyheads.report.inputs import read_file

        return read_file(self.file, max(self.tokens, self.pattern_tokens))


def name_of_model(model: str) -> str:
    """The name of a model: that of its folder, or of the run that saved it.

    >>> name_of_model("gpt2/"), name_of_model("org/name"), name_of_model("runs/first/model")
    ('gpt2', 'name', 'first')
    """
    path = Path(model)
    run = path.resolve().parent.name if path.name == MODEL else ""
    return run or path.name or model


def _print(report: "ReportData", *, model_path: str, text_file: str) -> None:
    """Print the most important heads, or all if they are few, and what to try next."""
    from manyheads.console import TerminalPage
    from manyheads.report.data import suggest_commands

    page = TerminalPage()
    heads, layers = report.heads, len(report.statistics.blocks)
    page.title(f"{report.name}: {pluralise(heads, 'head')} in {pluralise(layers, 'layer')}")
    page.blank_line()
    page.show(_table(report))
    if heads > MAX_ROWS:
        page.paragraph(f"and {heads - MAX_ROWS} more, in the report", style="dim")
    page.blank_line()
    page.title("What to try next")
    for each in suggest_commands(report, model_path=model_path, text_file=text_file):
        page.paragraph(f"{each.title}: {each.command}")
    page.blank_line()


def _table(report: "ReportData") -> "Table":
    import numpy as np
    from rich.table import Table
    from rich.text import Text

    from manyheads.console import heat
    from manyheads.lens.measure.measures import describe_measure, format_value

    table = Table("Head", "Kind", box=None, pad_edge=False)
    importance = report.importance
    if importance is not None:
        table.add_column(describe_measure(importance.measure).title, justify="right")
    columns = {name: describe_measure(name) for name in COLUMNS if name in report.statistics}
    for about in columns.values():
        table.add_column(about.title, justify="right")
    table.add_column("")
    flags = report.inspection.flags()
    order = list(range(report.heads))
    if report.heads > MAX_ROWS and importance is not None:
        order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()
    for index in order[:MAX_ROWS]:
        address = report.inspection.addresses[index]
        cells: list[Text | str] = [str(address), report.inspection.best_kind(address)]
        if importance is not None:
            cells.append(format_value(float(importance.change[index])))
        for name, about in columns.items():
            value = float(report.statistics.means[name][index])
            style = "" if np.isnan(value) else heat(value)
            cells.append(Text(f" {format_value(value, about.unit):>5} ", style=style))
        table.add_row(*cells, Text(", ".join(flags[address]), style="red"))
    return table


def _draw_pictures(report: "ReportData", folder: Path) -> list[Path]:
    """Draw the atlas, the head with the clearest pattern and its layer; return the paths."""
    from manyheads.pictures import draw_grid, draw_head_map

    folder.mkdir(parents=True, exist_ok=True)
    best = _clearest(report)
    layer = [each for each in report.statistics.addresses if each.head.layer == best.head.layer]
    maps = _patterns(report, layer)
    tokens = list(report.input.tokens)[:MAX_TOKENS]
    paths = [
        folder / "atlas.png",
        folder / f"head-{best}.png",
        folder / f"layer-{best.head.layer}.png",
    ]
    _draw_atlas(report, paths[0])
    kind = report.kinds.best(best)
    draw_head_map(
        maps[layer.index(best)][: len(tokens), : len(tokens)],
        tokens,
        paths[1],
        title=f"{report.name} {best}: {kind}",
        subtitle=f"on the first {len(tokens)} tokens of the text",
    )
    draw_grid(
        [maps],
        paths[2],
        numbers=[best.head.layer],
        names={(0, each.head.head): report.kinds.best(each) for each in layer},
        title=f"{report.name}, layer {best.head.layer}",
        subtitle=f"queries down, keys across, {len(report.input)} tokens",
    )
    if report.input.image is not None:
        paths.append(folder / f"class-{best.head.layer}.png")
        _draw_class(report, report.input.image, layer, maps, paths[-1])
    return paths


def _draw_class(
    report: "ReportData",
    image: "ReportImage",
    heads: "Sequence[Address]",
    maps: "Sequence[Float[np.ndarray, 't t']]",
    path: Path,
) -> None:
    """Draw the attention of the class token over the image."""
    import numpy as np

    from manyheads.pictures import draw_over_image

    grids = [each[0, 1 + image.registers :].reshape(image.rows, image.columns) for each in maps]
    pixels = image.pixels.float().cpu()
    # Scale the pixels to [0, 1], whatever range the model reads.
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-9)
    draw_over_image(
        scaled.expand(3, -1, -1).permute(1, 2, 0).numpy(),
        np.stack(grids),
        path,
        names=[str(each) for each in heads],
        title=f"{report.name}: attention of the class token",
    )


def _clearest(report: "ReportData") -> "Address":
    """The best induction head if there is one, else the head with the highest score."""

    def rank(address: "Address") -> tuple[bool, float]:
        labels = report.kinds.of(address)
        return (bool(labels) and labels[0].kind == "induction", labels[0].score if labels else 0.0)

    return max(report.statistics.addresses, key=rank)


def _draw_atlas(report: "ReportData", path: Path) -> None:
    from manyheads.lens.measure.measures import describe_measure
    from manyheads.pictures import draw_atlas

    importance = report.importance
    name = "normalized_entropy" if importance is None else importance.measure
    values = report.statistics.means[name] if importance is None else importance.change
    numbers, labels, start = [], [], 0
    for block in report.statistics.blocks:
        numbers.append(values[start : start + block.heads].tolist())
        labels.append([report.kinds.best(address) for address in block.addresses])
        start += block.heads
    title = f"The {report.heads} heads of {report.name}"
    draw_atlas(
        numbers,
        path,
        labels=labels,
        measure=describe_measure(name).title,
        title=title,
        subtitle="each with its kind",
    )


def _patterns(report: "ReportData", heads: "Sequence[Address]") -> "list[Float[np.ndarray, 't t']]":
    """All weights of some heads; the report itself has only the largest of each query."""
    from manyheads.lens import patterns

    measured = patterns(report.model, report.input.shown, heads)
    return [measured.of(head).weights.float().cpu().numpy() for head in heads]
