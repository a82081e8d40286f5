"""Models larger than one device: each process reads its own shards of the weights (FSDP2)."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn

from manyheads.argument_checks import checked
from manyheads.checkpoints import config_json, tensor_map
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.files import WEIGHTS, read_json
from manyheads.checkpoints.folder import INTEGER_WEIGHTS, StoredTensors, read_folder
from manyheads.checkpoints.hub import folder_of
from manyheads.checkpoints.sentence_transformers import modules_of
from manyheads.devices import resolve_device
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.models.non_finite_weights import is_finite, warn_not_finite
from manyheads.ragged import Ragged


@checked
def load_sharded(
    where: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """Load a model whose weights are divided among the processes of `torch.distributed`.

    Every process makes this call and then the same calls of the model, perhaps with other texts. It
    reads from disk only the rows that it keeps, and gathers the weights of one layer at a time
    while that layer computes. Weights outside of layers, such as the token embedding, are whole in
    every process. `where`, `revision` and `dtype` are as for `load`, and `device` is that of this
    process, such as "cuda:1"; a GGUF file or integer weights cannot be sharded.
    """
    if not dist.is_initialized():
        raise InputError(
            "load_sharded needs the processes of torch.distributed, and there are none",
            "start this program with torchrun and call torch.distributed.init_process_group first",
        )
    folder = ShardedFolder(where, revision=revision, dtype=dtype)
    home = resolve_device(str(device))
    shard_module(folder.model, model_layers(folder.model), home, layers_only=True)
    folder.read(home)
    _prepare_to_gather(folder.model)
    return folder.model.eval()


def _prepare_to_gather(model: Any) -> None:
    """Let callers use the parts of a model directly, and in inference mode."""
    # Otherwise a layer that ran before the whole model would take itself for the root.
    model._get_fsdp_state()._lazy_init()
    for layer in model_layers(model):
        # Tensors that FSDP first makes in inference mode cannot be used outside of it.
        cast(Any, layer).unshard()
        cast(Any, layer).reshard()


class ShardedFolder:
    """A model of a folder on the meta device, whose weights are read once it is sharded."""

    model: Model

    def __init__(
        self, where: str | Path, *, revision: str | None = None, dtype: torch.dtype | None = None
    ) -> None:
        root = folder_of(where, revision)
        if root.is_file():
            raise InputError(
                f"{where} is a GGUF file, which is not read in parts",
                f"write it as a folder first: manyheads convert {where} FOLDER",
            )
        self._file = modules_of(root).transformer / WEIGHTS
        description = read_json(self._file.parent / config_json.CONFIG)
        name = description.get("model_type")
        if name not in FAMILIES or INTEGER_WEIGHTS in description:
            what = "integer weights" if name in FAMILIES else f"a {name!r:.100}"
            raise InputError(
                f"{where} has {what}, which processes cannot share",
                f"use a model of {', '.join(FAMILIES)} in 16 or 32 bits",
            )
        self._entries: list[tensor_map.MapEntry] = []
        self.model = read_folder(root, dtype, torch.device("meta"), self._take)
        self.model.source = str(where)

    def _take(
        self, model: Model, entries: tensor_map.TensorMap, stored: StoredTensors
    ) -> tensor_map.TensorMap:
        """Read nothing at once."""
        del model
        self._stored, self._entries = stored, list(entries)
        return []

    @torch.no_grad()
    def read(self, device: torch.device) -> None:
        """Allocate the shards of this process on its device, and read them."""
        self.model.to_empty(device=device)
        state: dict[str, Tensor] = self.model.state_dict()
        not_finite: list[str] = []
        for entry in self._entries:
            if type(entry) is tensor_map.Entry and state[entry.name].dim() <= 2:
                rows = own_rows(state[entry.name])
                parts = {entry.name: entry.read_rows(self._stored.rows, rows, state[entry.name])}
            else:
                # Few tensors are stored in another order; they are read one at a time.
                whole = entry.read(self._stored.__getitem__)
                parts = {name: tensor[_slice(state[name])] for name, tensor in whole.items()}
            for name, part in parts.items():
                local(state[name]).copy_(part)
                if not is_finite(part):
                    not_finite.append(name)
        warn_not_finite(not_finite, str(self._file))


def own_rows(parameter: Any) -> range:
    """The rows of a parameter that this process has: all of one that is not sharded."""
    if not hasattr(parameter, "device_mesh"):
        return range(len(parameter) if parameter.dim() else 1)
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    shape, offset = compute_local_shape_and_global_offset(
        parameter.shape, parameter.device_mesh, parameter.placements
    )
    return range(offset[0], offset[0] + shape[0])


def _slice(parameter: Tensor) -> Any:
    rows = own_rows(parameter)
    return slice(rows.start, rows.stop) if parameter.dim() else ...


def local(parameter: Tensor) -> Tensor:
    """The part of a parameter that is in this process."""
    part: Tensor = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    return part


def model_layers(model: nn.Module) -> list[Layer]:
    return [module for module in model.modules() if isinstance(module, Layer)]


def shard_module(
    module: nn.Module,
    layers: Sequence[nn.Module],
    device: torch.device,
    *,
    half: bool = False,
    layers_only: bool = False,
) -> None:
    """FSDP2 on each layer, then on the rest unless `layers_only`, over all processes.

    With `half` layers are gathered in bfloat16 on CUDA. Embedding, final norm and readout keep
    their dtype, so that the residual stream is the same as under autocast.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.export import register_dataclass
    from torch.utils._pytree import SUPPORTED_NODES

    if Ragged not in SUPPORTED_NODES:
        # FSDP's hooks look for tensors in the inputs and outputs of a layer.
        register_dataclass(Ragged)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    # Only CUDA's autocast computes norms in float32.
    kind = torch.bfloat16 if half and device.type == "cuda" else None
    policy = MixedPrecisionPolicy(
        param_dtype=kind, reduce_dtype=torch.float32, cast_forward_inputs=False
    )
    for layer in layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    sharded = {weight for layer in layers for weight in layer.parameters()}
    whole = {weight for weight in module.parameters() if weight not in sharded}
    fully_shard(
        module,
        mesh=mesh,
        mp_policy=MixedPrecisionPolicy(cast_forward_inputs=False),
        ignored_params=whole if layers_only else None,
    )
