"""What the pages of the terminal are drawn with: headings, rows of numbers, heat."""

from collections.abc import Sequence

from rich.cells import cell_len, set_cell_size
from rich.color import Color
from rich.console import Console, RenderableType
from rich.padding import Padding
from rich.style import Style
from rich.table import Table
from rich.text import Text

WIDEST = 100
INDENT = 3
NUMBER = 8

# Five stops of cividis, the same to readers who see colours differently.
STOPS = ((0, 34, 78), (65, 77, 107), (124, 123, 120), (188, 175, 111), (254, 232, 56))


class Ink:
    """Writes on a console of a comfortable width, with all but headings set in a little."""

    def __init__(self, console: Console) -> None:
        self.console = console
        console.width = min(console.width, WIDEST)
        self.width = console.width - INDENT

    def title(self, text: str) -> None:
        self.console.print(Text(text, style="bold"))

    def heading(self, title: str, formula: str = "", right: str = "") -> None:
        """A line across the page; the formula is left out where it finds no room."""
        room = self.console.width - cell_len(title) - cell_len(right) - 2
        middle = f"  {formula} " if formula and cell_len(formula) + 6 <= room else ""
        line = Text("─" * max(3, room - cell_len(middle)), style="dim")
        parts = [Text(f"{title} ", style="bold cyan"), Text(middle, style="magenta"), line]
        self.console.print()
        self.console.print(Text.assemble(*parts, f" {right}" if right else ""), no_wrap=True)

    def say(self, text: str, style: str = "") -> None:
        for line in Text(text, style=style).wrap(self.console, self.width):
            line.rstrip()
            self.console.print(Text(" " * INDENT) + line)

    def show(self, what: RenderableType) -> None:
        self.console.print(Padding(what, (0, 0, 0, INDENT), expand=False))

    def space(self) -> None:
        self.console.print()

    def rows(self, rows: Sequence[tuple[str, Sequence[float]]], strong: int = -1) -> None:
        """Labelled rows of numbers, as many of each as the page has room for."""
        labels = [visible(label) for label, _ in rows]
        widest = min(24, max(cell_len(label) for label in labels))
        shown = min(8, max(1, (self.width - widest - 5) // NUMBER))
        table = Table.grid(padding=(0, 0))
        for index, (_, numbers) in enumerate(rows):
            label = Text(short(labels[index], widest))
            cells = [Text(f"{number:{NUMBER}.3f}") for number in numbers[:shown]]
            more = Text("  …" if len(numbers) > shown else "", style="dim")
            style = "bold" if index == strong else ""
            table.add_row(Text("▸ " if index == strong else "  "), label, *cells, more, style=style)
        self.show(table)


def visible(text: str) -> str:
    """The text without characters that would move the cursor or change colours."""
    return "".join(letter if letter.isprintable() else "�" for letter in text)


def short(text: str, width: int) -> str:
    """The text in exactly so many columns, cut with an ellipsis where it is longer.

    >>> short("искусственным", 9), short("Я", 3)
    ('искусств…', 'Я  ')
    """
    if cell_len(text) > width:
        text = set_cell_size(text, width - 1).rstrip() + "…"
    return set_cell_size(text, width)


def heat(share: float) -> Style:
    """A background between dark blue for 0 and yellow for 1, under letters that stand out."""
    place = min(max(share, 0.0), 1.0) * (len(STOPS) - 1)
    low = min(int(place), len(STOPS) - 2)
    mixed = [
        round(below + (above - below) * (place - low))
        for below, above in zip(STOPS[low], STOPS[low + 1], strict=True)
    ]
    letters = Color.parse("white" if share < 0.5 else "black")
    return Style(color=letters, bgcolor=Color.from_rgb(*mixed))
