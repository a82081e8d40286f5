"""How a run that is stopped before its first step tells it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.main import main
from manyheads.data import writing
from tests.train.tiny import write_corpus


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    write_corpus(tmp_path, documents=40)
    (tmp_path / "run.toml").write_text("""
[model]
size = "gpt2"
change = { layers = 1, width = 16, heads = 2, vocabulary = 300, positions = 16, dropout = 0.0 }

[data]
train = "corpus.txt"
tokenizer = "tokenizer.json"
length = 16
batch = 64

[objective]
kind = "CausalLM"

[run]
folder = "out"
steps = 4
device = "cpu"
""")
    return tmp_path / "run.toml"


def test_stopped_while_tokenising_it_says_so_and_goes_on(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tokenise = writing._tokenise

    def interrupted(*given: Any) -> None:
        tokenise(*given)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(writing, "_tokenise", interrupted)
        assert main(["train", run_file.name]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == (
        "stopped while tokenising, of which finished parts are kept; "
        "go on with: manyheads train run.toml"
    )
    assert main(["train", run_file.name]) == 0
    assert capsys.readouterr().out.startswith("4 steps, ")
