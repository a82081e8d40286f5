"""Where data come from, by how they are named: files, folders, globs, or a dataset of the hub."""

from collections.abc import Sequence
from dataclasses import fields
from urllib.parse import parse_qsl

from manyheads.data.rows import FileRows, HubRows, Rows
from manyheads.data.texts import Errors, Format, RowTexts, TextFiles, TextSource
from manyheads.errors import InputError

__all__ = ["HUB", "rows_of", "texts_of"]

HUB = "hub:"
FORM = f"write {HUB}org/name, or {HUB}org/name?subset=en&split=train&revision=main"


def texts_of(
    paths: Sequence[str],
    *,
    field: str = "text",
    separator: str | None = None,
    format: Format = "as named",
    errors: Errors = "strict",
) -> TextSource:
    """The texts of files, or of one dataset of the Hugging Face hub, of which `field` counts.

    >>> texts_of(["hub:org/name?split=test"])
    RowTexts(rows=HubRows(name='org/name', subset=None, split='test', revision=None), field='text')
    """
    hub = _hub_rows(paths)
    if hub is not None:
        return RowTexts(hub, field)
    return TextFiles(tuple(paths), field=field, separator=separator, format=format, errors=errors)


def rows_of(paths: Sequence[str]) -> Rows:
    """The rows of .jsonl and .parquet files, or of one dataset of the Hugging Face hub."""
    return _hub_rows(paths) or FileRows(tuple(paths))


def _hub_rows(paths: Sequence[str]) -> HubRows | None:
    if not any(path.startswith(HUB) for path in paths):
        return None
    if len(paths) > 1:
        raise InputError(
            f"{', '.join(paths)} are several sources with one of the hub", "name that one alone"
        )
    name, _, rest = paths[0].removeprefix(HUB).partition("?")
    known = [field.name for field in fields(HubRows) if field.name != "name"]
    chosen = dict(parse_qsl(rest, keep_blank_values=True))
    wrong = [key for key in chosen if key not in known]
    if not name or wrong:
        said = f"does not know {wrong[0]}" if wrong else "names no dataset"
        raise InputError(f"{paths[0]} {said}", FORM)
    return HubRows(name, **chosen)
