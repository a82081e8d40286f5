"""manyheads train as a person at a terminal meets it."""

import os
import signal
from pathlib import Path
from typing import Any

import pytest

from manyheads.cli.main import main
from manyheads.data import tokenize
from manyheads.train.loop.train_step import Updater
from manyheads.train.run_file import data_config
from tests.train.tiny import write_run_file


@pytest.fixture
def run_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return write_run_file(tmp_path)


def test_a_file_is_trained_and_the_model_named(
    run_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "run.toml", "--set", "run.steps=3", "--set", "run.seed=1"]) == 0
    said = capsys.readouterr()
    assert said.out.startswith("3 steps, 1")
    assert said.out.endswith("saved to out/model as gpt2, which transformers can open\n")
    assert "training for 3 steps in out" in said.err
    assert main(["train", "run.toml", "--set", "run.seed=1"]) == 0
    assert "resuming at step 3 of 4 in out" in capsys.readouterr().err
    assert main(["train", str(run_file), "--fresh", "--set", "run.steps=1"]) == 0
    assert main(["train", "run.toml", "--from", "step-1"]) == 0


def test_an_interrupted_run_prints_how_to_resume(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    update = Updater.begin

    def interrupted(self: Updater, arguments: Any, **more: Any) -> Any:
        if arguments.number == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return update(self, arguments, **more)

    monkeypatch.setattr(Updater, "begin", interrupted)
    assert main(["train", run_file.name]) == 143
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("stopped at step ")
    assert said.endswith(", which is saved; resume with: manyheads train run.toml")
    assert main(["train", run_file.name, "--fresh", "--set", "run.folder=a b"]) == 143
    assert capsys.readouterr().err.endswith(" manyheads train run.toml --set 'run.folder=a b'\n")


def test_a_run_interrupted_before_its_first_step_prints_where_it_started_from(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(["train", run_file.name]) == 0

    def interrupted(*inputs: Any, **more: Any) -> Any:
        del inputs, more
        os.kill(os.getpid(), signal.SIGINT)

    monkeypatch.setattr(data_config, "write_store", interrupted)
    changed = ["--set", "run.folder=other"]
    assert main(["train", run_file.name, "--from", "out/checkpoints/step-4", *changed]) == 130
    command = "manyheads train run.toml --set run.folder=other --from out/checkpoints/step-4"
    assert capsys.readouterr().err.endswith(f"resume with: {command}\n")


@pytest.mark.usefixtures("run_file")
def test_a_wrong_key_is_refused_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "run.toml", "--set", "run.stesp=3"]) == 2
    assert capsys.readouterr().err == (
        "error: run.toml: run.stesp is not a known key: use run.steps.\n"
    )
    assert not Path("out").exists()


def test_a_run_interrupted_while_tokenizing_prints_so_and_can_be_resumed(
    run_file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    original = tokenize._tokenize

    def interrupted(*inputs: Any) -> None:
        original(*inputs)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patched:
        patched.setattr(tokenize, "_tokenize", interrupted)
        assert main(["train", run_file.name]) == 143
    assert capsys.readouterr().err.splitlines()[-1] == (
        "interrupted while tokenizing (finished parts are kept); "
        "resume with: manyheads train run.toml"
    )
    assert main(["train", run_file.name]) == 0
    assert capsys.readouterr().out.startswith("4 steps, ")
