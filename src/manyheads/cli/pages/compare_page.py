"""The page of `manyheads compare`: the losses, the heads that moved most, what became of them."""

from rich.console import Console

from manyheads.console import Ink, visible
from manyheads.lens.diff.comparison import Comparison

NARROWEST = 140


def show(console: Console, before: str, after: str, found: Comparison) -> None:
    """Print what changed."""
    # A file has no edge, and a row here is long.
    if not console.is_terminal:
        console.width = max(console.width, NARROWEST)
    width = console.width
    ink = Ink(console)
    console.width = width
    ink.title(visible(f"{before} → {after}"))
    for line in str(found).splitlines():
        ink.say(visible(line))
    if not any(shift > 0 for _, shift in found.ranked()):
        return
    ink.heading("Heads that moved most")
    console.print(found.table())
    ink.say("shift: the change over all measures, in units of how much heads differ.", "dim")
