"""The scripts of manyheads completion, in the shells that they are for."""

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.command_table import options_of
from manyheads.cli.main import ALL_COMMANDS, main

TRIED = """
COMP_WORDS=("$@"); COMP_CWORD=$(($#-1)); _manyheads
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


def ran(*words: str, folder: Path) -> list[str]:
    result = subprocess.run(words, cwd=folder, capture_output=True, text=True, check=True)
    assert result.stderr == ""
    return sorted(line.split("\t")[0] for line in result.stdout.splitlines() if line)


@pytest.fixture(params=["bash", "fish"])
def completed(
    request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> Any:
    """What a shell offers for a line, its last word being typed, in a folder with three things."""
    if shutil.which(request.param) is None:
        pytest.skip(f"there is no {request.param} here")
    (tmp_path / "model").mkdir()
    (tmp_path / "my text.txt").touch()
    (tmp_path / "run.toml").touch()
    printed = script(request.param, capsys)

    def of(*words: str) -> list[str]:
        if request.param == "fish":
            line = " ".join(words)
            result = ran("fish", "-c", f"{printed}\ncomplete -C '{line}'", folder=tmp_path)
        else:
            result = ran("bash", "-c", printed + TRIED, "bash", *words, folder=tmp_path)
        return [each.rstrip("/") for each in result]

    return of


def test_commands_options_and_values_are_completed(completed: Any) -> None:
    assert set(ALL_COMMANDS) <= set(completed("manyheads", ""))
    assert completed("manyheads", "ins") == ["inspect"]
    assert completed("manyheads", "inspect", "--t") == ["--text", "--tokens"]
    assert completed("manyheads", "ablate", "--replace-with", "") == ["mean", "resample", "zero"]
    assert completed("manyheads", "completion", "") == ["bash", "fish", "zsh"]
    assert completed("manyheads", "inspect", "--seed", "") == []


def test_models_are_the_bundled_ones_and_folders(completed: Any) -> None:
    house = ["house-bert", "house-gpt", "house-gpt-gated"]
    pip = ["gemma", "minilm", "mpnet", "qwen-coder", "smollm2", "whisper"]
    assert completed("manyheads", "inspect", "") == sorted([*house, *pip, "model"])
    assert completed("manyheads", "studio", "model", "--port", "1", "house-b") == ["house-bert"]


def test_files_are_completed_where_files_are_meant(completed: Any) -> None:
    assert completed("manyheads", "inspect", "--file", "my") == ["my text.txt"]
    assert completed("manyheads", "report", "-o", "my") == ["my text.txt"]
    assert completed("manyheads", "adapt", "model", "ru") == ["run.toml"]
    assert completed("manyheads", "train", "ru") == ["run.toml"]


def test_bash_gives_an_option_and_its_file_in_three_words(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    (tmp_path / "text.txt").touch()
    printed = script("bash", capsys)
    for last in (["=", "te"], ["="]):
        words = ["bash", "-c", printed + TRIED, "bash", "manyheads", "inspect", "--file", *last]
        assert ran(*words, folder=tmp_path) == ["text.txt"]


def test_zsh_reads_its_script(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    if shutil.which("zsh") is None:
        pytest.skip("there is no zsh here")
    printed = script("zsh", capsys)
    known = "compdef() { echo $2; }\n"
    assert ran("zsh", "-f", "-c", known + printed, folder=tmp_path) == ["manyheads"]
    assert "'--file:TEXTFILE:_files'" in printed


@pytest.mark.parametrize("name", ALL_COMMANDS)
def test_every_option_of_the_help_is_known(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([name, "--help"])
    box = re.findall(r"^[│ ] ?(-.*?)(?:  |$)", capsys.readouterr().out, re.MULTILINE)
    message = {
        word for line in box for word in re.findall(r"(?:^|(?<=[ ,]))--?[a-z][a-z0-9-]*", line)
    }
    known = {each for option in options_of(ALL_COMMANDS[name]) for each in option.names}
    assert known == message


def test_an_unknown_shell_is_wrong_use() -> None:
    assert main(["completion", "tcsh"]) == 2
