"""Processes that share texts train as one does: the same losses and the same weights."""

import os
from pathlib import Path
from typing import Any

import pytest

from manyheads import load
from manyheads.checkpoints.folder import save
from manyheads.errors import ConfigError
from manyheads.models.build import build, get_config
from manyheads.train.context_parallel import check_shared_texts
from manyheads.train.loop import model_setup
from manyheads.train.loop.reporting import MetricsLog
from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import Run, parse_run
from tests.processes import in_processes
from tests.train.tiny import tables, write_corpus

STEPS = 4
# Long enough that every process has tokens of every text, and some texts that are short.
LENGTH = 160


def run_in(place: Path, objective: str = "CausalLM", **settings: Any) -> Run:
    """Rotary and windows for masked tokens, learned positions for next tokens."""
    table = tables(place.parent, steps=STEPS, checkpoint_every=0, **settings)
    table["run"]["folder"] = str(place)
    table["model"] = {"folder": str(place.parent / "start")}
    table["data"] |= {
        "separator": "never",
        "max_length": LENGTH,
        "batch": 4 * LENGTH,
        "micro_batch": 2 * LENGTH,
        "validation": 0.2,
        "store": str(place.parent / "store"),
    }
    if objective == "MaskedLM":
        change = {"layers": 3, "width": 16, "heads": 2, "hidden": 16, "vocabulary": 300}
        table["model"] = {"size": "modernbert-base", "change": change}
        table["objective"] = {"kind": "MaskedLM", "mask": 5, "specials": [0, 1]}
    return parse_run(table)


def train_together(folder: Path) -> None:
    os.environ["WORLD_SIZE"] = "4"
    train(run_in(folder / "four", context_parallel=4), progress=False)
    settings = {"distributed": "fsdp", "context_parallel": 2, "recompute": "all"}
    with pytest.MonkeyPatch.context() as patch:
        # Sharded, the folder is read in parts and never as a whole.
        patch.delattr(model_setup, "load")
        train(run_in(folder / "two-by-two", **settings), progress=False)
    train(run_in(folder / "masked-four", "MaskedLM", context_parallel=4), progress=False)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("shared")
    write_corpus(place)
    config = {"layers": 2, "width": 16, "heads": 2, "vocabulary": 300, "positions": LENGTH}
    save(build("gpt2", dropout=0.0, seed=5, **config), place / "start")
    train(run_in(place / "one"), progress=False)
    train(run_in(place / "masked-one", "MaskedLM"), progress=False)
    assert in_processes(4, lambda: train_together(place))
    return place


def losses(place: Path) -> list[float]:
    lines = MetricsLog(place / "metrics.jsonl").read()
    return [line["loss"] if "loss" in line else line["validation"]["loss"] for line in lines]


CASES = [("four", "one"), ("two-by-two", "one"), ("masked-four", "masked-one")]


@pytest.mark.parametrize(("shared", "alone"), CASES)
def test_losses_are_those_of_one_process(folder: Path, shared: str, alone: str) -> None:
    assert losses(folder / shared) == pytest.approx(losses(folder / alone), abs=1e-5)
    assert len(losses(folder / alone)) == STEPS + 1


@pytest.mark.parametrize(("shared", "alone"), CASES)
def test_weights_are_those_of_one_process(folder: Path, shared: str, alone: str) -> None:
    ours, expected = load(folder / shared / "model"), load(folder / alone / "model")
    for (name, weight), other in zip(
        ours.state_dict().items(), expected.state_dict().values(), strict=True
    ):
        assert (weight - other).abs().max() < 2e-3, name


def refused(run: Run, change: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as caught:
        check_shared_texts(run, build(get_config("gpt2", layers=2, width=16, heads=2, **change)))
    return str(caught.value)


def test_what_needs_whole_texts_is_refused_by_name(tmp_path: Path) -> None:
    run = run_in(tmp_path / "out", context_parallel=2)
    check_shared_texts(run, build("gpt2", layers=1, width=16, heads=2, vocabulary=300, dropout=0.0))
    reason = refused(run, {"vocabulary": 300, "dropout": 0.1})
    assert "layer 0 drops attention weights" in reason
    assert "run.context_parallel=2" in reason
    compiled = run_in(tmp_path / "out", context_parallel=2, compile=True)
    assert "compile" in refused(compiled, {"vocabulary": 300, "dropout": 0.0})
