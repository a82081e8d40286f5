"""manyheads explain as a person at a terminal meets it."""

import io
import re
import subprocess
import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from string import Formatter

import pytest
from matplotlib.image import imread
from rich.cells import cell_len
from rich.console import Console

from manyheads.cli.main import ALL_COMMANDS, main
from manyheads.explain import load_words
from manyheads.explain.layer_walk import Stage, Step, Walk, walk
from manyheads.explain.scaling import ScalingPage, measure
from manyheads.explain.walk_page import WalkPage
from manyheads.models.build import build
from tests.architecture.house import PACKAGE, ROOT

SENTENCE = "Всем привет! Я увлекаюсь искусственным интеллектом"
LONG = " ".join(f"word{index}" for index in range(40))
WORDS_FILE = PACKAGE / "explain" / "words.toml"


@pytest.fixture(autouse=True)
def _terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name in ("FORCE_COLOR", "CLICOLOR_FORCE", "TTY_COMPATIBLE"):
        monkeypatch.delenv(name, raising=False)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """What a command that must succeed prints."""
    code = main(["explain", *arguments])
    printed = capsys.readouterr()
    assert (code, printed.err) == (0, "")
    return printed.out


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line that a command used wrongly says, after `error: `."""
    code = main(["explain", *arguments])
    printed = capsys.readouterr()
    assert (code, printed.out) == (2, "")
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    return printed.err.removeprefix("error: ").rstrip("\n")


def in_order(text: str, *parts: str) -> bool:
    """Whether the parts follow one another, wherever lines were broken."""
    whole = " ".join(text.split())
    return re.search(".*?".join(map(re.escape, parts)), whole) is not None


def test_a_sentence_is_walked_through_every_step(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, SENTENCE)
    titles = [
        "1 Tokens",
        "2 Embeddings",
        "3 Positional encoding",
        "4 Queries, keys, values",
        "5 Scores",
        "6 Attention weights",
        "7 Head outputs",
        "8 Concatenation",
        "9 Output projection",
        "10 Add and norm",
        "11 Feed-forward",
        "12 Add and norm",
        "✓ Agreement",
    ]
    assert in_order(said, *titles)
    assert "untrained" in said
    assert "✗" not in said
    assert in_order(said, "on the kernel “fused”", "equals the computation by hand")


def test_the_language_can_be_russian(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, SENTENCE, "--language", "ru")
    assert in_order(
        said, "Токены", "Эмбеддинги", "Оценки", "Веса внимания", "Конкатенация", "Сверка"
    )
    assert "Веса не обучены" in said


def test_head_and_position_choose_what_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, SENTENCE, "--head", "5", "--position", "3")
    walked = walk(build("tiny-encoder", seed=0), [SENTENCE], head=5, position=3)
    query = walked[Stage.QUERY].model[3, 5, :8].tolist()
    assert in_order(said, "query", *[f"{number:.3f}" for number in query])
    weights = walked[Stage.WEIGHTS].model[5, 3].tolist()
    assert in_order(said, "▸ Я", *[f"{weight:.3f}" for weight in weights], "1.000")
    assert "▸ L0H5" in said


def test_one_score_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, SENTENCE, "--position", "2")
    walked = walk(build("tiny-encoder", seed=0), [SENTENCE], position=2)
    cell = walked.cell(walked.strongest_key)
    (line,) = [line for line in said.splitlines() if "/ √16 =" in line]
    assert f"{cell.product:.4f} / √16 = {cell.product:.4f} / 4 = {cell.score:.4f}" in line
    products = said[said.index("q·k = ") : said.index("/ √16 =")]
    assert products.count("×") == 16


def test_another_seed_gives_other_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    first, again, other = (run(capsys, "Hello", "--seed", seed) for seed in ("1", "1", "2"))
    assert first == again != other


def test_a_batch_is_shown_padded(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, "One short text", "Two", "--sentence", "1")
    assert in_order(said, "0 One", "▸ 1 Two", "[pad]", "[pad]", "start at 0, 3")
    assert in_order(said, "position 0", "token Two", "id 3")
    assert "✗" not in said


@pytest.mark.parametrize("columns", ["80", "200"])
@pytest.mark.parametrize("texts", [[SENTENCE], [SENTENCE, LONG, "a"], [LONG]])
def test_no_line_is_wider_than_the_page(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    columns: str,
    texts: list[str],
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    said = run(capsys, *texts, "--language", "ru", "--position", "0")
    assert max(map(cell_len, said.splitlines())) <= min(100, int(columns))


def test_a_long_sentence_is_shown_through_a_window(capsys: pytest.CaptureFixture[str]) -> None:
    said = run(capsys, LONG, "--position", "30")
    assert "Tokens 24 to 35 of 40: --position moves the window." in said
    assert "▸ word30" in said


def test_letters_that_mean_something_to_a_terminal_are_only_letters(
    capsys: pytest.CaptureFixture[str],
) -> None:
    said = run(capsys, "[bold]x[/bold] {token} \x1b[31m %s", "--position", "1")
    assert "\x1b" not in said
    assert "“bold”" in said
    assert "�[" in said


def test_colors_are_for_terminals_only(capsys: pytest.CaptureFixture[str]) -> None:
    assert "\x1b" not in run(capsys, SENTENCE)
    console = Console(
        file=io.StringIO(), force_terminal=True, color_system="truecolor", highlight=False
    )
    walked = walk(build("tiny-encoder", seed=0), [SENTENCE])
    WalkPage(walked, load_words("en"), console, seed=0).show()
    assert isinstance(console.file, io.StringIO)
    assert "\x1b[" in console.file.getvalue()


def test_a_picture_is_drawn(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "multi_head_attention_map.png"
    said = run(capsys, SENTENCE, "--language", "ru", "--picture", str(path))
    assert imread(path).shape[:2] == (900, 1600)
    assert in_order(said, "Картинка:", "multi_head_attention_map.png")
    assert list(tmp_path.iterdir()) == [path]


def test_scaling_is_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "scaling.png"
    said = run(capsys, "--scaling", "--picture", str(path))
    rows = [line.split() for line in said.splitlines() if re.match(r" +\d+ ", line)]
    assert [int(row[0]) for row in rows] == [8, 16, 32, 64, 128, 256, 512]
    for row in rows:
        assert float(row[1]) == pytest.approx(int(row[0]), rel=0.1)
        assert float(row[2]) == pytest.approx(1.0, rel=0.1)
    assert imread(path).shape[:2] == (600, 1600)
    assert "Без 1/√d" in run(capsys, "--scaling", "--language", "ru")


@pytest.mark.parametrize(
    ("arguments", "value", "remedy"),
    [
        ([SENTENCE, "--head", "9"], "--head 9", "use 0 to 7"),
        ([SENTENCE, "--position", "7"], "--position 7", "use 0 to 6"),
        ([SENTENCE, "--position", "-1"], "--position -1", "use 0 to 6"),
        ([SENTENCE, "--sentence", "1"], "--sentence 1", "use 0"),
        ([""], "text 0", "write one or more"),
        (["a", "   "], "text 1", "write one or more"),
        ([], "no text", 'manyheads explain "Hello, world!"'),
        ([SENTENCE, "--language", "fr"], "'fr'", "en or ru"),
        ([SENTENCE, "--seed", "-1"], "-1", "--seed must be in 0 to"),
        (["--scaling", SENTENCE], "--scaling", "leave it out"),
        (["--scaling", "--head", "2"], "--scaling", "leave it out"),
        ([SENTENCE, "--picture", "map.jpg"], "map.jpg", ".png"),
        ([SENTENCE, "--picture", "nowhere/map.png"], "nowhere", "folder"),
    ],
)
def test_wrong_use_is_answered_in_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], value: str, remedy: str
) -> None:
    line = refused(capsys, *arguments)
    assert value in line
    assert remedy in line


def test_a_picture_that_cannot_be_written_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def forbidden(self: Path, _: Path) -> None:
        raise PermissionError(13, "Permission denied", str(self))

    monkeypatch.setattr(Path, "replace", forbidden)
    path = tmp_path / "map.png"
    assert main(["explain", "Hello", "--picture", str(path)]) == 1
    assert capsys.readouterr().err == f"error: {path}: Permission denied.\n"
    assert list(tmp_path.iterdir()) == []


def test_disagreement_is_printed_and_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def spoiled(*arguments: object, **choices: object) -> Walk:
        return spoil(walk(*arguments, **choices))  # type: ignore[arg-type]

    monkeypatch.setattr("manyheads.explain.layer_walk.walk", spoiled)
    assert main(["explain", SENTENCE]) == 1
    said = capsys.readouterr().out
    assert "✗ NOT the same by hand, largest difference 1.0e+00" in said
    assert "DISAGREE" in said


def spoil(walked: Walk) -> Walk:
    """The same walk with a model that adds up wrongly."""
    step = walked[Stage.ATTENTION_SUM]
    wrong = Step(step.model + 1.0, step.hand)
    return replace(walked, steps={**walked.steps, Stage.ATTENTION_SUM: wrong})


def test_both_languages_say_the_same_things() -> None:
    english, russian = load_words("en"), load_words("ru")
    assert english.keys() == russian.keys()
    assert set(tomllib.loads(WORDS_FILE.read_text("utf-8"))) == {"en", "ru"}
    for key, text in english.items():
        assert text.strip()
        assert russian[key].strip()
        assert _blanks(text) == _blanks(russian[key]), key


def _blanks(text: str) -> set[tuple[str, str]]:
    parts = Formatter().parse(text)
    return {(name, form or "") for _, name, form, _ in parts if name is not None}


class Noted(dict[str, str]):
    """Words that remember which of them were read."""

    def __init__(self, words: dict[str, str]) -> None:
        super().__init__(words)
        self.read: set[str] = set()

    def __getitem__(self, key: str) -> str:
        self.read.add(key)
        return super().__getitem__(key)


def test_every_text_is_used(tmp_path: Path) -> None:
    words = Noted(dict(load_words("ru")))
    console = Console(file=io.StringIO(), width=100)
    model = build("tiny-encoder", seed=0)
    page = WalkPage(walk(model, [LONG]), words, console, seed=0)
    page.show()
    page.draw(tmp_path / "map.png")
    WalkPage(spoil(walk(model, ["a b", "c"])), words, console, seed=0).show()
    scaling = ScalingPage(measure([8, 16]), words, console, seed=0)
    scaling.show()
    scaling.draw(tmp_path / "scaling.png")
    assert words.read == set(words)


def test_manyheads_without_arguments_prints_first_steps(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    assert 'manyheads explain "' in capsys.readouterr().out


def test_the_version_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    assert re.fullmatch(r"manyheads \S.*\n", capsys.readouterr().out)


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["explain", "--help"])
    assert caught.value.code in (0, None)
    assert 'manyheads explain "' in capsys.readouterr().out


def test_help_lists_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines if re.match("  [a-z]", line)] == list(ALL_COMMANDS)


def test_an_interrupted_command_ends_in_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: str) -> dict[str, str]:
        raise KeyboardInterrupt

    monkeypatch.setattr("manyheads.explain.load_words", interrupted)
    assert main(["explain", "a"]) == 1
    assert capsys.readouterr().err == "error: interrupted.\n"


# The root package is replaced, because what it imports is tested elsewhere.
READ_ARGUMENTS_ALONE = """
import sys, types
root = types.ModuleType("manyheads")
root.__path__ = [sys.argv[1]]
sys.modules["manyheads"] = root
from manyheads.cli.main import ALL_COMMANDS, main
main(["--help"])
main(["inspect", "--txt", "a"])
try:
    main(["inspect", "--help"])
except SystemExit:
    pass
heavy = {"torch", "rich", "matplotlib", "numpy", "tokenizers"} & set(sys.modules)
print("heavy:", *sorted(heavy))
"""


def test_help_waits_for_nothing_heavy() -> None:
    result = subprocess.run(
        [sys.executable, "-c", READ_ARGUMENTS_ALONE, str(PACKAGE)],
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stdout.splitlines()[-1] == "heavy:"


def test_it_runs_as_a_module() -> None:
    result = subprocess.run(
        [sys.executable, "-m", "manyheads", "explain", "Hello", "--no-such"],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: --no-such ")
