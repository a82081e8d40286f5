"""The command line as a whole: help in narrow terminals, Ctrl-C, bytes that are no text, notes."""

import json
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from pathlib import Path

import pytest

from manyheads import load
from manyheads.checkpoints.folder import save
from manyheads.cli.main import ALL_COMMANDS, main
from manyheads.errors import LongTextWarning
from tests.studio import models

# Imports torch as the command line does, but is interrupted in the middle of it.
INTERRUPTED_IMPORT = """
import os, signal, sys
from manyheads import __main__ as program

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == where:
            os.kill(os.getpid(), signal.SIGINT)

where = sys.argv.pop(1)
sys.meta_path.insert(0, Interrupts())
sys.exit(program.main())
"""


@pytest.mark.parametrize("module", ["tyro", "torch", "torch.nn", "manyheads.checkpoints.folder"])
def test_ctrl_c_during_an_import_is_one_line(module: str) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", INTERRUPTED_IMPORT, module, "inspect", "house-gpt"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 1
    # On a slow machine, notes that it is working come first.
    notes = [line for line in ended.stderr.splitlines() if not line.startswith("inspect: ")]
    assert notes == ["error: interrupted."]


def test_ctrl_c_is_handled_by_the_installed_command() -> None:
    project = tomllib.loads(Path("pyproject.toml").read_text("utf-8"))["project"]
    assert project["scripts"]["manyheads"] == "manyheads.__main__:main"
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.parametrize("command", ["", *ALL_COMMANDS])
def test_help_fits_a_narrow_terminal(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "50")
    words = [command, "--help"] if command else ["--help"]
    with suppress(SystemExit):
        assert main(words) == 0
    help_text = capsys.readouterr().out
    assert "usage: manyheads" in help_text
    # A single word may be longer than the terminal is wide.
    wide = [line for line in help_text.splitlines() if len(line) > 50 and " " in line.strip("│ ")]
    assert wide == []
    assert "(default: )" not in help_text
    assert "None" not in help_text


def test_bytes_that_are_not_utf8_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["generate", "--text", "caf\udce9"]) == 2
    assert "--text 'caf\\udce9' is not UTF-8" in capsys.readouterr().err


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that was trained on texts of 8 tokens and reads more."""
    folder = tmp_path_factory.mktemp("main") / "model"
    model = models.decoder(layers=1)
    model.trained_length = 8
    save(model, folder)
    return folder


def test_past_the_trained_length_every_command_warns_once(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = "The cat sat on the mat and the dog sat on the log."
    for words in (
        ["ablate", str(trained), "--text", text, "--text", f"{text} {text}"],
        ["attribute", str(trained), "--text", text],
        ["generate", str(trained), "--text", "The cat", "--max-new-tokens", "9"],
        ["encode", str(trained), "--text", text, "-o", str(tmp_path / "vectors.npy")],
    ):
        assert main(words) == 0
        message = capsys.readouterr().err
        assert message.count("trained on up to 8") == 1, words
    assert main(["attribute", str(trained), "--text", "The cat"]) == 0
    assert "trained on" not in capsys.readouterr().err


def test_the_trained_length_is_saved_and_a_run_file_comes_first(
    trained: Path, tmp_path: Path
) -> None:
    assert json.loads((trained / "tokenizer_config.json").read_text())["model_max_length"] == 8
    model = load(trained)
    assert model.trained_length == 8
    save(model, tmp_path / "again")
    for key in ("max_length", "length"):
        (tmp_path / "again" / "run.toml").write_text(f"[data]\n{key} = 6\n")
        assert load(tmp_path / "again").trained_length == 6
    (tmp_path / "again" / "run.toml").write_text("[data\nlength = 6\n")
    assert load(tmp_path / "again").trained_length == 8
    assert load("house-gpt").trained_length == 512
    with pytest.warns(LongTextWarning, match="text 1 has 9 tokens"):
        model.warn_if_longer(9, "text 1")
