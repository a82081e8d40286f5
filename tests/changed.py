"""Which test files to run for a change: nearest first, as many as fit into a minute of two cores.

1. test files that changed, the tests and doctests of modules that changed, and the tests of pages
   of the docs, where a page changed, with the snippets of that page,
2. test files that import a changed module or a changed file of tests,
3. a sample of all others, the same every time.
"""

import re
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from zlib import crc32

ROOT = Path(__file__).parents[1]
# Core-seconds for tests, so that `make quick` ends within 90 seconds on two cores.
BUDGET = 60.0
# Seconds of a file that nobody has timed yet.
UNKNOWN = 2.0
# The tests of pages, of which the snippets of a page are the dearest.
PAGES = "tests/architecture/test_readme.py"
SNIPPETS = f"{PAGES}::test_python_snippets_run_in_one_namespace"
# Seconds of the others.
PAGES_SECONDS = 8.0


def choose(
    files: Sequence[str], durations: Mapping[str, float], changes: Iterable[str] | None = None
) -> list[str]:
    """The files to run, within the budget; those that were left out for it are counted aloud."""
    changes = changed_files() if changes is None else set(changes)
    durations = {**durations, PAGES: PAGES_SECONDS}
    near = [file for file in files if file in changes or mirrors_any(file, changes)]
    names = {name for change in changes if (name := module_name(change))}
    importers = [file for file in files if file not in near and imports(file) & names]
    others = sorted(set(files) - {*near, *importers}, key=lambda file: crc32(file.encode()))
    chosen: list[str] = []
    seconds = 0.0
    for group in (near, importers, others):
        fitting = 0
        for file in sorted(group, key=lambda file: durations.get(file, UNKNOWN)):
            cost = durations.get(file, UNKNOWN)
            if seconds + cost <= BUDGET and (group is not others or cost < 1):
                chosen.append(file)
                seconds += cost
                fitting += 1
        if group is not others:
            kind = "test what changed" if group is near else "import what changed"
            print(f"{fitting} of {len(group)} files that {kind}")
    return chosen


def unchanged_snippets(changes: Iterable[str]) -> list[str]:
    """The tests of snippets on pages that are as before."""
    pages = {path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").rglob("*.md")}
    pages |= {path.name for path in ROOT.glob("*.md")}
    return [f"{SNIPPETS}[{page}]" for page in sorted(pages - set(changes))]


def changed_files() -> set[str]:
    """Paths that differ from main, or on main itself from the commit before; and untracked ones."""
    base = _git("merge-base", "HEAD", "main") or _git("rev-parse", "HEAD~1")
    if base and base == _git("rev-parse", "HEAD"):
        base = _git("rev-parse", "HEAD~1") if not _git("status", "--porcelain") else base
    tracked = _git("diff", "--name-only", base or "HEAD")
    return set(f"{tracked}\n{_git('ls-files', '--others', '--exclude-standard')}".split())


def _git(*words: str) -> str:
    result = subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=False)
    return result.stdout.strip()


def mirrors_any(file: str, changes: Iterable[str]) -> bool:
    """Whether a file is the test of a changed module, at the same place below tests, or page.

    >>> mirrors_any("tests/parts/test_masks.py", ["src/manyheads/parts/masks.py"])
    True
    >>> mirrors_any("tests/architecture/test_readme.py", ["docs/index.md"])
    True
    """
    if file == PAGES and any(change.endswith(".md") for change in changes):
        return True
    return file in {
        re.sub(r"([^/]+)$", r"test_\1", change.replace("src/manyheads/", "tests/", 1))
        for change in changes
        if change.startswith("src/manyheads/")
    }


def module_name(path: str) -> str | None:
    """The dotted name of a Python file, as it is imported.

    >>> module_name("src/manyheads/parts/masks.py"), module_name("tests/messages.py")
    ('manyheads.parts.masks', 'tests.messages')
    """
    if not path.endswith(".py"):
        return None
    return path.removeprefix("src/").removesuffix(".py").removesuffix("/__init__").replace("/", ".")


@cache
def imports(path: str) -> frozenset[str]:
    """The modules that a file imports, `from a import b` as both a and a.b."""
    text = (ROOT / path).read_text("utf-8")
    names = set(re.findall(r"^\s*(?:from|import) ((?:manyheads|tests)[\w.]*)", text, re.MULTILINE))
    for module, several in re.findall(
        r"^\s*from ((?:manyheads|tests)[\w.]*) import (\([^)]*\)|.*)$", text, re.MULTILINE
    ):
        names |= {f"{module}.{name}" for name in re.findall(r"\w+", several)}
    return frozenset(names)
