"""The guide of run files names every key and every kind that there is, and its example is one."""

import re
import tomllib
from dataclasses import fields
from pathlib import Path
from typing import get_args

import pytest

from manyheads.train.loop.checkpoint import RunFolder
from manyheads.train.optim.optimizers import OptimizerConfig
from manyheads.train.optim.schedules import BatchGrowth, Schedule
from manyheads.train.run_file.data_config import Data, Texts
from manyheads.train.run_file.data_sources import validation_paths
from manyheads.train.run_file.phases import Phase
from manyheads.train.run_file.run_config import (
    SECTIONS,
    AnyObjective,
    AnyRegularizer,
    HeadOptions,
    ModelSource,
    RunOptions,
    parse_run,
)

GUIDE = (Path(__file__).parents[3] / "docs/guides/run-file.md").read_text()
PARTS = dict(re.findall(r"(?ms)^## ([^\n]+)\n(.*?)(?=^## |\Z)", GUIDE))
TABLES = {
    "model": (ModelSource, HeadOptions),
    "data": (*get_args(Data), BatchGrowth),
    "objective": get_args(AnyObjective),
    "regularizer": get_args(AnyRegularizer),
    "optimizer": get_args(OptimizerConfig),
    "schedule": get_args(Schedule),
    "phase": (Phase,),
    "run": (RunOptions,),
}


@pytest.mark.parametrize("part", TABLES)
def test_every_key_is_named(part: str) -> None:
    said = set(re.findall(r"\w+", " ".join(re.findall(r"`([^`]+)`", PARTS[part]))))
    for kind in TABLES[part]:
        missing = {field.name for field in fields(kind) if field.init} - said
        assert not missing, f"{kind.__name__}: {missing}"


@pytest.mark.parametrize("part", ["objective", "regularizer", "optimizer", "schedule"])
def test_every_kind_is_named(part: str) -> None:
    for kind in TABLES[part]:
        assert f"`{kind.__name__}`" in PARTS[part]


def test_every_table_and_every_file_is_named() -> None:
    for section in SECTIONS:
        assert f"[{section}]" in GUIDE
    for name in ("checkpoints", "metrics", "telemetry", "data", "model"):
        assert getattr(RunFolder(Path()), name).name in PARTS["What is in the folder"]


def test_the_examples_are_runs() -> None:
    mixed, example = re.findall(r"(?s)```toml\n(.*?)```", GUIDE)
    tables = tomllib.loads(example)
    rest = {"model": {"size": "gpt2"}, "objective": {"kind": "CausalLM"}, "run": {"folder": "out"}}
    assert [phase.name for phase in parse_run({**rest, **tables}).phases.each] == [
        *("short", "long", "decay")
    ]
    tables = tomllib.loads(mixed)
    tables["data"] |= {"max_length": 8, "batch": 64}
    data = parse_run({**rest, **tables, "run": {"folder": "out", "steps": 1}}).data[0]
    assert isinstance(data, Texts)
    assert set(data.sources) == set(validation_paths(data.validation)) == {"web", "books"}
