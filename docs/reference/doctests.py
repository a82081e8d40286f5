"""Turn docstrings, which are plain text with doctests, into Markdown for the reference."""

import re
from typing import Any

import griffe

__all__ = ["Doctests"]

EXAMPLE = re.compile(r"(^>>> .*?(?=\n[ \t]*\n|\Z))", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"(`[^`]*`)")


class Doctests(griffe.Extension):
    """Markdown would read >>> as nested quotations, and <name> as HTML."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = _marked(obj.docstring.value)


def _marked(text: str) -> str:
    # The separators are at the odd indices.
    parts = EXAMPLE.split(text)
    parts[::2] = [_escaped(part) for part in parts[::2]]
    parts[1::2] = [f"```pycon\n{part}\n```" for part in parts[1::2]]
    return "".join(parts)


def _escaped(text: str) -> str:
    parts = CODE_SPAN.split(text)
    parts[::2] = [part.replace("<", "&lt;") for part in parts[::2]]
    return "".join(parts)
