"""Sharded over two processes, an optimizer takes the steps that it takes alone."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes

from manyheads.models.build import build
from manyheads.train.optim.optimizers import AdamW, Muon, OptimizerConfig, StableAdamW
from manyheads.train.optim.param_groups import RateFactor
from tests.models.zoo import DECODERS

ROWS = (RateFactor(pattern="*.query.*", factor=0.5), RateFactor(pattern="*.value.*", factor=2.0))
OPTIMIZERS: list[OptimizerConfig] = [
    AdamW(rates=ROWS),
    StableAdamW(rates=ROWS),
    Muon(precision="single", rates=ROWS),
]


def gradients(model: Any, step: int) -> list[torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(each.shape, generator=draw) * 3**step for each in model.parameters()]


def work(rank: int, store: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.set_num_threads(1)
    mesh = init_device_mesh("cpu", (2,))
    for config in OPTIMIZERS:
        alone, sharded = (build(DECODERS["gates"], seed=0) for _ in range(2))
        fully_shard(sharded, mesh=mesh)
        optimizers = [replace(config).build(model) for model in (alone, sharded)]
        for step in range(3):
            for model in (alone, sharded):
                every = zip(model.parameters(), gradients(alone, step), strict=True)
                for parameter, gradient in every:
                    split = model is sharded
                    parameter.grad = (
                        distribute_tensor(gradient, mesh, parameter.placements)
                        if split
                        else gradient
                    )
            for optimizer in optimizers:
                optimizer.step()
        for one, other in zip(alone.parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(other.full_tensor(), one, rtol=1e-5, atol=1e-6)
    dist.destroy_process_group()


def test_shards_take_the_steps_of_the_whole(tmp_path: Path) -> None:
    store = str(tmp_path / "store")
    processes.start_processes(work, args=(store,), nprocs=2, start_method="fork")
