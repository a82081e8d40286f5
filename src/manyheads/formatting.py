"""Counts, percentages, numbers and lists of words as text; values as JSON."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

# Stands in a table for an unknown value.
UNKNOWN = "–"


def pluralise(count: int, noun: str) -> str:
    """
    >>> pluralise(1, "text"), pluralise(1200, "text"), pluralise(2, "patch"), pluralise(3, "query")
    ('1 text', '1,200 texts', '2 patches', '3 queries')
    """
    plural = f"{noun}es" if noun.endswith(("ch", "s")) else f"{noun}s"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        plural = f"{noun[:-1]}ies"
    return f"{count:,} {noun if count == 1 else plural}"


def kind_of(value: object) -> str:
    """
    >>> kind_of("text"), kind_of(3)
    ('a str', 'an int')
    """
    name = type(value).__name__
    return f"{'an' if name[0].lower() in 'aeiou' else 'a'} {name}"


def alternatives(words: Sequence[str]) -> str:
    """
    >>> alternatives(["zero", "mean", "resample"])
    'zero, mean or resample'
    """
    return " or ".join(filter(None, [", ".join(words[:-1]), words[-1]]))


def percent(fraction: float) -> str:
    """A fraction with at least two significant digits, as pictures/page/format.js writes it.

    >>> percent(0.974), percent(0.0421), percent(0.0003), percent(0.0), percent(math.nan)
    ('97%', '4.2%', '0.03%', '0%', '–')
    >>> percent(-0.0421), percent(-0.00001)
    ('−4.2%', '0.00%')
    """
    if math.isnan(fraction):
        return UNKNOWN
    size = abs(100 * fraction)
    digits = 0 if size >= 9.95 or size == 0 else 1 if size >= 0.995 else 2
    # Rounded first, and without the sign of a zero.
    return f"{round(100 * fraction, digits) + 0.0:.{digits}f}%".replace("-", "−")


def number(value: float) -> str:
    """Three significant digits, as pictures/page/format.js writes them.

    >>> number(0.1234), number(-2.0), number(45.67), number(12345.6), number(2.14e-5)
    ('0.123', '−2.00', '45.7', '12,346', '2.1e−5')
    """
    if math.isnan(value):
        return UNKNOWN
    size = abs(value)
    if size >= 99.95:
        text = f"{value:,.0f}"
    elif size == 0 or size >= 0.001:
        text = f"{value:#.3g}" if size else "0"
    else:
        digits, _, power = f"{value:.1e}".partition("e")
        text = f"{digits}e{int(power)}"
    return text.replace("-", "−")


def without_nan(value: Any) -> Any:
    """The value with null for NaN and infinity, which JSON does not have.

    >>> without_nan({"entropy": [1.0, math.nan]})
    {'entropy': [1.0, None]}
    """
    if isinstance(value, dict):
        return {name: without_nan(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [without_nan(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def plain_table(
    words: Sequence[str], numbers: Sequence[str], rows: Iterable[Sequence[Any]], title: str = ""
) -> "Table":
    """A rich table without lines: columns of words, then columns of numbers on the right."""
    from rich.table import Table

    table = Table(*words, box=None, pad_edge=False, title=title or None, title_justify="left")
    for title in numbers:
        table.add_column(title, justify="right")
    for row in rows:
        table.add_row(*row)
    return table


def standard_error(error: float | None) -> str:
    """Two digits; empty where it is unknown, as that of a single text is.

    >>> standard_error(0.0123), standard_error(math.nan)
    ('0.012', '')
    """
    return "" if error is None or math.isnan(error) else f"{error:.2g}"


def listed(names: Sequence[str], most: int = 20) -> str:
    """The first names, and how many more there are.

    >>> listed(["L0H0", "L0H1", "L0H2"], most=2)
    'L0H0, L0H1 and 1 more'
    """
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
