"""Our own layout: any model the library can build, saved under the names its modules have."""

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from manyheads.checkpoints.configs import from_json, is_model, to_json
from manyheads.checkpoints.files import WEIGHTS, Weights, read_json, write_folder
from manyheads.errors import ConfigError, InputError, MissingExtraError
from manyheads.models.build import Model, build

__all__ = ["Saved", "load", "save"]

FAMILY = "manyheads"
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a model went, and who can open it there."""

    folder: Path
    layout: str

    def __str__(self) -> str:
        return f"saved to {self.folder} in the {self.layout} layout, which manyheads alone opens"


def save(model: Model, folder: str | Path) -> Saved:
    """Write a model to a folder, whole or not at all; `load` brings it back bit by bit.

    >>> import tempfile
    >>> model = build("council", seed=0)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     saved = save(model, place + "/council")
    ...     again = load(saved.folder)
    >>> again.config == model.config
    True
    """
    folder = Path(folder)
    tensors = {name: tensor.contiguous() for name, tensor in model.state_dict().items()}
    config = json.dumps({"model_type": FAMILY, "config": to_json(model.config)}, indent=1)
    files = {
        WEIGHTS: partial(save_file, tensors, metadata={"format": "pt"}),
        CONFIG: partial(_write_text, config),
    }
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        files[TOKENIZER] = partial(_write_text, tokenizer.to_str())
    write_folder(folder, files)
    return Saved(folder, FAMILY)


def load(where: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Model:
    """The model saved in a folder, its weights read straight to their device and type."""
    folder = Path(where)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", "name one that a model was saved to")
    model = build(_config(folder), device="meta")
    with Weights(folder) as weights:
        _check(weights.shapes(), model.state_dict(), folder)
        placed = {name: weights[name].to(device=device, dtype=dtype) for name in model.state_dict()}
    model.load_state_dict(placed, assign=True)
    model.tokenizer = _tokenizer(folder)
    return model.eval()


def _config(folder: Path) -> Any:
    found = read_json(folder / CONFIG)
    if found.get("model_type") != FAMILY:
        raise InputError(
            f"{folder / CONFIG} says model_type={found.get('model_type')!r}",
            f"this version knows {FAMILY!r}, its own layout",
        )
    try:
        config = from_json(found.get("config"))
    except ConfigError as error:
        raise InputError(f"{folder / CONFIG}: {error.problem}", error.remedy) from None
    if not is_model(config):
        raise InputError(
            f"{folder / CONFIG} describes no whole model", "save one with manyheads.save"
        )
    return config


def _check(found: dict[str, tuple[int, ...]], expected: dict[str, Tensor], folder: Path) -> None:
    """Every tensor that is missing, in excess or of another shape is named, not only the first."""
    shapes = {name: tuple(tensor.shape) for name, tensor in expected.items()}
    faults = [f"{name} is missing" for name in shapes.keys() - found.keys()]
    faults += [f"{name} belongs to no part of the model" for name in found.keys() - shapes.keys()]
    faults += [
        f"{name} is {found[name]} and the config asks for {shapes[name]}"
        for name in shapes.keys() & found.keys()
        if found[name] != shapes[name]
    ]
    if faults:
        raise InputError(
            f"{folder / WEIGHTS} does not fit {CONFIG}: {'; '.join(sorted(faults))}",
            "use the config and the weights of one model",
        )


def _tokenizer(folder: Path) -> Any:
    if not (folder / TOKENIZER).exists():
        return None
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtraError(
            f"{folder / TOKENIZER} needs the package tokenizers", "pip install tokenizers"
        ) from None
    return Tokenizer.from_file(str(folder / TOKENIZER))


def _write_text(text: str, file: Path) -> None:
    file.write_text(text, "utf-8")
