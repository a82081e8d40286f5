"""A checkpoint that the disk does not take, or has spoiled, is told; those before it are whole."""

import errno
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from manyheads.errors import ConfigError, InputError, TrainingError
from manyheads.train.loop import checkpoint
from manyheads.train.loop.manifest import find_damage
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.loop.train_step import Updater
from manyheads.train.run_file.run_config import Run, parse_run
from tests.messages import refuses
from tests.train.tiny import tables, tiny, write_corpus


@pytest.mark.parametrize("where", ["tensors", "state"])
def test_a_full_disk_is_an_error_with_the_checkpoint_to_resume_from(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_corpus(tmp_path, documents=40)
    calls: list[int] = []

    def full_at_the_second(function: Any) -> Any:
        def call(*inputs: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*inputs, **more)

        return call

    with monkeypatch.context() as patched:
        if where == "tensors":
            writer = HuggingFaceStorageWriter
            patched.setattr(writer, "write_data", full_at_the_second(writer.write_data))
        else:
            patched.setattr(checkpoint, "_finish", full_at_the_second(checkpoint._finish))
        with refuses(
            TrainingError,
            f"no checkpoint could be written to {tmp_path}/out/checkpoints "
            "(No space left on device): free some space, or repair the disk; the same command "
            "resumes from step-3, which is complete.",
        ):
            train(tiny(tmp_path), progress=False)
    assert [place.name for place in (tmp_path / "out/checkpoints").iterdir()] == ["step-3"]
    assert train(tiny(tmp_path), progress=False).state.step == 8


STEPS = 8


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of eight steps with checkpoints of every second one."""
    folder = tmp_path_factory.mktemp("finished")
    write_corpus(folder, documents=40)
    with pytest.MonkeyPatch.context() as patched:
        patched.chdir(folder)
        train(run_of(folder), progress=False)
    return folder


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """The same run as if it had been killed after six steps."""
    for file in ("corpus.txt", "tokenizer.json"):
        (tmp_path / file).symlink_to(finished / file)
    shutil.copytree(finished / "out", tmp_path / "out")
    shutil.rmtree(tmp_path / "out/checkpoints/step-8")
    shutil.rmtree(tmp_path / "out/model")
    return tmp_path


def run_of(folder: Path, **settings: Any) -> Run:
    requested = tables(folder, **{"steps": STEPS, "checkpoint_every": 2, "keep": 9, **settings})
    # So that the paths are the same wherever the run is.
    requested["data"] |= {"train": "corpus.txt", "tokenizer": "tokenizer.json"}
    return parse_run(requested)


def weights(folder: Path) -> bytes:
    return (folder / "out/model/model.safetensors").read_bytes()


def flip(file: Path, fraction: float = 0.5) -> None:
    data = bytearray(file.read_bytes())
    data[int(fraction * len(data))] ^= 16
    file.write_bytes(data)


def change_state(checkpoint: Path, **changes: Any) -> None:
    file = checkpoint / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def shard(checkpoint: Path) -> Path:
    [file] = checkpoint.glob("*.safetensors")
    return file


DAMAGES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "a weight": (lambda it: flip(shard(it)), "safetensors has another checksum"),
    "a header": (lambda it: flip(shard(it), 0.0), "safetensors has another checksum"),
    "half a shard": (lambda it: os.truncate(shard(it), 1000), "safetensors has 1,000 bytes"),
    "no shard": (lambda it: shard(it).unlink(), "safetensors is missing"),
    "another shard": (
        lambda it: shutil.copy(shard(it), it / "shard-2.safetensors"),
        "shard-2.safetensors is not in manifest.json",
    ),
    "no state": (lambda it: (it / "state.json").unlink(), "state.json is missing"),
    "a position": (
        lambda it: change_state(it, position={"step": 6, "epoch": 0, "batch": 3}),
        "state.json has",
    ),
    "a type": (lambda it: change_state(it, step="six"), "state.json has"),
    "no manifest": (lambda it: (it / "manifest.json").unlink(), "no manifest.json"),
    "a checksum": (lambda it: flip(it / "manifest.json"), "manifest.json"),
    "half a manifest": (lambda it: os.truncate(it / "manifest.json", 40), "manifest.json is not"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over_and_the_run_is_the_same(
    finished: Path,
    place: Path,
    damage: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    work, message = DAMAGES[damage]
    work(place / "out/checkpoints/step-6")
    train(run_of(place), progress=False)
    [line] = capsys.readouterr().err.splitlines()
    assert line.startswith(f"damaged in {place}/out/checkpoints: step-6 (")
    assert message in line
    assert line.endswith("; using step-4 instead")
    assert weights(place) == weights(finished)
    assert not find_damage(place / "out/checkpoints/step-6"), "it was not replaced"
    log = "out/metrics.jsonl"
    assert [line["loss"] for line in MetricsLog(place / log).read()] == [
        line["loss"] for line in MetricsLog(finished / log).read()
    ]


def test_without_an_intact_checkpoint_a_run_does_not_start_again(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    for step in (2, 4, 6):
        flip(shard(place / f"out/checkpoints/step-{step}"))
    with refuses(InputError, "no intact checkpoint: step-6 (...), step-4 (", "--fresh"):
        train(run_of(place), progress=False)
    with refuses(InputError, "step-2 is damaged", "--from"):
        train(run_of(place), resume_from="step-2", progress=False)


def test_a_checkpoint_of_an_earlier_version_is_used_where_it_is_named(
    finished: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    (place / "out/checkpoints/step-6/manifest.json").unlink()
    train(run_of(place), resume_from="step-6", progress=False)
    assert "step-6 has no manifest.json, so it may be damaged" in capsys.readouterr().err
    assert weights(place) == weights(finished)


def test_a_folder_without_a_state_is_replaced_when_its_step_comes(
    finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    checkpoints = place / "out/checkpoints"
    for file in ("state.json", "manifest.json"):
        (checkpoints / "step-6" / file).unlink()
    (checkpoints / "step-8").mkdir()
    (checkpoints / "step-8/notes.txt").write_text("not a checkpoint")
    train(run_of(place), progress=False)
    assert weights(place) == weights(finished)
    assert all(not find_damage(path) for path in checkpoints.iterdir())
    assert len(list(checkpoints.iterdir())) == 4


@pytest.mark.parametrize(
    "content",
    [
        "{}" * 2,
        "{}",
        "[]",
        "null",
        "[" * 100_000,
        '{"step": "six"}',
        '{"step": 2.5}',
        '{"step": -1}',
        '{"step": true}',
        '{"skipped": [{"step": 1}]}',
        '{"skipped": [5]}',
        '{"position": {"step": 1}}',
        '{"position": [1]}',
        '{"numbers": {"a": "b"}}',
        '{"run": 5}',
        '{"unknown": 5}',
        "\udc80",
    ],
)
def test_a_state_of_a_wrong_type_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "state.json").write_bytes(content.encode(errors="surrogateescape"))
    with refuses(InputError, f"{tmp_path}/state.json is not the state of a run", "--from"):
        checkpoint.read_state(tmp_path)


def test_the_last_good_checkpoint_outlives_damaged_ones(
    finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    begin = Updater.begin

    def damaging(self: Updater, prepared: Any, **more: Any) -> Any:
        if prepared.number == 7:
            flip(shard(place / "out/checkpoints/step-6"))
        return begin(self, prepared, **more)

    monkeypatch.setattr(Updater, "begin", damaging)
    train(run_of(place, keep=1), progress=False)
    assert weights(place) == weights(finished)
    # Step 6 would be the newest that a finite step followed.
    assert {path.name for path in (place / "out/checkpoints").iterdir()} == {"step-4", "step-8"}


def test_a_flipped_bit_of_the_tokens_ends_the_run_and_new_tokens_continue_it(
    finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    [store] = (place / "out/data").iterdir()
    flip(store / "tokens.bin")
    with refuses(InputError, f"{store}/tokens.bin is damaged in tokens 0 to", "remove this folder"):
        train(run_of(place), progress=False)
    shutil.rmtree(store)
    train(run_of(place), progress=False)
    assert weights(place) == weights(finished)


def test_other_texts_than_those_of_the_run_are_refused_without_a_store(
    finished: Path, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    shutil.rmtree(place / "out/data")
    (place / "corpus.txt").unlink()
    text = (finished / "corpus.txt").read_text()
    (place / "corpus.txt").write_text(text.replace("cat", "dog"))
    with refuses(ConfigError, "corpus.txt have changed", "restore them"):
        train(run_of(place), progress=False)


def test_damaged_lines_of_a_log_are_left_out_with_a_warning(
    finished: Path,
    place: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(place)
    log = place / "out/metrics.jsonl"
    lines = log.read_bytes().split(b"\n")
    lines[1] = b'{"step": 2, "loss": \xff'
    lines[3] = b'{"step": "four"}'
    log.write_bytes(b"\n".join(lines))
    with refuses(InputError, f"{log}, line 2 is damaged", "remove that line"):
        MetricsLog(log).read()
    train(run_of(place), progress=False)
    said = capsys.readouterr().err
    assert said.splitlines() == [
        f"{log}: lines 2, 4 are damaged and left out; the file as it was is metrics.jsonl.damaged"
    ]
    assert [line["step"] for line in MetricsLog(log).read()] == [1, 3, 5, 6, 7, 8]
    assert log.with_name("metrics.jsonl.damaged").read_bytes() == b"\n".join(lines)
    assert weights(place) == weights(finished)
