"""Runs of two processes, one after another.

They are started as torchrun does it, but forked from a process that has imported everything.
"""

from pathlib import Path
from typing import Any

import torch
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from manyheads.train.loop.session import train
from manyheads.train.run_file.run_config import Run, parse_run
from tests.train.tiny import tables

STEPS = 6


def run_in(place: Path, distributed: str, **settings: Any) -> Run:
    """Everything that differs between processes and should not show: dropout, masks, packing."""
    tables_of_run = tables(place.parent, dropout=0.1, distributed=distributed, **settings)
    tables_of_run["run"]["folder"] = str(place)
    tables_of_run["data"] |= {"validation": 0.1, "store": str(place.parent / "store")}
    return parse_run(tables_of_run)


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    # Once for all runs: groups that are made anew find the addresses of those before.
    torch.distributed.init_process_group("gloo")
    train(run_in(folder / "ddp", "ddp", steps=STEPS), progress=False)
    train(run_in(folder / "fsdp", "fsdp", steps=STEPS, telemetry_every=3), progress=False)
    train(run_in(folder / "two-then-one", "fsdp", steps=3), progress=False)
    train(run_in(folder / "one-then-two", "fsdp", steps=STEPS), progress=False)
    torch.distributed.destroy_process_group()


def run_two_processes(folder: Path) -> None:
    config = LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=2,
        rdzv_backend="c10d",
        rdzv_endpoint="localhost:0",
        start_method="fork",
        max_restarts=0,
    )
    elastic_launch(config, main)(folder)
