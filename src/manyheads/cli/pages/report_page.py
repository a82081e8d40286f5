"""What `manyheads report` prints and draws beside its file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.console import Ink, heat
from manyheads.formatting import pluralise
from manyheads.lens.measure.measures import describe_measure, format_value
from manyheads.lens.results.addresses import Address
from manyheads.pictures import draw_atlas, draw_grid, draw_head_map, draw_over_image
from manyheads.report.data import ReportData, suggest_commands
from manyheads.report.inputs import ReportImage

MOST_ROWS = 32
MOST_TOKENS = 48
COLUMNS = ("normalized_entropy", "previous_token", "first_token")


def show(console: Console, report: ReportData, *, where: str, file: str) -> None:
    """Print the most important heads, or all of a few, and what to try next."""
    ink = Ink(console)
    heads, layers = report.heads, len(report.statistics.blocks)
    ink.title(f"{report.name}: {pluralise(heads, 'head')} in {pluralise(layers, 'layer')}")
    ink.space()
    ink.show(_table(report))
    if heads > MOST_ROWS:
        ink.say(f"and {heads - MOST_ROWS} more, in the report", style="dim")
    ink.space()
    ink.title("What to try next")
    for each in suggest_commands(report, model_path=where, text_file=file):
        ink.say(f"{each.title}: {each.command}")
    ink.space()


def _table(report: ReportData) -> Table:
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
    if report.heads > MOST_ROWS and importance is not None:
        order = np.argsort(-np.nan_to_num(importance.change, nan=-np.inf)).tolist()
    for place in order[:MOST_ROWS]:
        address = report.inspection.addresses[place]
        cells: list[Text | str] = [str(address), report.inspection.best_kind(address)]
        if importance is not None:
            cells.append(format_value(float(importance.change[place])))
        for name, about in columns.items():
            value = float(report.statistics.means[name][place])
            style = "" if np.isnan(value) else heat(value)
            cells.append(Text(f" {format_value(value, about.unit):>5} ", style=style))
        table.add_row(*cells, Text(", ".join(flags[address]), style="red"))
    return table


def draw_all(report: ReportData, folder: Path) -> list[Path]:
    """Draw the atlas, the head with the clearest pattern and its layer; return the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    best = _clearest(report)
    layer = [each for each in report.statistics.addresses if each.head.layer == best.head.layer]
    tokens = list(report.input.tokens)[:MOST_TOKENS]
    paths = [
        folder / "atlas.png",
        folder / f"head-{best}.png",
        folder / f"layer-{best.head.layer}.png",
    ]
    _draw_atlas(report, paths[0])
    kind = report.kinds.best(best)
    whole = _dense(report, best)
    draw_head_map(
        whole[: len(tokens), : len(tokens)],
        tokens,
        paths[1],
        title=f"{report.name} {best}: {kind}",
        subtitle=f"on the first {len(tokens)} tokens of the text",
    )
    draw_grid(
        [[_dense(report, each) for each in layer]],
        paths[2],
        numbers=[best.head.layer],
        names={(0, each.head.head): report.kinds.best(each) for each in layer},
        title=f"{report.name}, layer {best.head.layer}",
        subtitle=f"queries down, keys across, {len(report.input)} tokens",
    )
    if report.input.image is not None:
        paths.append(folder / f"class-{best.head.layer}.png")
        _draw_class(report, report.input.image, layer, paths[-1])
    return paths


def _draw_class(
    report: ReportData, image: ReportImage, heads: Sequence[Address], path: Path
) -> None:
    """Draw the attention of the class token over the image."""
    seen = [_dense(report, each)[0, 1:].reshape(image.rows, image.columns) for each in heads]
    pixels = image.pixels.float().cpu()
    # Scale the pixels to [0, 1], whatever range the model reads.
    scaled = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-9)
    draw_over_image(
        scaled.expand(3, -1, -1).permute(1, 2, 0).numpy(),
        np.stack(seen),
        path,
        names=[str(each) for each in heads],
        title=f"{report.name}: attention of the class token",
    )


def _clearest(report: ReportData) -> Address:
    """The best induction head if there is one, else the head with the highest score."""

    def rank(address: Address) -> tuple[bool, float]:
        labels = report.kinds.of(address)
        return (bool(labels) and labels[0].kind == "induction", labels[0].score if labels else 0.0)

    return max(report.statistics.addresses, key=rank)


def _draw_atlas(report: ReportData, path: Path) -> None:
    importance = report.importance
    name = "normalized_entropy" if importance is None else importance.measure
    values = report.statistics.means[name] if importance is None else importance.change
    numbers: list[list[float]] = []
    labels: list[list[str]] = []
    start = 0
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


def _dense(report: ReportData, address: Address) -> Float[np.ndarray, "t t"]:
    """A pattern as a square matrix; weights that were not kept are 0."""
    largest = next(each for each in report.largest if each.address == address)
    length = len(report.input)
    pattern = np.zeros((length, length), dtype=np.float32)
    np.put_along_axis(pattern, largest.keys.cpu().numpy(), largest.weights.cpu().numpy(), axis=1)
    return pattern
