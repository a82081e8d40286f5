"""The processes of a run: one alone, or as many as torchrun started.

One machine, a process for each of 8 GPUs:

    torchrun --nproc-per-node 8 -m manyheads train run.toml

Several machines, the same command on each; HOST is the first of them, and all share a disk:

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
class ProcessGroup:
    """The rank of this process, the number of processes, and collective operations.

    Checkpoints are written in a thread while training continues, so they have a process group of
    their own: collectives of two threads in one group could be mixed up.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    checkpoint_group: Any = None

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    @property
    def is_single(self) -> bool:
        return self.world_size == 1

    def all_reduce(self, numbers: Tensor) -> Tensor:
        """The sum over all processes."""
        if not self.is_single:
            dist.all_reduce(numbers)
        return numbers

    def broadcast(self, value: Any) -> Any:
        """The value of the first process."""
        if self.is_single:
            return value
        values = [value]
        dist.broadcast_object_list(values, src=0, device=self.device)
        return values[0]

    def barrier(self) -> None:
        """Wait for all processes."""
        if not self.is_single:
            self.all_reduce(torch.zeros(1, device=self.device))


@contextmanager
def join_processes(distributed: Distributed, device: str) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, or run in this one alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size == 1:
        yield ProcessGroup(device=torch.device(device))
        return
    if distributed == "none":
        raise ConfigError(
            f'run.distributed is "none" and torchrun started {world_size} processes',
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
        checkpoint_group = dist.new_group(backend="gloo")
        yield ProcessGroup(
            rank=dist.get_rank(),
            world_size=world_size,
            device=here,
            checkpoint_group=checkpoint_group,
        )
    finally:
        # A group that was initialised elsewhere is not ours to destroy.
        if not joined:
            dist.destroy_process_group()
