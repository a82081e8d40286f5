"""Commands on folders of families that only `transformers` opens."""

import json
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from manyheads import surgery
from manyheads.bridge.wrapped_model import wrap
from manyheads.checkpoints.folder import save
from manyheads.cli.main import main
from manyheads.errors import NativeModelError
from tests.bridge.zoo import tiny

WORDS = "w5 w6 w7 w5 w6 w7 w8"
TEXTS = ["--text", WORDS, "--text", "w9 w10 w9 w10"]
# The command, its words behind the folder, and what it prints or writes.
READING = {
    "inspect": ([*TEXTS], "L0H0"),
    "ablate": ([*TEXTS], "L0H0"),
    "attribute": (["--text", WORDS], "embedding"),
    "why": (["L1H0", "--text", WORDS], "L0H1"),
    "generate": (["--text", WORDS, "--max-new-tokens", "3"], "w"),
    "encode": (["--text", WORDS, "-o", "vectors.npy"], "vectors.npy"),
    "report": ([*TEXTS, "-o", "report.html"], "report.html"),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A StableLM, which manyheads does not open itself, with a tokenizer."""
    path = tmp_path_factory.mktemp("wrapped")
    tiny("stablelm").save_pretrained(path)
    tokenizer = Tokenizer(WordLevel({f"w{number}": number for number in range(60)}, "w3"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    return path


@pytest.mark.parametrize("command", READING)
def test_commands_that_read_open_it(
    command: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    words, expected = READING[command]
    assert main([command, str(folder), *words]) == 0
    printed = capsys.readouterr()
    assert "transformers opened" in printed.err
    assert expected in printed.out + printed.err


def test_two_of_them_are_compared(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compare", str(folder), str(folder), *TEXTS]) == 0
    assert "loss" in capsys.readouterr().out.lower()


def test_activations_are_written(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "activations"
    words = ["encode", str(folder), "--text", WORDS, "--site", "L1.feedforward", "-o", str(target)]
    assert main(words) == 0
    assert json.loads((target / "activations.json").read_text())["sites"] == {"L1.feedforward": 32}
    assert "7 tokens" in capsys.readouterr().out


CHANGING = {
    "prune": ["--file", "texts.txt", "--fraction", "0.2", "-o", "new"],
    "gate": ["--file", "texts.txt", "-o", "new"],
    "convert": ["-o", "new"],
}


@pytest.mark.parametrize("command", CHANGING)
def test_commands_that_change_refuse_it(
    command: str,
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "texts.txt").write_text(f"{WORDS}\n\nw9 w10 w9 w10\n")
    assert main([command, str(folder), *CHANGING[command]]) != 0
    message = capsys.readouterr().err
    assert "needs a native model" in message
    assert "stablelm" in message
    assert "manyheads convert" not in message
    assert not (tmp_path / "new").exists()


def test_a_known_family_is_sent_to_convert(tmp_path: Path) -> None:
    wrapped = wrap(tiny("llama"))
    with pytest.raises(NativeModelError, match="manyheads convert"):
        surgery.prune(wrapped, ["L0H0"])
    with pytest.raises(NativeModelError, match="manyheads convert"):
        save(wrapped, tmp_path / "new")
