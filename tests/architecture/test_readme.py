"""The README and the docs are correct: snippets run, paths, links and commands exist."""

import ast
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from manyheads.cli.main import ALL_COMMANDS, main
from manyheads.train.run_file.run_config import parse_run
from tests.architecture.house import FLOORS, ROOT

READMES = (ROOT / "README.md", ROOT / "README.ru.md")
DOCS = tuple(sorted((ROOT / "docs").rglob("*.md")))
ARCHITECTURE = ROOT / "ARCHITECTURE.md"
PAGES = (
    *READMES,
    ARCHITECTURE,
    *(ROOT / f"{name}.md" for name in ("CONTRIBUTING", "SECURITY")),
    *DOCS,
)

# What guides may import: the root and the packages that have a public face.
FACES = {
    "manyheads",
    *(
        f"manyheads.{room}"
        for room in [
            "data",
            "lens",
            "mixers",
            "models",
            "parts",
            "pictures",
            "report",
            "surgery",
            "tasks",
            "train",
        ]
    ),
}

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
    """The commands of a page, one per line."""
    shell = [body.replace("\\\n", " ") for _, body in blocks(page, "", "sh", "bash", "console")]
    spans = CODE_SPAN.findall(FENCE.sub("", text_of(page)))
    return re.sub(r"(?m)(?:^|\s)#.*$", "", "\n".join([*shell, *spans]))


@cache
def targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][a-z-]*):", makefile, re.MULTILINE))


def pages_by_code() -> Sequence[Path]:
    """The first page of each code: a translation that shows the same is not run again."""
    pages = {
        tuple(re.sub(r"(?m)\s*#.*$", "", body) for _, body in blocks(page, "python")): page
        for page in reversed(PAGES)
    }
    return sorted(pages.values(), key=PAGES.index)


@pytest.mark.parametrize("page", pages_by_code(), ids=lambda page: str(page.relative_to(ROOT)))
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
def test_readme_commands_read_files_that_exist_and_models_that_are_trained_above(
    page: Path,
) -> None:
    lines = commands(page)
    paths = re.findall(r"examples/[\w./-]+", lines)
    assert paths
    assert not [path for path in paths if not (ROOT / path).exists()]
    models = set()
    for file in re.findall(r"manyheads train (\S+\.toml)", lines):
        tables = tomllib.loads((ROOT / file).read_text("utf-8"))
        assert (ROOT / tables["data"]["train"]).is_file()
        models.add(f"{parse_run(tables).run.folder}/model")
    assert set(re.findall(r"runs/\w+/model", lines)) == models


def folder_map() -> list[str]:
    """The paths of the map in ARCHITECTURE.md, one per line."""
    [tree] = [body for _, body in blocks(ARCHITECTURE, "text") if body.startswith("src/")]
    return [line.split()[0] for line in tree.splitlines() if line.strip()]


def test_every_path_of_the_folder_map_exists() -> None:
    missing = [path for path in folder_map() if not (ROOT / path).exists()]
    assert not missing, f"the map of ARCHITECTURE.md names what does not exist: {missing}"


def test_the_folder_map_has_every_room() -> None:
    package = ROOT / "src" / "manyheads"
    rooms = {
        f"src/manyheads/{folder.name}/"
        for folder in package.iterdir()
        if folder.is_dir() and folder.name != "__pycache__"
    }
    missing = rooms - set(folder_map())
    assert not missing, f"the map of ARCHITECTURE.md leaves out {sorted(missing)}"


def test_the_table_of_floors_is_the_one_that_is_enforced() -> None:
    rows = re.findall(r"^\| (\d+) \| (`.+`) \|$", text_of(ARCHITECTURE), re.MULTILINE)
    floors = {room: int(floor) for floor, rooms in rows for room in CODE_SPAN.findall(rooms)}
    assert floors == FLOORS


@each_readme
def test_a_readme_can_be_read_in_one_sitting(page: Path) -> None:
    assert len(text_of(page).splitlines()) <= 140


@each_page
def test_every_link_within_the_project_leads_somewhere(page: Path) -> None:
    links = [link or image for link, image in LINK.findall(FENCE.sub("", text_of(page)))]
    inside = [link.partition("#")[0] for link in links if "://" not in link]
    missing = [link for link in inside if link and not (page.parent / link).exists()]
    assert not missing, f"{page.name} links to what does not exist: {missing}"


def test_the_menu_of_the_docs_has_every_page() -> None:
    menu = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"[\w/-]+\.md", menu))
    assert named == {str(page.relative_to(ROOT / "docs")) for page in DOCS}


