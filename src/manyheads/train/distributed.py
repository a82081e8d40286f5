"""The processes of a run: one alone, or as many as torchrun started.

One machine, a process for each of 8 GPUs:

    torchrun --nproc-per-node 8 -m manyheads train run.toml

Several machines, the same command on each; HOST is the first of them, and all see one disk:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m manyheads train run.toml
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from manyheads.errors import ConfigError

Distributed = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Crew:
    """Who this process is among those of the run, and how they tell each other things.

    Checkpoints are written while training goes on, so they have a group of their own: two threads
    that talk in one would take each other's words.
    """

    rank: int = 0
    world: int = 1
    device: torch.device = torch.device("cpu")
    saving: Any = None

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def alone(self) -> bool:
        return self.world == 1

    def sum(self, numbers: Tensor) -> Tensor:
        """The sum over all processes, which each of them gets."""
        if not self.alone:
            dist.all_reduce(numbers)
        return numbers

    def agree(self, value: Any) -> Any:
        """What the first process says."""
        if self.alone:
            return value
        told = [value]
        dist.broadcast_object_list(told, src=0, device=self.device)
        return told[0]

    def meet(self) -> None:
        """Wait until all are here."""
        if not self.alone:
            self.sum(torch.zeros(1, device=self.device))


@contextmanager
def crew(distributed: Distributed, device: str) -> Iterator[Crew]:
    """Join the processes that torchrun started; without it this one is alone."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Crew(device=torch.device(device))
        return
    if distributed == "none":
        raise ConfigError(
            f'run.distributed is "none" and torchrun started {world} processes',
            'set it to "ddp" or "fsdp"',
        )
    local = int(os.environ["LOCAL_RANK"])
    here = torch.device(device)
    if here.type == "cuda":
        here = torch.device("cuda", local)
        torch.cuda.set_device(here)
    joined = dist.is_initialized()
    if not joined:
        # The first process tokenises while the others wait.
        backend = "cuda:nccl,cpu:gloo" if here.type == "cuda" else "gloo"
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        saving = dist.new_group(backend="gloo")
        yield Crew(rank=dist.get_rank(), world=world, device=here, saving=saving)
    finally:
        # A group that somebody else has made is not ours to end.
        if not joined:
            dist.destroy_process_group()
