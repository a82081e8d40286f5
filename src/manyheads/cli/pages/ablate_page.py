"""The page of `manyheads ablate`: heads by what they are worth, the harmful, the greedy order."""

from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from manyheads.console import Ink, visible
from manyheads.formatting import pluralise

if TYPE_CHECKING:
    from manyheads.lens.causal.ablation import Ablation, Cumulative


def show(
    console: Console, name: str, found: "Ablation", taken: "Cumulative | None", of: str
) -> None:
    """Print what was measured."""
    ink, facts = Ink(console), found.facts
    ink.title(visible(name))
    error = facts["baseline_error"]
    told = "" if error is None else f" ±{error:.2g}"
    ink.say(
        f"The {facts['metric']} of the whole model is {found.baseline:.4f}{told} over "
        f"{pluralise(facts['texts'], of)}. "
        f"Heads are replaced by {_replacement(facts['replace_with'])}, one at a time."
    )
    ink.heading("Heads")
    ink.show(_heads(found))
    if facts.get("rank_correlation") is not None:
        ink.say(
            f"The importance that one backward pass gives (Michel et al.) ranks heads as ablation "
            f"does to {facts['rank_correlation']:.2f} (Spearman)."
        )
    harmful = found.harmful()
    names = ", ".join(f"{head} ({change:+.4f})" for head, change in harmful)
    ink.say(f"Better without, by more than a standard error: {names or 'none'}.")
    if taken is not None:
        ink.heading("One after another")
        ink.show(_order(taken))


def _replacement(replace_with: str) -> str:
    words = {"zero": "zero", "mean": "their mean", "resample": "their output in another text"}
    return words[replace_with]


def _heads(found: "Ablation") -> Table:
    names = [name for name in ("metric", "change", "importance", "predicted") if name in found]
    columns = [found[name] for name in names]
    lower = found.facts["better"] == "lower"
    table = Table("head", box=None, pad_edge=False)
    for name in names:
        title = found.facts["metric"] + " without" if name == "metric" else name
        table.add_column(title, justify="right")
        if name == "change":
            table.add_column("±", justify="right")
    for head, _ in found["change"].ranked(smallest=not lower):
        cells = []
        for column in columns:
            cells.append(f"{column.of(head):{'+' if column.name == 'change' else ''}.4f}")
            if column.name == "change":
                error = column.error_of(head)
                cells.append("" if error != error else f"{error:.2g}")
        table.add_row(str(head), *cells)
    return table


def _order(taken: "Cumulative") -> Table:
    table = Table("", "head", box=None, pad_edge=False)
    for name in ("value", "change", "±"):
        table.add_column(name, justify="right")
    table.add_row("0", "none", f"{taken.baseline:.4f}", "", "")
    for row in taken.rows():
        error = row["change_error"]
        table.add_row(
            str(row["taken"]),
            row["head"],
            f"{row['value']:.4f}",
            f"{row['change']:+.4f}",
            "" if error is None or error != error else f"{error:.2g}",
        )
    return table
