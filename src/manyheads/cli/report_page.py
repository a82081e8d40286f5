"""What `manyheads report` prints and draws beside its file."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.cli.ink import Ink, heat
from manyheads.lens.addresses import Address
from manyheads.pictures.atlas import draw_atlas
from manyheads.pictures.grid import draw_grid
from manyheads.pictures.head_map import draw_head_map
from manyheads.pictures.over_image import draw_over_image
from manyheads.report.advice import advise
from manyheads.report.examine import Findings
from manyheads.report.image import Picture
from manyheads.report.sections import flags_of, number
from manyheads.wording import counted

__all__ = ["draw_all", "show"]

MOST_ROWS = 32
MOST_TOKENS = 48
COLUMNS = (("normalized_entropy", "even"), ("previous_token", "previous_token"), ("first_token", "first"))


def show(console: Console, found: Findings, *, where: str, file: str) -> None:
    """The heads that matter most, or all of few, and what to do next."""
    ink = Ink(console)
    heads = found.heads
    ink.title(
        f"{found.name}: {counted(heads, 'head')} in {counted(len(found.seen.blocks), 'layer')}"
    )
    ink.space()
    ink.show(_table(found))
    if heads > MOST_ROWS:
        ink.say(f"and {heads - MOST_ROWS} more, in the report", style="dim")
    ink.space()
    ink.title("What to try next")
    for each in advise(found, where=where, file=file):
        ink.say(f"{each.title}: {each.command}")
    ink.space()


def _table(found: Findings) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("head")
    table.add_column("kind")
    columns = [(name, title) for name, title in COLUMNS if name in found.seen]
    worth = found.worth
    if worth is not None:
        table.add_column(
            "loss without" if worth.metric == "loss" else "likeness lost", justify="right"
        )
    for _, title in columns:
        table.add_column(title, justify="right")
    table.add_column("")
    flags = flags_of(found)
    order = list(range(found.heads))
    if found.heads > MOST_ROWS and worth is not None:
        order = np.argsort(-np.nan_to_num(worth.loses, nan=-np.inf)).tolist()
    for place in order[:MOST_ROWS]:
        address = found.seen.addresses[place]
        cells: list[Text | str] = [str(address), found.kinds.best(address)]
        if worth is not None:
            cells.append(number(float(worth.loses[place])))
        for name, _ in columns:
            value = float(found.seen.means[name][place])
            style = heat(value) if not np.isnan(value) else ""
            cells.append(Text(f" {number(value, share=True):>4} ", style=style))
        table.add_row(*cells, Text(", ".join(flags[str(address)]), style="red"))
    return table


def draw_all(found: Findings, folder: Path) -> list[Path]:
    """The atlas, the head with the clearest pattern and its layer, as PNG; where each lies."""
    folder.mkdir(parents=True, exist_ok=True)
    best = _clearest(found)
    layer = [each for each in found.seen.addresses if each.head.layer == best.head.layer]
    tokens = list(found.reading.letters)[:MOST_TOKENS]
    paths = [
        folder / "atlas.png",
        folder / f"head-{best}.png",
        folder / f"layer-{best.head.layer}.png",
    ]
    _draw_atlas(found, paths[0])
    kind = found.kinds.best(best)
    whole = _dense(found, best)
    draw_head_map(
        whole[: len(tokens), : len(tokens)],
        tokens,
        paths[1],
        title=f"{found.name} {best}: {kind}",
        subtitle=f"on the first {len(tokens)} tokens of the text",
    )
    draw_grid(
        [[_dense(found, each) for each in layer]],
        paths[2],
        numbers=[best.head.layer],
        names={(0, each.head.head): found.kinds.best(each) for each in layer},
        title=f"{found.name}, layer {best.head.layer}",
        subtitle=f"queries down, keys across, {len(found.reading)} tokens",
    )
    if found.reading.picture is not None:
        paths.append(folder / f"class-{best.head.layer}.png")
        _draw_class(found, found.reading.picture, layer, paths[-1])
    return paths


def _draw_class(found: Findings, picture: Picture, heads: Sequence[Address], path: Path) -> None:
    """Where the class token looks, laid over the image."""
    seen = [_dense(found, each)[0, 1:].reshape(picture.rows, picture.columns) for each in heads]
    pixels = picture.pixels.float().cpu()
    # Back into the range of colours, whatever range the model reads.
    image = (pixels - pixels.min()) / (pixels.max() - pixels.min()).clamp_min(1e-9)
    draw_over_image(
        image.expand(3, -1, -1).permute(1, 2, 0).numpy(),
        np.stack(seen),
        path,
        names=[str(each) for each in heads],
        title=f"{found.name}: where the class token looks",
    )


def _clearest(found: Findings) -> Address:
    """An induction head if there is one, or the head that is surest of its kind."""

    def rank(address: Address) -> tuple[bool, float]:
        labels = found.kinds.of(address)
        return (bool(labels) and labels[0].kind == "induction", labels[0].score if labels else 0.0)

    return max(found.seen.addresses, key=rank)


def _draw_atlas(found: Findings, path: Path) -> None:
    worth = found.worth
    values = found.seen.means["normalized_entropy"] if worth is None else worth.loses
    measure = (
        "evenness"
        if worth is None
        else "loss added without the head"
        if worth.metric == "loss"
        else "likeness lost without it"
    )
    numbers: list[list[float]] = []
    labels: list[list[str]] = []
    start = 0
    for block in found.seen.blocks:
        numbers.append(values[start : start + block.heads].tolist())
        labels.append([found.kinds.best(address) for address in block.addresses])
        start += block.heads
    title = f"The {found.heads} heads of {found.name}"
    draw_atlas(
        numbers, path, labels=labels, measure=measure, title=title, subtitle="each with its kind"
    )


def _dense(found: Findings, address: Address) -> Float[np.ndarray, "t t"]:
    """A pattern as a square again; what was not kept is 0."""
    largest = next(each for each in found.largest if each.address == address)
    length = len(found.reading)
    pattern = np.zeros((length, length), dtype=np.float32)
    np.put_along_axis(pattern, largest.keys.cpu().numpy(), largest.weights.cpu().numpy(), axis=1)
    return pattern
