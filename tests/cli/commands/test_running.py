"""How a run that is stopped before its first step tells it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.main import main
from manyheads.data import tokenise
from tests.train.tiny import write_run_file


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path)


def test_stopped_while_tokenising_it_says_so_and_goes_on(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenise._tokenise

    def interrupted(*given: Any) -> None:
        original(*given)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(tokenise, "_tokenise", interrupted)
        assert main(["train", run_file.name]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == (
        "interrupted while tokenising (finished parts are kept); "
        "go on with: manyheads train run.toml"
    )
    assert main(["train", run_file.name]) == 0
    assert capsys.readouterr().out.startswith("4 steps, ")
