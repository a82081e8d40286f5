"""The page of `manyheads attribute`: what speaks for a word, and what each layer would say."""

from rich.console import Console
from rich.table import Table
from rich.text import Text

from manyheads.console import Ink, visible
from manyheads.lens.attribution.attribute import MOST_ROWS, Attribution

# So much of the end of a text is shown.
END = 60


def show(console: Console, name: str, found: Attribution, *, whole: bool = False) -> None:
    """Print what was traced, the whole of it or what matters most."""
    ink = Ink(console)
    ink.title(visible(name))
    end = visible(found.text.replace("\n", " "))
    end = f"…{end[-END:]}" if len(end) > END else end
    ink.say(f"After “{end}”: {visible(found.told)}.")
    ink.heading("Tokens" if found.by_token else "Parts")
    table = found.table(None if whole else MOST_ROWS)
    # It speaks of Python.
    table.caption = None
    ink.show(table)
    more = len(found.shares) - table.row_count
    if more:
        ink.say(f"and {more} more: --all shows them", style="dim")
    if found.steps:
        ink.heading("Logit lens")
        ink.show(_steps(found))


def _steps(found: Attribution) -> Table:
    table = Table("after", "says", box=None, pad_edge=False)
    for column in ("probability", f"of {visible(repr(found.target))}", "its rank"):
        table.add_column(column, justify="right")
    for step in found.steps:
        table.add_row(
            "embeddings" if step.layer < 0 else f"layer {step.layer}",
            Text(visible(repr(step.says))),
            f"{step.probability:.3f}",
            f"{step.answer:.3f}",
            str(step.rank + 1),
        )
    return table
