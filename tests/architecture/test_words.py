"""Names inside the files: nouns of the field, not participles and pronouns.

A ceiling may only fall: whoever removes a word lowers it here.
"""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from tests.architecture.house import PACKAGE, ROOT, parse

# How often each word may be the name of a variable, argument or field in src.
CEILINGS = {
    "asked": 0,
    "found": 0,
    "given": 0,
    "theirs": 0,
    "told": 0,
    "each": 18,
    "gone": 0,
    "here": 1,
    "kept": 12,
    "known": 5,
    "made": 1,
    "one": 25,
    "other": 41,
    "said": 0,
    "shown": 3,
    "some": 3,
    "taken": 0,
    "there": 1,
    "wanted": 0,
}
# The same in tests, bench and studies.
OUTSIDE = {"asked": 0, "found": 0, "given": 0, "theirs": 0, "told": 0}
# Words that no name of a test has: it states a property.
TEST_NAMES = {"asked": 0, "says": 0, "theirs": 0, "there": 0, "told": 0}


def bound_names(tree: ast.AST) -> Iterator[str]:
    """The names that a file gives to variables, arguments, fields, functions and patterns."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.FunctionDef | ast.ExceptHandler | ast.MatchAs | ast.MatchStar):
            yield node.name or ""


@cache
def count(folder: Path) -> Counter[str]:
    """How often each word is a name in a folder, of the words that are counted there."""
    words = CEILINGS if folder == PACKAGE else OUTSIDE
    # Names contain the word itself: most files of tests need not be parsed.
    within = re.compile(rf"(?<![^\W_])(?:{'|'.join(words)})(?![^\W_])")
    # Other tests read the trees of the package too; those of tests would fill the memory.
    read = parse if folder == PACKAGE else lambda path: ast.parse(path.read_text("utf-8"))
    paths = [path for path in folder.rglob("*.py") if within.search(path.read_text("utf-8"))]
    names = Counter(name.strip("_") for path in sorted(paths) for name in bound_names(read(path)))
    return Counter({word: names[word] for word in words})


def test_no_word_is_used_more_often_than_its_ceiling() -> None:
    counts = count(PACKAGE)
    above = {word: counts[word] for word, most in CEILINGS.items() if counts[word] > most}
    assert not above, f"use the noun instead: {above}"


def test_a_ceiling_follows_the_count() -> None:
    counts = count(PACKAGE)
    slack = {word: counts[word] for word, most in CEILINGS.items() if counts[word] < most}
    assert not slack, f"lower the ceilings to {slack}"


@pytest.mark.parametrize("folder", ["tests", "bench", "studies"])
def test_no_participle_is_a_variable_outside_the_package(folder: str) -> None:
    counts = count(ROOT / folder)
    above = {word: counts[word] for word, most in OUTSIDE.items() if counts[word] > most}
    assert not above, f"use the noun instead: {above}"


def test_names_of_tests_are_plain_properties() -> None:
    names = [
        f"{path.relative_to(ROOT)}::{name}"
        for path in sorted((ROOT / "tests").rglob("test_*.py"))
        for name in re.findall(r"def (test_\w+)", path.read_text("utf-8"))
        if set(name.split("_")) & TEST_NAMES.keys()
    ]
    assert not names, f"state the property: {names}"


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("found = 1", {"found"}),
        ("def f(given, /, *, told=2): ...", {"given", "told", "f"}),
        ("for _each in range(2): pass", {"each"}),
        ("match x:\n    case [other, *some]: pass", {"other", "some"}),
        ("print(found)", set()),
    ],
)
def test_what_counts_as_a_name(source: str, words: set[str]) -> None:
    assert {name.strip("_") for name in bound_names(ast.parse(source))} == words
