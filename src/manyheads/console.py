"""Pages on a terminal: headings, paragraphs, rows of numbers, heat maps."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

MAX_WIDTH = 100
INDENT = 3
NUMBER_WIDTH = 8

# Five colors of cividis, which color-blind readers see alike.
COLORS = ((0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56))


class TerminalPage:
    """Prints a page of at most 100 columns, with everything but headings indented.

    Tables may be wider with `table_width`: as wide as the terminal, or that wide in a file.
    """

    def __init__(self, console: Console | None = None, *, table_width: int | None = None) -> None:
        self.console = Console() if console is None else console
        columns = min(self.console.width, MAX_WIDTH)
        if table_width is None:
            self.console.width = columns
        elif not self.console.is_terminal:
            self.console.width = max(self.console.width, table_width)
        self.width = columns - INDENT

    def title(self, text: str) -> None:
        self.console.print(Text(visible(text), style="bold"))

    def heading(self, title: str, formula: str = "", right: str = "") -> None:
        """A line across the page; the formula is left out where it does not fit."""
        columns = self.width + INDENT - cell_len(title) - cell_len(right) - 2
        middle = f"  {formula} " if formula and cell_len(formula) + 6 <= columns else ""
        line = Text("─" * max(3, columns - cell_len(middle)), style="dim")
        parts = [Text(f"{title} ", style="bold cyan"), Text(middle, style="magenta"), line]
        self.console.print()
        self.console.print(Text.assemble(*parts, f" {right}" if right else ""), no_wrap=True)

    def paragraph(self, text: str, style: str = "") -> None:
        self.wrapped(Text(text, style=style))

    def wrapped(self, text: Text) -> None:
        for line in text.wrap(self.console, self.width):
            line.rstrip()
            self.console.print(Text(" " * INDENT) + line)

    def show(self, content: RenderableType) -> None:
        self.console.print(Padding(content, (0, 0, 0, INDENT), expand=False))

    def blank_line(self) -> None:
        self.console.print()

    def number_rows(self, rows: Sequence[tuple[str, Sequence[float]]], strong: int = -1) -> None:
        """Labeled rows of numbers, as many of each as fit on the page."""
        labels = [visible(label) for label, _ in rows]
        widest = min(24, max(cell_len(label) for label in labels))
        count = min(8, max(1, (self.width - widest - 5) // NUMBER_WIDTH))
        table = Table.grid(padding=(0, 0))
        for index, (_, numbers) in enumerate(rows):
            label = Text(short(labels[index], widest))
            cells = [Text(f"{number:{NUMBER_WIDTH}.3f}") for number in numbers[:count]]
            more = Text("  …" if len(numbers) > count else "", style="dim")
            style = "bold" if index == strong else ""
            table.add_row(Text("▸ " if index == strong else "  "), label, *cells, more, style=style)
        self.show(table)


def visible(text: str) -> str:
    """The text without characters that would move the cursor or change colors."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def short(text: str, width: int) -> str:
    """The text in exactly `width` columns, cut with an ellipsis where it is longer.

    >>> short("искусственным", 9), short("Я", 3)
    ('искусств…', 'Я  ')
    """
    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    return set_cell_size(text, width)


def heat(fraction: float) -> Style:
    """A background between dark blue for 0 and yellow for 1, under readable text."""
    position = min(max(fraction, 0.0), 1.0) * (len(COLORS) - 1)
    low = min(int(position), len(COLORS) - 2)
    mixed = [
        round(below + (above - below) * (position - low))
        for below, above in zip(COLORS[low], COLORS[low + 1], strict=True)
    ]
    text = Color.parse("white" if fraction < 0.5 else "black")
    return Style(color=text, bgcolor=Color.from_rgb(*mixed))
