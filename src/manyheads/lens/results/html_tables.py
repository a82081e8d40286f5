"""Results in a notebook: tables and patterns as plain HTML, without scripts."""

import math
import sys
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from jaxtyping import Float

MAX_ROWS = 40
# Larger patterns are said in words.
MAX_CELLS = 64
CELL = "padding:1px 8px;text-align:{align};white-space:nowrap"
SIZE = 10


def display(result: object) -> None:
    """Display a result in a notebook, or print it."""
    notebook = sys.modules.get("IPython")
    if notebook is not None and notebook.get_ipython() is not None:
        notebook.display.display(result)
    else:
        print(result)


def html_table(rows: Sequence[dict[str, Any]], *, max_rows: int = MAX_ROWS) -> str:
    """Records as a table, whatever their texts contain; columns without any value are left out."""
    names = [
        name
        for name in dict.fromkeys(name for row in rows for name in row)
        if any(not _is_unknown(row.get(name)) for row in rows)
    ]
    numeric = {
        name for name in names if all(isinstance(row.get(name), int | float | None) for row in rows)
    }
    head = "".join(_cell("th", name.replace("_", " "), name in numeric) for name in names)
    cells = (
        "".join(_cell("td", _text(row.get(name)), name in numeric) for name in names)
        for row in rows[:max_rows]
    )
    body = "".join(f"<tr>{row}</tr>" for row in cells)
    more = len(rows) - max_rows
    rest = f"<p>and {more} more rows: rows(), frame() or save()</p>" if more > 0 else ""
    return (
        '<div style="overflow-x:auto;max-width:100%"><table style="border-collapse:collapse;'
        f'font-size:90%"><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}</div>'
    )


def html_text(text: str) -> str:
    return f'<pre style="white-space:pre-wrap">{escape(text)}</pre>'


def html_pattern(weights: Float[np.ndarray, "t s"], title: str) -> str:
    """A pattern as a picture of squares, queries down and keys across, the darker the heavier."""
    queries, keys = weights.shape
    if max(queries, keys) > MAX_CELLS:
        return html_text(title)
    squares = "".join(
        f'<rect x="{key * SIZE}" y="{query * SIZE}" width="{SIZE}" height="{SIZE}" fill="#0b3d91" '
        f'fill-opacity="{weight:.2f}"><title>query {query}, key {key}: {weight:.3f}</title></rect>'
        for query, row in enumerate(weights.tolist())
        for key, weight in enumerate(row)
        if weight >= 0.005
    )
    width, height = keys * SIZE, queries * SIZE
    return (
        f'{html_text(title)}<svg role="img" aria-label="{escape(title)}" width="{width}" '
        f'height="{height}" style="background:#f4f4f4">{squares}</svg>'
    )


def _is_unknown(value: Any) -> bool:
    return value is None or value == "" or (isinstance(value, float) and math.isnan(value))


def _text(value: Any) -> str:
    if _is_unknown(value):
        return ""
    if isinstance(value, float):
        return f"{value:.4g}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _cell(tag: str, text: str, numeric: bool) -> str:
    style = CELL.format(align="right" if numeric else "left")
    return f'<{tag} style="{style}">{escape(text)}</{tag}>'
