"""English prose that comes with every Python: docstrings and comments of the standard library."""

import ast
import random
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path

__all__ = ["passages", "prose"]

LEAST_WORDS = 3
LEAST_LETTERS = 0.8
NOT_READ = {"site-packages", "test", "tests", "idle_test", "__pycache__"}


def passages(count: int, lengths: Sequence[int], texts: Sequence[str], within: range) -> list[str]:
    """So many of the texts whose length lies in the range, the same on every run."""
    fitting = [text for text, length in zip(texts, lengths, strict=True) if length in within]
    return random.Random(0).sample(fitting, min(count, len(fitting)))


def prose() -> list[str]:
    """All docstrings and all blocks of comments that read as prose, sorted."""
    root = Path(sysconfig.get_paths()["stdlib"])
    result: set[str] = set()
    for path in sorted(root.rglob("*.py")):
        if not NOT_READ.intersection(path.relative_to(root).parts):
            source = path.read_text("utf-8", errors="replace")
            result.update(" ".join(text.split()) for text in _pieces(source))
    return sorted(text for text in result if _reads_as_prose(text))


def _pieces(source: str) -> Iterator[str]:
    yield from _comments(source)
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""


def _comments(source: str) -> Iterator[str]:
    """Lines of comments that follow one another are one text."""
    lines = (line.strip() for line in source.splitlines())
    for is_comment, block in groupby(lines, key=lambda line: line.startswith("#")):
        if is_comment:
            yield " ".join(line.lstrip("#! ") for line in block)


def _reads_as_prose(text: str) -> bool:
    words = sum(word.strip(".,:;()").isalpha() for word in text.split())
    letters = sum(letter.isalpha() or letter == " " for letter in text)
    return words >= LEAST_WORDS and letters >= LEAST_LETTERS * len(text)
