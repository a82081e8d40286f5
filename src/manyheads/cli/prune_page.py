"""What `manyheads prune` shows: what went and why, the curve, both models side by side."""

from collections.abc import Sequence
from math import isnan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from manyheads.surgery.operation import Operation

__all__ = ["draw", "show"]

MOST_NAMED = 20


def show(console: Console, done: "Operation", judges: str) -> None:
    """Print the table of what goes, what it costs, and size and speed before and after."""
    chosen = done.chosen
    went = f"{chosen.total:,} {chosen.unit}"
    if chosen.met:
        went = f"{chosen.count:,} of {went} go"
    console.print(f"{went} by {chosen.by}, judged by {judges}", highlight=False)
    console.print(_curve(done))
    if chosen.harmful:
        console.print(f"better without: {_named(chosen.harmful_names)}", highlight=False)
    if done.before is not None and done.after is not None:
        console.print(_sides(done))


def _curve(done: "Operation") -> Table:
    chosen = done.chosen
    table = Table("", chosen.unit.removesuffix("s"), "why", box=None, pad_edge=False)
    for name in (chosen.metric, "change", "±"):
        table.add_column(name, justify="right")
    table.add_row("0", "none", "the whole model", f"{chosen.baseline:.4f}", "", "")
    for row in chosen.rows():
        if not (row["goes"] or not chosen.met):
            continue
        table.add_row(
            f"{row['taken']:,}",
            row.get("head") or row["what"],
            row["why"] + _harm(row),
            f"{row['value']:.4f}",
            f"{row['change']:+.4f}",
            # Of a single text no error is known.
            "" if isnan(row["change_error"]) else f"{row['change_error']:.2g}",
        )
    return table


def _harm(row: dict[str, Any]) -> str:
    """What of a row does harm: the one that goes, or so many of them."""
    if not row["harmful"]:
        return ""
    return ", does harm" if row.get("parts", 1) == 1 else f", {row['harmful']} of them do harm"


def _named(names: Sequence[str]) -> str:
    """The first of them, and how many more there are."""
    first = ", ".join(names[:MOST_NAMED])
    more = len(names) - MOST_NAMED
    return first if more <= 0 else f"{first} and {more:,} more"


def _sides(done: "Operation") -> Table:
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
        ("tokens a second", before.tokens_a_second, after.tokens_a_second),
    ):
        ratio = f"{other / one:.2f}" if one else "-"
        table.add_row(name, f"{one:,.0f}", f"{other:,.0f}", ratio)
    table.add_row(done.chosen.metric, f"{done.chosen.baseline:.4f}", f"{done.cut:.4f}", "")
    if done.mended is not None:
        table.add_row("after mending", "", f"{done.mended:.4f}", "")
    return table


def draw(done: "Operation", path: Path) -> None:
    """The curve as a picture."""
    from manyheads.pictures.curve import CurveWords, Line, draw_curve

    chosen, rows = done.chosen, done.chosen.rows()
    line = Line(
        name=f"by {chosen.by}",
        shares=[row["share"] for row in rows],
        values=[row["value"] for row in rows],
        errors=[row["change_error"] for row in rows],
        chosen=chosen.count / chosen.total if chosen.count else None,
    )
    words = CurveWords(
        title=f"{chosen.count:,} of {chosen.total:,} {chosen.unit} taken away",
        subtitle=f"in the order of {chosen.by}; the band is one standard error of the change",
        share=f"share of {chosen.unit} that are gone",
        value=chosen.metric,
    )
    draw_curve([line], chosen.baseline, path, words=words)
