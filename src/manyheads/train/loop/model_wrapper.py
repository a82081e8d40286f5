"""The one door by which training enters a model, whatever it is wrapped in."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.ragged import Ragged
from manyheads.train.distributed import Crew, Distributed

Recompute = Literal["none", "all"] | tuple[int, ...]
Answer = TypeVar("Answer")


class Door(nn.Module):
    """Does something with the model, as a forward: wrappers see every use and all weights."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = model

    def forward(self, work: Callable[[Model], Any]) -> Any:
        return work(self.model)


class Entrance:
    """A model and what it is wrapped in: recomputed layers, shared among processes.

    Objectives may call any part of the model, so not the model is wrapped but the call. `partly`
    says that some weights may have no part in it.
    """

    def __init__(
        self,
        model: Model,
        crew: Crew,
        *,
        distributed: Distributed = "none",
        half: bool = False,
        recompute: Recompute = "none",
        partly: bool = False,
    ) -> None:
        self.model = model
        self.crew = crew
        self.door: nn.Module = Door(model)
        _recompute(layers_of(model), recompute)
        self._sharded = distributed == "fsdp" and not crew.alone
        self._ddp: nn.parallel.DistributedDataParallel | None = None
        if self._sharded:
            _shard(self.door, layers_of(model), crew, half)
        elif distributed == "ddp" and not crew.alone:
            self._ddp = nn.parallel.DistributedDataParallel(
                self.door, find_unused_parameters=partly
            )

    def train(self, work: Callable[[Model], Any]) -> Any:
        """Do something whose tensors are trained on; of what comes back a tensor must be first."""
        return (self.door if self._ddp is None else self._ddp)(work)

    def look(self, work: Callable[[Model], Answer]) -> Answer:
        """Do something without gradients."""
        with torch.no_grad():
            return cast(Answer, self.door(work))

    def holding(self, *, last: bool) -> AbstractContextManager[None]:
        """Around every micro-batch: only the last one sends gradients, where they can wait.

        Sharded, they are sent each time: to keep them whole is what sharding avoids.
        """
        if self._ddp is None or last:
            return nullcontext()
        return cast("AbstractContextManager[None]", self._ddp.no_sync())

    def gathered(self) -> dict[str, Tensor]:
        """Every weight whole and on the host, for the first process."""
        state = self.model.state_dict()
        found = {}
        for name, tensor in state.items():
            whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
            if self.crew.leads:
                found[name] = whole.detach().cpu()
        return found

    @property
    def gradient_share(self) -> float:
        """Wrapped, a gradient is the mean over processes; this makes it the sum."""
        return float(self.crew.world)


def layers_of(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def _recompute(layers: Sequence[Layer], recompute: Recompute) -> None:
    """Forget what is inside these layers and compute it again on the way back."""
    chosen = range(len(layers)) if recompute == "all" else () if recompute == "none" else recompute
    for index in chosen:
        # The instance's own forward, so that weights keep their names and hooks stay outside.
        forward = partial(checkpoint, layers[index].forward, use_reentrant=False)
        setattr(layers[index], "forward", forward)  # noqa: B010, mypy allows no method to be set


def _shard(door: nn.Module, layers: Sequence[Layer], crew: Crew, half: bool) -> None:
    """FSDP2: layer by layer, then what is left. Half precision gathers half the bytes.

    Embedding, last norm and readout stay whole numbers, so that the residual stream is what it is
    under autocast.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.export import register_dataclass
    from torch.utils._pytree import SUPPORTED_NODES

    if Ragged not in SUPPORTED_NODES:
        # Its hooks look for tensors in what a layer takes and gives, and must see inside.
        register_dataclass(Ragged)
    mesh = init_device_mesh(crew.device.type, (crew.world,))
    # Only CUDA's autocast brings norms back to float32.
    kind = torch.bfloat16 if half and crew.device.type == "cuda" else None
    policy = MixedPrecisionPolicy(
        param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(door, mesh=mesh, mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False))
