"""Distributed training: the processes that torchrun started, and the model wrapped for them.

One machine, a process for each of 8 GPUs:

    torchrun --nproc-per-node 8 -m manyheads train run.toml

Several machines, the same command on each; HOST is the first of them, and all share a disk:

    torchrun --nnodes 4 --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 \\
        -m manyheads train run.toml
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.checkpoints.deferred.sharded_load import model_layers, shard_module
from manyheads.errors import ConfigError
from manyheads.models.build import Model

Distributed = Literal["none", "ddp", "fsdp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessGroup:
    """The rank of this process, the number of processes, and collective operations.

    Each `context` processes in a row share the texts of a micro-batch, and are a `context_group`.
    Checkpoints are written in a thread while training continues, so they have a process group of
    their own: collectives of two threads in one group could be mixed up.
    """

    rank: int = 0
    world_size: int = 1
    device: torch.device = torch.device("cpu")
    checkpoint_group: Any = None
    context: int = 1
    context_group: Any = None

    @property
    def data_rank(self) -> int:
        """The number of those with which this process shares texts, which read the same data."""
        return self.rank // self.context

    @property
    def data_size(self) -> int:
        """How many read different data."""
        return self.world_size // self.context

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
def join_processes(
    distributed: Distributed, device: str, context: int = 1
) -> Iterator[ProcessGroup]:
    """Join the processes that torchrun started, or run in this one alone."""
    world_size = int(os.environ.get("WORLD_SIZE", "1"))
    if world_size % context:
        raise ConfigError(
            f"run.context_parallel={context}, and there are {world_size} processes",
            f"start a multiple of {context} with torchrun --nproc-per-node, or set it to 1",
        )
    if world_size == 1:
        yield ProcessGroup(device=torch.device(device))
        return
    if distributed == "none":
        raise ConfigError(
            f'run.distributed is "none" and torchrun started {world_size} processes',
            'set it to "ddp" or "fsdp"',
        )
    home, backend = torch.device(device), "gloo"
    if home.type == "cuda":
        home, backend = torch.device("cuda", int(os.environ["LOCAL_RANK"])), "cuda:nccl,cpu:gloo"
        torch.cuda.set_device(home)
    joined = dist.is_initialized()
    if not joined:
        # The first process tokenizes while the others wait.
        dist.init_process_group(backend, timeout=timedelta(hours=2))
    try:
        yield ProcessGroup(
            rank=dist.get_rank(),
            world_size=world_size,
            device=home,
            checkpoint_group=dist.new_group(backend="gloo"),
            context=context,
            context_group=_context_group(context),
        )
    finally:
        # A group that was initialized elsewhere is not ours to destroy.
        if not joined:
            dist.destroy_process_group()


def _context_group(context: int) -> Any:
    """The group of this process; all processes make all groups."""
    if context == 1:
        return None
    group, _ = dist.new_subgroups(context)
    return group


Recompute = Literal["none", "all"] | tuple[int, ...]
Answer = TypeVar("Answer")


class CallWithModel(nn.Module):
    """Calls a function with the model as its forward, so that wrappers see every use of it."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[Model], Any]) -> Any:
        return work(self.model)


class ModelWrapper:
    """A model with recomputed layers, distributed over processes by DDP or FSDP.

    Objectives may call any part of the model, so the call is wrapped and not the model itself.
    `find_unused` allows parameters that get no gradient, as in DDP. With FSDP `unread` allocates
    and reads weights that are still on the meta device.
    """

    def __init__(
        self,
        model: Model,
        processes: ProcessGroup,
        *,
        distributed: Distributed = "none",
        half: bool = False,
        recompute: Recompute = "none",
        find_unused: bool = False,
        unread: Callable[[torch.device], None] | None = None,
    ) -> None:
        self.model = model
        self.processes = processes
        self.module: nn.Module = CallWithModel(model)
        layers = model_layers(model)
        named = () if isinstance(recompute, str) else recompute
        for index in range(len(layers)) if recompute == "all" else named:
            # Set on the instance, so that weights keep their names and hooks stay outside.
            forward = partial(checkpoint, layers[index].forward, use_reentrant=False)
            setattr(layers[index], "forward", forward)  # noqa: B010, mypy allows no method
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        if distributed == "fsdp" and not processes.is_single:
            shard_module(self.module, layers, processes.device, half=half)
            if unread is not None:
                unread(processes.device)
        elif distributed == "ddp" and not processes.is_single:
            self._ddp = nn.parallel.DistributedDataParallel(
                self.module, find_unused_parameters=find_unused
            )

    def forward(self, work: Callable[[Model], Any]) -> Any:
        """Call `work` with gradients; it returns a tensor first, to call backward on."""
        return (self.module if self._ddp is None else self._ddp)(work)

    def evaluate(self, work: Callable[[Model], Answer]) -> Answer:
        """Call `work` without gradients."""
        with torch.no_grad():
            return cast(Answer, self.module(work))

    def gradient_sync(self, *, last: bool) -> AbstractContextManager[None]:
        """A context for each micro-batch: DDP reduces gradients only in the last one.

        FSDP reduces them every time, since keeping full gradients is what sharding avoids.
        """
        if self._ddp is None or last:
            return nullcontext()
        return cast("AbstractContextManager[None]", self._ddp.no_sync())

    def full_state_dict(self) -> dict[str, Tensor]:
        """All weights unsharded on the host, in the main process; empty in the others."""
        weights = {}
        for name, tensor in self.model.state_dict().items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.processes.is_main:
                weights[name] = whole.detach().cpu()
        return weights

    @property
    def gradient_scale(self) -> float:
        """DDP and FSDP average gradients over processes; this factor makes them a sum."""
        return float(self.processes.world_size)
