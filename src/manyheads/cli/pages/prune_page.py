"""The output of `manyheads prune`: what was removed and why, the curve, both models."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from manyheads.surgery.pipeline import PruningResult

MOST_NAMED = 20


def show(console: Console, done: "PruningResult", judges: str) -> None:
    """Print the table of what is removed, what it costs, and size and speed before and after."""
    selection = done.selection
    went = f"{selection.total:,} {selection.unit}"
    if selection.met:
        went = f"{selection.count:,} of {went} removed"
    console.print(f"{went} by {selection.by}, evaluated on {judges}", highlight=False)
    console.print(_curve(done))
    if selection.harmful:
        console.print(f"better without: {_named(selection.harmful_names)}", highlight=False)
    if done.before is not None and done.after is not None:
        console.print(_sides(done))


def _curve(done: "PruningResult") -> Table:
    selection = done.selection
    table = Table("", selection.unit.removesuffix("s"), "reason", box=None, pad_edge=False)
    for name in (selection.metric, "change", "±"):
        table.add_column(name, justify="right")
    table.add_row("0", "none", "the whole model", f"{selection.baseline:.4f}", "", "")
    for row in selection.rows():
        if not (row["selected"] or not selection.met):
            continue
        table.add_row(
            f"{row['removed']:,}",
            row["name"],
            row["reason"] + _harm(row),
            f"{row['value']:.4f}",
            f"{row['change']:+.4f}",
            # Of a single text no error is known.
            "" if isnan(row["change_error"]) else f"{row['change_error']:.2g}",
        )
    return table


def _harm(row: dict[str, Any]) -> str:
    """Whether the unit of a row is harmful, or how many of its units are."""
    if not row["harmful"]:
        return ""
    return ", harmful" if row["units"] == 1 else f", {row['harmful']} of them harmful"


def _named(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    first = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    return first if more <= 0 else f"{first} and {more:,} more"


def _sides(done: "PruningResult") -> Table:
    before, after = done.before, done.after
    assert before is not None
    assert after is not None
    table = Table("", box=None, pad_edge=False)
    for name in ("before", "after", "ratio"):
        table.add_column(name, justify="right")
    for name, one, other in (
        ("heads", before.heads, after.heads),
        ("parameters", before.parameters, after.parameters),
        ("of attention", before.attention, after.attention),
        ("bytes", before.bytes, after.bytes),
        ("tokens per second", before.tokens_per_second, after.tokens_per_second),
    ):
        ratio = f"{other / one:.2f}" if one else "-"
        table.add_row(name, f"{one:,.0f}", f"{other:,.0f}", ratio)
    table.add_row(done.selection.metric, f"{done.selection.baseline:.4f}", f"{done.pruned:.4f}", "")
    if done.recovered is not None:
        table.add_row("after recovery", "", f"{done.recovered:.4f}", "")
    return table


def draw(done: "PruningResult", path: Path) -> None:
    """The curve as a picture."""
    from manyheads.pictures import CurveLabels, Curve, draw_curve

    selection, rows = done.selection, done.selection.rows()
    line = Curve(
        name=f"by {selection.by}",
        fractions=[row["fraction"] for row in rows],
        values=[row["value"] for row in rows],
        errors=[row["change_error"] for row in rows],
        chosen=selection.count / selection.total if selection.count else None,
    )
    labels = CurveLabels(
        title=f"{selection.count:,} of {selection.total:,} {selection.unit} removed",
        subtitle=f"in the order of {selection.by}; the band is one standard error of the change",
        xlabel=f"fraction of {selection.unit} removed",
        ylabel=selection.metric,
    )
    draw_curve([line], selection.baseline, path, labels=labels)