@each_page
def test_snippets_import_only_public_faces(page: Path) -> None:
    for above, body in blocks(page, "python"):
        for node in ast.walk(ast.parse(body)):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            if isinstance(node, ast.Import):
                modules = [alias.name for alias in node.names]
            deep = [name for name in modules if name.startswith("manyheads") and name not in FACES]
            assert not deep, f"{page.name}:{above} imports {deep}: use a public package"


@each_page
def test_every_name_of_lens_and_surgery_exists(page: Path) -> None:
    code = "\n".join(
        CODE_SPAN.findall(text_of(page)) + [body for _, body in blocks(page, "python")]
    )
    for room in ("lens", "surgery"):
        names = set(re.findall(rf"(?<![\w./]){room}\.([a-z_]\w*)(?=\()", code))
        missing = names - set(import_module(f"manyheads.{room}").__all__)
        assert not missing, f"manyheads.{room} has no {sorted(missing)}"


@pytest.mark.parametrize(
    "room", ["data", "lens", "mixers", "models", "parts", "pictures", "surgery", "train"]
)
def test_the_reference_has_every_public_name_of_a_room(room: str) -> None:
    text = text_of(ROOT / "docs" / "reference" / f"{room}.md")
    named = re.findall(rf"^::: manyheads\.{room}\.(\w+)$", text, re.MULTILINE)
    assert sorted(named) == sorted(import_module(f"manyheads.{room}").__all__)


def test_the_walks_of_the_architecture_name_what_exists() -> None:
    walks = text_of(ARCHITECTURE).partition("## Four walks")[2].split("\n### ")[1:]
    assert len(walks) == 4
    for walk in walks:
        rows = re.findall(r"^\| `([\w/]+\.py)` \| ([^|]+) \|", walk, re.MULTILINE)
        assert 1 < len(rows) <= 6, "a walk has at most six files"
        for file, names in rows:
            defined = definitions(ROOT / "src" / "manyheads" / file)
            missing = set(CODE_SPAN.findall(names)) - defined
            assert not missing, f"{file} has no {sorted(missing)}"


def test_the_table_of_contributing_names_what_exists() -> None:
    table = (
        text_of(ROOT / "CONTRIBUTING.md").partition("## Where to add what")[2].partition("##")[0]
    )
    paths = re.findall(r"`([a-z]\w*/[\w/.]*)`", table)
    missing = [
        path
        for path in paths
        if not any((ROOT / base / path).exists() for base in ("src/manyheads", "."))
    ]
    assert paths
    assert not missing, f"CONTRIBUTING.md names {missing}"


def definitions(path: Path) -> set[str]:
    """The functions and classes of a file, and the methods as Class.method."""
    names = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        if isinstance(node, ast.ClassDef):
            names |= {f"{node.name}.{each.name}" for each in node.body if hasattr(each, "name")}
    return names


def test_no_page_or_source_cites_a_document_that_is_not_here() -> None:
    absent = re.compile(r"DESIGN\.md|HOUSE\.md|STYLE\.md|the design's")
    sources = [*(ROOT / "src").rglob("*.py"), *(ROOT / "tests").rglob("*.py"), *PAGES]
    citing = [
        str(path.relative_to(ROOT))
        for path in sources
        if path != Path(__file__) and absent.search(text_of(path))
    ]
    assert not citing


def test_the_reference_has_every_command() -> None:
    page = commands(ROOT / "docs" / "reference" / "commands.md")
    assert {name for name, _ in MANYHEADS.findall(page)} == ALL_COMMANDS.keys()


@each_page
def test_every_make_command_is_a_target(page: Path) -> None:
    named = set(MAKE.findall(commands(page)))
    assert named <= targets(), f"the Makefile has no {sorted(named - targets())}"


@each_page
def test_every_command_and_its_options_exist(
    page: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for command, rest in MANYHEADS.findall(commands(page)):
        assert command in ALL_COMMANDS, f"there is no command {command!r}"
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


def test_a_console_block_is_parsed_as_typed(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text('```console\nmake demo  # not make tea\nmanyheads gate x/ -o "--no"\n```\n')
    typed = commands(page)
    assert MAKE.findall(typed) == ["demo"]
    calls: Sequence[tuple[str, str]] = MANYHEADS.findall(typed)
    assert [(name, OPTION.findall(_unquoted(rest))) for name, rest in calls] == [("gate", ["-o"])]
