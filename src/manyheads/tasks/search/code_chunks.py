"""Python source by function and class, with qualified names."""

import ast
import re
from typing import NamedTuple

from manyheads.tasks.search.documents import Document

# A class of at most this many lines is one part; a larger one is split into its methods.
CLASS_LINES = 40

LINE_END = re.compile(r"\r\n|\r|\n")
DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)


class CodeSpan(NamedTuple):
    """Characters `start` to `end` of a source file, and the qualified name of what they define."""

    name: str
    start: int
    end: int


def is_python(document: Document) -> bool:
    return document.id.endswith((".py", ".pyi")) or document.source.endswith((".py", ".pyi"))


def python_spans(document: Document) -> list[CodeSpan]:
    """The functions, classes and remaining statements of a source file, in its order.

    A function includes its decorators, its docstring and what it defines inside. A long class gives
    its header and each of its methods. What does not parse is one part.

    >>> text = "import os\\n\\n@cache\\ndef f():\\n    return 1\\n"
    >>> [span.name for span in python_spans(Document("pkg/m.py", text))]
    ['', 'f']
    """
    text = document.text
    try:
        tree = ast.parse(text)
    # Null bytes are a ValueError; deep nesting overflows the parser.
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return [CodeSpan("", 0, len(text))]
    # Where each line begins, and the end of the text; lines as Python's parser counts them.
    starts = [0, *(match.end() for match in LINE_END.finditer(text))]
    lines = starts if starts[-1] == len(text) else [*starts, len(text)]
    parts: list[tuple[str, int, int]] = []
    _collect(tree.body, "", parts)
    spans: list[CodeSpan] = []
    end = 0
    for name, first, last in parts:
        start = lines[first - 1]
        # Several definitions on one line stay together.
        if start < end:
            continue
        spans += _between(text, end, start)
        end = lines[last]
        spans.append(CodeSpan(name, start, end))
    return [*spans, *_between(text, end, len(text))]


def _collect(body: list[ast.stmt], prefix: str, parts: list[tuple[str, int, int]]) -> None:
    """The name and the first and last line of each part."""
    for node in body:
        if not isinstance(node, DEFINITIONS):
            continue
        name = f"{prefix}{node.name}"
        first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)])
        last = node.end_lineno or node.lineno
        inner = [part for part in node.body if isinstance(part, DEFINITIONS)]
        if not isinstance(node, ast.ClassDef) or last - first < CLASS_LINES or not inner:
            parts.append((name, first, last))
            continue
        decorators = inner[0].decorator_list
        begins = min([inner[0].lineno, *(decorator.lineno for decorator in decorators)])
        if begins > first:
            parts.append((name, first, begins - 1))
        _collect(node.body, f"{name}.", parts)


def _between(text: str, start: int, end: int) -> list[CodeSpan]:
    """Statements between two definitions, without the blank lines around them."""
    part = text[start:end]
    if not part.strip():
        return []
    return [CodeSpan("", start + len(part) - len(part.lstrip("\r\n")), start + len(part.rstrip()))]
