"""A checkpoint that the disk does not take, or has spoiled, is told; those before it are whole."""

import errno
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter

from manyheads.errors import InputError, TrainingError
from manyheads.train.loop import checkpoint
from manyheads.train.loop.session import train
from tests.messages import refuses
from tests.train.tiny import tiny, write_corpus


@pytest.mark.parametrize("where", ["tensors", "state"])
def test_a_full_disk_is_told_with_where_to_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    write_corpus(tmp_path, documents=40)
    calls: list[int] = []

    def full_at_the_second(function: Any) -> Any:
        def call(*given: Any, **more: Any) -> Any:
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return function(*given, **more)

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


def _cut(checkpoint: Path) -> None:
    [shard] = checkpoint.glob("*.safetensors")
    shard.write_bytes(shard.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (_cut, "is damaged (Error while deserializing header: incomplete metadata"),
        (lambda place: next(place.glob("*.safetensors")).unlink(), "has no weights"),
        (lambda place: (place / "state.json").write_text("{}"), "lacks the state of the run"),
        (lambda place: (place / "state.json").write_text("["), "is not a checkpoint of a run (Exp"),
    ],
)
def test_a_damaged_checkpoint_is_told_and_the_one_before_is_there(
    tmp_path: Path, damage: Callable[[Path], Any], told: str
) -> None:
    write_corpus(tmp_path)
    train(tiny(tmp_path, steps=4, checkpoint_every=2), progress=False)
    newest = tmp_path / "out/checkpoints/step-4"
    damage(newest)
    with pytest.raises(InputError) as refused:
        train(tiny(tmp_path, steps=6), progress=False)
    assert str(refused.value).startswith(str(newest))
    assert told in str(refused.value)
    assert str(refused.value).endswith(
        "remove it to resume from the one before, or choose another with --from."
    )
    shutil.rmtree(newest)
    assert train(tiny(tmp_path, steps=6), progress=False).state.step == 6
