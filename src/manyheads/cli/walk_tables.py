"""The tables of the walk: tokens, a padded batch, scores beside the kernel's, weights as heat."""

from collections.abc import Mapping, Sequence

from jaxtyping import Float
from rich import box
from rich.cells import cell_len
from rich.table import Table
from rich.text import Text
from torch import Tensor

from manyheads.cli.ink import heat, short, visible
from manyheads.lens.walk import Stage, Walk

__all__ = ["batch_table", "scores_table", "token_tables", "weights_table"]

LONGEST_WORD = 14


def token_tables(walk: Walk, places: range, names: Sequence[str], width: int) -> list[Table]:
    """Places, words and ids in columns, in as many tables as the width asks for."""
    words, ids = [visible(word) for word in walk.tokens], walk.ids[walk.sentence]
    margin = max(map(cell_len, names)) + 2
    tables = []
    for line in _lines(
        [(place, max(3, cell_len(words[place])) + 2) for place in places], width - margin
    ):
        table = Table.grid(padding=(0, 2, 0, 0))
        bold = ["bold" if place == walk.position else "" for place in line]
        rows = (
            [Text(str(place), style="dim") for place in line],
            [Text(words[place], style=style) for place, style in zip(line, bold, strict=True)],
            [Text(str(ids[place])) for place in line],
        )
        for name, row in zip(names, rows, strict=True):
            table.add_row(Text(name, style="dim"), *row)
        tables.append(table)
    return tables


def _lines(sized: Sequence[tuple[int, int]], width: int) -> list[list[int]]:
    """Places in lines that are no wider than the page."""
    lines: list[list[int]] = [[]]
    used = 0
    for place, size in sized:
        if lines[-1] and used + size > width:
            lines.append([])
            used = 0
        lines[-1].append(place)
        used += size
    return lines


def batch_table(walk: Walk, padding: str, width: int) -> Table:
    """The sentences as a rectangle, as many of its columns as there is room for."""
    longest = max(map(len, walk.sentences))
    filler = Text(padding, style="dim")
    rows = [[Text(visible(word)) for word in sentence] for sentence in walk.sentences]
    rows = [row + [filler] * (longest - len(row)) for row in rows]
    widths = _widths(rows, width - 16)
    whole = len(widths) == longest
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, header_style="dim")
    table.add_column("", no_wrap=True)
    for place, column in enumerate(widths):
        table.add_column(str(place), no_wrap=True, width=column, overflow="ellipsis")
    table.add_column("" if whole else f"… {longest - 1}", no_wrap=True)
    for index, row in enumerate(rows):
        chosen = index == walk.sentence
        number = f"{'▸' if chosen else ' '} {index}"
        more = Text("" if whole else "…", style="dim")
        table.add_row(number, *row[: len(widths)], more, style="bold" if chosen else "")
    return table


def _widths(rows: list[list[Text]], room: int) -> list[int]:
    """Of the columns that fit; the first is always shown."""
    widths: list[int] = []
    for column in zip(*rows, strict=True):
        width = min(LONGEST_WORD, max(3, *[cell.cell_len for cell in column]))
        room -= width + 2
        if room < 0 and widths:
            break
        widths.append(width)
    return widths


def scores_table(walk: Walk, keys: range, names: Mapping[str, str], width: int) -> Table:
    """The scores of the chosen token by hand, and beside them the kernel's."""
    kernel = walk[Stage.SCORES].model[walk.head, walk.position].tolist()
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name, title in names.items():
        if name == "key":
            table.add_column(title, no_wrap=True, max_width=max(8, min(24, width - 58)))
        else:
            table.add_column(title, no_wrap=True, justify="right")
    for key in keys:
        cell = walk.cell(key)
        table.add_row(
            Text(visible(walk.tokens[key])),
            f"{cell.product:.4f}",
            f"{cell.score:.4f}",
            f"{kernel[key]:.4f}",
            f"{abs(cell.score - kernel[key]):.1e}",
            style="bold" if key == walk.strongest_key else "",
        )
    return table


def weights_table(walk: Walk, window: range, sum_name: str, width: int) -> Table:
    """The pattern of the chosen head, or a window of it, as a heat map."""
    pattern = walk[Stage.WEIGHTS].model[walk.head]
    words = [visible(word) for word in walk.tokens]
    label = _label_width(words)
    column = max(6, min(11, (width - label - 10) // len(window)))
    table = Table.grid()
    header = [Text(short(words[key], column - 1) + " ", style="dim") for key in window]
    table.add_row("", "", *header, Text(f" {sum_name}", style="dim"))
    for query in window:
        chosen = query == walk.position
        table.add_row(
            "▸ " if chosen else "  ",
            Text(short(words[query], label)),
            *_heat_cells(pattern[query][window.start : window.stop], float(pattern.max()), column),
            f" {pattern[query].sum():.3f}",
            style="bold" if chosen else "",
        )
    return table


def _heat_cells(row: Float[Tensor, " s"], brightest: float, width: int) -> list[Text]:
    return [
        Text(f"{weight:.3f}".center(width), style=heat(weight / brightest))
        for weight in row.tolist()
    ]


def _label_width(words: Sequence[str]) -> int:
    return min(16, max(map(cell_len, words))) + 1
