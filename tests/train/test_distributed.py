"""Two processes train as one does, by DDP and by FSDP, and either goes on where the other was."""

from pathlib import Path

import pytest

from manyheads import load
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from tests.forked import forked
from tests.train.distributed_runs import STEPS, run_in, run_two_processes
from tests.train.tiny import write_corpus


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Runs of one process, then of two, then of one again."""
    place = tmp_path_factory.mktemp("together")
    write_corpus(place)
    train(run_in(place / "one", "none", steps=STEPS, telemetry_every=3), progress=False)
    train(run_in(place / "one-then-two", "none", steps=3), progress=False)
    assert forked(lambda: run_two_processes(place)) == 0
    train(run_in(place / "two-then-one", "none", steps=STEPS), progress=False)
    return place


def losses(place: Path) -> list[float]:
    lines = MetricsLog(place / "metrics.jsonl").read()
    return [line["loss"] if "loss" in line else line["validation"]["loss"] for line in lines]


@pytest.mark.parametrize("run", ["ddp", "fsdp", "two-then-one", "one-then-two"])
def test_however_many_processes_the_losses_are_the_same(folder: Path, run: str) -> None:
    result, whole = losses(folder / run), losses(folder / "one")
    if "then" in run:
        # They were validated half-way too, at the end of the shorter run.
        result = [*result[:3], *result[4:]]
    assert result == pytest.approx(whole, abs=1e-5)
    assert len(whole) == STEPS + 1


@pytest.mark.parametrize("run", ["ddp", "fsdp", "one-then-two"])
def test_the_model_left_behind_is_whole_and_the_same(folder: Path, run: str) -> None:
    ours, alone = load(folder / run / "model"), load(folder / "one/model")
    for (name, weight), other in zip(
        ours.state_dict().items(), alone.state_dict().values(), strict=True
    ):
        assert (weight - other).abs().max() < 2e-3, name


def test_sharded_each_process_writes_its_own_part(folder: Path) -> None:
    there = {file.name for file in (folder / "fsdp/checkpoints/step-6").iterdir()}
    assert there == {
        "manifest.json",
        "state.json",
        "shard-00001-model-00001-of-00001.safetensors",
        "shard-00002-model-00001-of-00001.safetensors",
    }


def test_heads_look_the_same_to_telemetry_however_weights_lie(folder: Path) -> None:
    ours = MetricsLog(folder / "fsdp/telemetry.jsonl").read()
    alone = MetricsLog(folder / "one/telemetry.jsonl").read()
    assert [line["step"] for line in ours] == [3, 6]
    for one, other in zip(ours, alone, strict=True):
        for layer, same in zip(one["entropy"], other["entropy"], strict=True):
            assert layer == pytest.approx(same, abs=1e-4)
