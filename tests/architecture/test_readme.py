"""The README and the docs tell the truth: snippets run, paths, links and commands exist."""

import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from manyheads.cli.main import COMMANDS, main
from manyheads.train.run_file.run_config import parse_run
from tests.architecture.house import ROOT

READMES = (ROOT / "README.md", ROOT / "README.ru.md")
PAGES = (*READMES, *sorted((ROOT / "docs").rglob("*.md")))

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<body>.*?)^(?P=indent)```", re.MULTILINE | re.DOTALL
)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
MAKE = re.compile(r"\bmake\s+(?:[A-Z_]+=\S+\s+)*([a-z][a-z-]*)")
MANYHEADS = re.compile(r"(?:^|/|-m )manyheads[ \t]+([a-z]\w*)(.*)", re.MULTILINE)
OPTION = re.compile(r"(?<=\s)(--?[a-z][a-z-]*)")
LINK = re.compile(r"\]\(([^)\s]+)\)|<img[^>]*\bsrc=\"([^\"]+)\"")

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
each_readme = pytest.mark.parametrize("page", READMES, ids=lambda page: page.name)


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[tuple[int, str]]:
    """The fenced blocks in one of the languages, each with the number of lines above it."""
    text = text_of(page)
    return [
        (text.count("\n", 0, match.start("body")), match["body"])
        for match in FENCE.finditer(text)
        if match["language"] in languages
    ]


def commands(page: Path) -> str:
    """What a person is told to type, a line a command."""
    shell = [body.replace("\\\n", " ") for _, body in blocks(page, "", "sh", "bash", "console")]
    spans = CODE_SPAN.findall(FENCE.sub("", text_of(page)))
    said = "\n".join([*shell, *spans])
    return re.sub(r"(?m)(?:^|\s)#.*$", "", said)


@cache
def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


@each_page
def test_python_snippets_run_in_one_namespace(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": "snippets"}
    for above, body in blocks(page, "python"):
        # Blank lines in front make a traceback name the line of the page.
        exec(compile("\n" * above + body, str(page), "exec"), namespace)


@each_readme
def test_readmes_have_snippets_and_the_two_first_commands(page: Path) -> None:
    assert blocks(page, "python")
    assert {"demo", "test"} <= set(MAKE.findall(commands(page)))


def test_both_readmes_show_the_same_code() -> None:
    ours, russian = (
        [re.sub(r"(?m)\s*#.*$", "", body) for _, body in blocks(page, "python", "toml")]
        for page in READMES
    )
    assert ours == russian


@each_page
def test_run_files_are_read(page: Path) -> None:
    for _, body in blocks(page, "toml"):
        tables = tomllib.loads(body)
        if {"model", "data", "objective", "run"} <= tables.keys():
            parse_run(tables)


@each_readme
def test_every_path_of_the_folder_map_exists(page: Path) -> None:
    maps = blocks(page, "text")
    assert len(maps) == 1, f"{page.name} needs one ```text block, the map: a path a line"
    paths = [line.split()[0] for line in maps[0][1].splitlines() if line.strip()]
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert paths
    assert not missing, f"the map of {page.name} names what does not exist: {missing}"


def test_the_folder_map_has_every_room() -> None:
    named = {line.split()[0].rstrip("/") for line in blocks(READMES[0], "text")[0][1].splitlines()}
    package = ROOT / "src" / "manyheads"
    rooms = {
        str(each.relative_to(ROOT))
        for each in package.iterdir()
        if each.is_dir() and each.name != "__pycache__"
    }
    assert not rooms - named, f"the map of README.md leaves out {sorted(rooms - named)}"


@each_page
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    links = [link or image for link, image in LINK.findall(FENCE.sub("", text_of(page)))]
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [link for link in inside if link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what does not exist: {missing}"


def test_the_menu_of_the_docs_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", menu))
    there = {str(page.relative_to(ROOT / "docs")) for page in PAGES if page not in READMES}
    assert named == there


@pytest.mark.parametrize("room", ["lens", "surgery"])
def test_the_reference_has_every_public_name_of_a_room(room: str) -> None:
    text = text_of(ROOT / "docs" / "reference" / f"{room}.md")
    named = re.findall(r"^::: (\S+)\.(\w+)$", text, re.MULTILINE)
    public = import_module(f"manyheads.{room}")
    assert sorted(name for _, name in named) == sorted(public.__all__)
    for home, name in named:
        assert getattr(import_module(home), name) is getattr(public, name)


def test_the_reference_has_every_command() -> None:
    told = commands(ROOT / "docs" / "reference" / "commands.md")
    assert {name for name, _ in MANYHEADS.findall(told)} == COMMANDS.keys()


@each_page
def test_every_make_command_is_a_target(page: Path) -> None:
    named = set(MAKE.findall(commands(page)))
    assert named <= targets(), f"the Makefile has no {sorted(named - targets())}"


@each_page
def test_every_command_and_its_options_exist(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, rest in MANYHEADS.findall(commands(page)):
        assert command in COMMANDS, f"there is no command {command!r}"
        missing = set(OPTION.findall(_unquoted(rest))) - _options(command, capsys)
        assert not missing, f"manyheads {command} has no {sorted(missing)}"


def _unquoted(rest: str) -> str:
    return re.sub(r"\"[^\"]*\"|'[^']*'", "''", rest)


def _options(command: str, capsys: pytest.CaptureFixture[str]) -> set[str]:
    if command not in KNOWN:
        capsys.readouterr()
        with pytest.raises(SystemExit):
            main([command, "--help"])
        KNOWN[command] = set(OPTION.findall(capsys.readouterr().out.replace(",", " ")))
    return KNOWN[command]


KNOWN: dict[str, set[str]] = {}


def test_a_console_block_is_read_as_typed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```console\nmake demo  # not make tea\nmanyheads gate x/ -o "--no"\n```\n')
    told = commands(page)
    assert MAKE.findall(told) == ["demo"]
    found: Sequence[tuple[str, str]] = MANYHEADS.findall(told)
    assert [(name, OPTION.findall(_unquoted(rest))) for name, rest in found] == [("gate", ["-o"])]
