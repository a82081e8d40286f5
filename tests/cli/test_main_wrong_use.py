"""Wrong use of the command line ends with one line: what was given, why it is wrong, what to do."""

from pathlib import Path

import pytest

from manyheads.cli.commands.tasks.extract import Extract
from manyheads.cli.main import ALL_COMMANDS, _with_flags, main
from manyheads.encoding.classify import NO_HEAD
from manyheads.errors import InputError


@pytest.mark.parametrize(
    ("words", "value", "remedy"),
    [
        (["inspct"], "'inspct'", "try inspect"),
        (["xyzzy"], "'xyzzy'", "see manyheads --help"),
        (["--verbose"], "--verbose", "see manyheads --help"),
        (["inspect", "--txt", "a"], "--txt", "try --text"),
        (["inspect", "--replace-with", "zero"], "--replace-with", "see manyheads inspect --help"),
        (["inspect", "--tokens", "x"], "'x'", "--tokens must be an integer"),
        (["inspect", "--tokens=1e3"], "'1e3'", "--tokens must be an integer"),
        (["generate", "--top-p", "half"], "'half'", "--top-p must be a number"),
        (["gate", "m", "--file", "a", "-o", "b", "--layers", "1", "z"], "'z'", "an integer"),
        (["ablate", "--replace-with", "one"], "'one'", "zero, mean or resample"),
        (["completion", "tcsh"], "'tcsh'", "bash, zsh or fish"),
        (["inspect", "--tokens"], "--tokens", "write --tokens INT"),
        (["inspect", "--text", "-x"], "--text", "--text=-x"),
        (["encode"], "MODEL", "see manyheads encode --help"),
        (["gate", "model"], "--file TEXTFILE", "see manyheads gate --help"),
        (["inspect", "house-gpt", "The old"], "'The old'", "use --text 'The old'"),
        (["inspect", "house-gpt", "The old", "--tokens", "12"], "'The old'", "--text 'The old'."),
        (["encode", "house-bert", "The", "old"], "'The old'", "use --text 'The old'"),
        (["train", "run.toml", "run.steps=3"], "'run.steps=3'", "use --set run.steps=3"),
        (["explain", "a", "--head", "1", "b"], "'b'", "before the options"),
        (["convert", *"abc"], "'c'", "see manyheads convert --help"),
    ],
)
def test_wrong_use_ends_with_one_line(
    words: list[str], value: str, remedy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert printed.err.startswith("error: ")
    assert printed.err.count("\n") == 1
    assert value in printed.err
    assert remedy in printed.err


def test_a_file_that_exists_is_read_with_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "text.txt"
    file.write_text("The old", "utf-8")
    assert main(["inspect", "house-gpt", str(file)]) == 2
    assert f"use --file {file}." in capsys.readouterr().err
    assert main(["inspect", "house-gpt", "x" * 300]) == 2
    assert "use --text" in capsys.readouterr().err


def test_a_remedy_names_a_command_and_no_function_of_python() -> None:
    command = Extract("house-bert")
    for error, words in (
        (InputError(*NO_HEAD), "manyheads train"),
        (InputError("the model classifies tokens, not texts", "use manyheads.tag"), "extract"),
        (InputError("no O", "train one on IOB2 tags, or use manyheads.tag"), "classify"),
    ):
        message = _with_flags(error, command)
        assert words in message
        assert "manyheads." not in message


def test_no_help_shows_an_empty_default(capsys: pytest.CaptureFixture[str]) -> None:
    for name in ALL_COMMANDS:
        with pytest.raises(SystemExit):
            main([name, "--help"])
        assert "(default: )" not in " ".join(capsys.readouterr().out.split()), name


@pytest.mark.parametrize(
    ("words", "flag"),
    [
        (["report", "--tokens", "-5"], "--tokens"),
        (["report", "--pattern-tokens", "1"], "--pattern-tokens"),
        (["generate", "--text", "a", "--max-new-tokens", "-1"], "--max-new-tokens"),
        (["generate", "--text", "a", "--top-k", "0"], "--top-k"),
    ],
)
def test_an_error_of_the_library_names_the_flag(
    words: list[str], flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    printed = capsys.readouterr().err
    assert flag in printed
    assert flag.removeprefix("--").replace("-", "_") + "=" not in printed
    assert words[-1] in printed
