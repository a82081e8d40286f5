"""A model whose layers stay on disk and are read one after another."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from manyheads.checkpoints import config_json, sentence_transformers, tensor_map
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.files import WEIGHTS, read_json
from manyheads.checkpoints.folder import StoredTensors, read_folder
from manyheads.checkpoints.hub import folder_of
from manyheads.devices import resolve_device
from manyheads.errors import InputError
from manyheads.models.build import Model
from manyheads.models.layer import Layer
from manyheads.models.non_finite_weights import is_finite, warn_not_finite
from manyheads.models.stack import Stack

# Layers that share positions read the table of the first of them.
SHARED_TABLE = ".attention.table."


class LayerStream:
    """A model of a folder, in memory without its layers and its readout.

    `layers` reads the layers of a stack one after another. What is not in memory is on the meta
    device.
    """

    model: Model

    def __init__(
        self,
        where: str | Path,
        *,
        revision: str | None = None,
        dtype: torch.dtype | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        root = folder_of(where, revision)
        if root.is_file():
            raise InputError(
                f"{where} is a GGUF file, whose layers cannot be read one by one",
                f"write it as a folder first: manyheads convert {where} FOLDER",
            )
        self._file = sentence_transformers.modules_of(root).transformer / WEIGHTS
        name = read_json(self._file.parent / config_json.CONFIG).get("model_type")
        if name not in FAMILIES:
            raise InputError(
                f"{where} is a {name!r:.100}, which manyheads does not open itself",
                f"use a model of {', '.join(FAMILIES)}",
            )
        self._home = resolve_device(str(device))
        self._entries: dict[str, list[tensor_map.MapEntry]] = {}
        self.model = read_folder(root, dtype, self._home, self._take)
        self.model.source = str(where)

    def _take(
        self, model: Model, entries: tensor_map.TensorMap, stored: StoredTensors
    ) -> tensor_map.TensorMap:
        """Take the entries of layers, and return those to read at once."""
        self._stored = stored
        stacks = {id(stack) for stack in model.stacks().values()}
        prefixes = {
            f"{name}.layers.{index}."
            for name, module in model.named_modules()
            if id(module) in stacks and isinstance(module, Stack)
            for index in module.config.owners
        }
        at_once = []
        for entry in entries:
            prefix = next((prefix for prefix in prefixes if entry.name.startswith(prefix)), None)
            if prefix is not None and SHARED_TABLE not in entry.name:
                self._entries.setdefault(prefix, []).append(entry)
            elif not entry.name.startswith("readout."):
                at_once.append(entry)
        return at_once

    def layers(self, stack: Stack) -> Iterator[int]:
        """The numbers of the layers, with the weights of one at a time in its modules.

        A thread reads the next layer meanwhile, so there are at most two.
        """
        name = next(name for name, module in self.model.named_modules() if module is stack)
        prefixes = [f"{name}.layers.{owner}." for owner in stack.config.owners]
        with ThreadPoolExecutor(max_workers=1) as reader:
            coming = reader.submit(self._read, prefixes[0])
            for index in range(len(prefixes)):
                weights, not_finite = coming.result()
                warn_not_finite(not_finite, str(self._file))
                layer: Layer = stack.layers[index]  # type: ignore[assignment]
                layer.load_state_dict(weights, strict=False, assign=True)
                try:
                    if index + 1 < len(prefixes):
                        coming = reader.submit(self._read, prefixes[index + 1])
                    yield index
                finally:
                    absent = {name: tensor.to("meta") for name, tensor in weights.items()}
                    layer.load_state_dict(absent, strict=False, assign=True)
                    # Dropped by the thread that allocated it: dropped by this one, the memory of
                    # every layer stayed with the process (torch 2.13 on ARM, 780 MB per layer).
                    reader.submit(weights.clear)

    def _read(self, prefix: str) -> tuple[dict[str, Tensor], list[str]]:
        """The weights of a layer by their names in it, and those with NaN or infinity."""
        weights: dict[str, Tensor] = {}
        not_finite: list[str] = []
        for entry in self._entries.get(prefix, []):
            tensors = entry.read(self._stored.__getitem__)
            if not all(map(is_finite, tensors.values())):
                not_finite += self._stored.not_finite(entry)
            weights |= {
                name.removeprefix(prefix): tensor.to(self._home) for name, tensor in tensors.items()
            }
        return weights, not_finite
