"""The README tells the truth: its snippets run, its paths and commands exist."""

import re
from pathlib import Path

import pytest

from tests.architecture.house import ROOT

README = ROOT / "README.md"
FENCE = re.compile(r"^```(?P<language>\w*)\n(?P<body>.*?)^```", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"\bmake\s+(?:[A-Z_]+=\S+\s+)*([a-z][a-z-]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]*\bsrc=\"([^\"]+)\"")


@pytest.fixture(scope="module")
def readme() -> str:
    assert README.is_file(), "README.md is missing"
    return README.read_text(encoding="utf-8")


def blocks(readme: str, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks in one of the languages, each with the number of lines above it."""
    return [
        (readme.count("\n", 0, match.start("body")), match["body"])
        for match in FENCE.finditer(readme)
        if match["language"] in languages
    ]


def test_python_snippets_run(readme: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    snippets = blocks(readme, "python")
    assert snippets, "README.md has no ```python block"
    for above, body in snippets:
        # Blank lines in front make a traceback name the line of the README.
        exec(compile("\n" * above + body, str(README), "exec"), {"__name__": "readme"})


def test_every_path_of_the_folder_map_exists(readme: str) -> None:
    maps = blocks(readme, "text")
    assert len(maps) == 1, "README.md needs one ```text block, the map of folders: a path a line"
    paths = [line.split()[0] for line in maps[0][1].splitlines() if line.strip()]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths
    assert not missing, f"the map of README.md names what does not exist: {missing}"


def test_every_link_within_the_project_leads_somewhere(readme: str) -> None:
    links = [link or image for link, image in LINK.findall(FENCE.sub("", readme))]
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [link for link in inside if not (ROOT / link).exists()]
    assert not missing, f"README.md links to what does not exist: {missing}"


def test_every_make_command_is_a_target(readme: str) -> None:
    shell = [body for _, body in blocks(readme, "", "sh", "bash", "console")]
    spans = CODE_SPAN.findall(FENCE.sub("", readme))
    named = set(MAKE.findall("\n".join([*shell, *spans])))
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))
    assert {"demo", "test"} <= named, "README.md must name `make demo` and `make test`"
    assert named <= targets, f"the Makefile has no {sorted(named - targets)}"
