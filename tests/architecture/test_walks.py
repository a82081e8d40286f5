"""The walks of ARCHITECTURE.md: at most six files each, and every name is where they say."""

import ast
import re

from tests.architecture.house import PACKAGE, ROOT, parse

MAX_FILES = 6
ROW = re.compile(r"^\| `([\w/]+\.py)` \| (.+?) \|", re.MULTILINE)


def walks() -> list[list[tuple[str, str]]]:
    """The rows of each table below "Two walks": a file, and names in it."""
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    section = re.split(r"^## ", text.partition("## Two walks\n")[2], flags=re.MULTILINE)[0]
    tables = re.split(r"\n\n(?!\|)", section)
    return [rows for table in tables if (rows := ROW.findall(table))]


def names_in(file: str) -> set[str]:
    """Functions and classes at the top of a file, and the methods of its classes."""
    names = set()
    for node in parse(PACKAGE / file).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef)]
            names |= {f"{node.name}.{method.name}" for method in methods}
    return names


def test_each_walk_has_at_most_six_files() -> None:
    assert len(walks()) == 2
    assert all(1 <= len({file for file, _ in rows}) <= MAX_FILES for rows in walks())


def test_every_name_of_a_walk_is_in_its_file() -> None:
    missing = [
        f"{file}: {name}"
        for rows in walks()
        for file, named in rows
        for name in re.findall(r"`([\w.]+)`", named)
        if name not in names_in(file)
    ]
    assert not missing, f"ARCHITECTURE.md names what does not exist: {missing}"
