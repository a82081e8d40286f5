"""manyheads studio, as far as it goes without waiting for Ctrl-C."""

import os
import signal
import socket
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from manyheads.checkpoints.folder import save
from manyheads.cli.commands import studio
from manyheads.cli.main import main
from tests.studio import models


def test_a_port_in_use_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["studio", "house-gpt", "--port", str(port), "--no-browser"]) == 2
    error = capsys.readouterr().err
    assert f"127.0.0.1:{port}" in error
    assert "--port 0" in error


def test_a_missing_extra_is_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(studio, "find_spec", lambda name: None if name == "starlette" else name)
    assert main(["studio", "--no-browser"]) == 2
    assert "pip install starlette uvicorn" in capsys.readouterr().err


def test_a_missing_model_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["studio", "no/such/folder/here", "--port", "0", "--no-browser"]) != 0
    assert "no/such/folder/here" in capsys.readouterr().err


WITHOUT_TORCH = """
import sys
from manyheads.cli.main import main
codes = [main(["studio", *words, "--no-browser"]) for words in (["no/such/folder"], ["smollm2"])]
codes.append(main(["studio", "--index", "nowhere.index", "--no-browser"]))
print(codes, "torch" in sys.modules)
"""


def test_what_is_missing_is_reported_before_torch_is_loaded(tmp_path: Path) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH]
    variables = os.environ | {"MANYHEADS_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    ended = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == "[2, 2, 2] False"
    lines = ended.stderr.splitlines()
    assert lines[0].startswith("studio: opening no/such/folder")
    for message in ("no/such/folder", "manyheads get smollm2", "no index nowhere.index"):
        assert message in ended.stderr


def test_ctrl_c_is_how_it_ends(tmp_path: Path) -> None:
    save(models.decoder(layers=1), tmp_path / "tiny")
    command = [sys.executable, "-m", "manyheads", "studio", str(tmp_path / "tiny")]
    command += ["--port", "0", "--no-browser"]
    # A shell lets what it runs in the background ignore Ctrl-C, and the tests may be that.
    heeds = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
    started = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=heeds)
    assert started.stderr is not None
    with started:
        assert f"studio: opening {tmp_path / 'tiny'}" in started.stderr.readline()
        assert "studio: http://127.0.0.1:" in started.stderr.readline()
        started.send_signal(signal.SIGINT)
        _, message = started.communicate(timeout=60)
        assert "error" not in message
        assert started.returncode == 0


def test_help_has_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["studio", "--help"])
    assert "manyheads studio house-gpt" in capsys.readouterr().out
