"""manyheads studio, as far as it goes without waiting for Ctrl-C."""

import builtins
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from manyheads.checkpoints.folder import save
from manyheads.cli.main import main
from tests.studio import models


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["studio", "nowhere", "--port", str(port), "--no-browser"]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert "--port 0" in error


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    imported = builtins.__import__

    def without(name: str, *rest: Any, **named: Any) -> Any:
        if name == "manyheads.studio.server":
            raise ModuleNotFoundError("No module named 'starlette'", name="starlette")
        return imported(name, *rest, **named)

    monkeypatch.setattr(builtins, "__import__", without)
    assert main(["studio", "--no-browser"]) == 2
    assert "pip install starlette uvicorn" in capsys.readouterr().err


def test_a_missing_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio", "no/such/folder/here", "--port", "0", "--no-browser"]) != 0
    assert "no/such/folder/here" in capsys.readouterr().err


def test_ctrl_c_is_how_it_ends(tmp_path: Path) -> None:
    save(models.decoder(layers=1), tmp_path / "tiny")
    command = [sys.executable, "-m", "manyheads", "studio", str(tmp_path / "tiny")]
    command += ["--port", "0", "--no-browser"]
    # A shell lets what it runs in the background ignore Ctrl-C, and the tests may be that.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    assert started.stderr is not None
    with started:
        assert "studio: http://127.0.0.1:" in started.stderr.readline()
        started.send_signal(signal.SIGINT)
        _, message = started.communicate(timeout=60)
        assert "error" not in message
        assert started.returncode == 0


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["studio", "--help"])
    assert "manyheads studio house-gpt" in capsys.readouterr().out
