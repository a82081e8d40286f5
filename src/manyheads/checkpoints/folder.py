"""Load a model from a folder, save one to a folder."""

import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch
from safetensors.torch import save_file

from manyheads.checkpoints import bert, gpt2, llama, marian, modernbert, native, t5, vit
from manyheads.checkpoints.files import WEIGHTS, Weights, read_json, write_folder
from manyheads.checkpoints.names import fitting, from_theirs, to_theirs
from manyheads.errors import ConfigError, InputError, MissingExtraError
from manyheads.models.build import Model, build
from manyheads.models.init import Init
from manyheads.models.recipes import ModelConfig

__all__ = ["FAMILIES", "Saved", "load", "save"]

# What config.json calls a family, and the file that knows it. Each has four functions: `config_of`
# reads their config, `describe` writes it or says None, `entries` is the table of names, and
# `canonical` brings older names up to date or says None of what is no weight.
FAMILIES: dict[str, ModuleType] = {
    "gpt2": gpt2,
    "bert": bert,
    "roberta": bert,
    "modernbert": modernbert,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": llama,
    "vit": vit,
    "t5": t5,
    "marian": marian,
    "manyheads": native,
}
CONFIG = "config.json"
TOKENIZER = "tokenizer.json"


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a model went, and who can open it there."""

    folder: Path
    family: str

    def __str__(self) -> str:
        alone = "in our own layout, which manyheads alone opens"
        layout = (
            alone if self.family == "manyheads" else f"as {self.family}, as transformers reads it"
        )
        return f"saved to {self.folder} {layout}"


def load(where: str | Path, *, dtype: torch.dtype | None = None, device: str = "cpu") -> Model:
    """The model of a folder, its weights read straight to their device and type."""
    folder = Path(where)
    if not folder.is_dir():
        raise InputError(f"there is no folder {folder}", "name one that a model was saved to")
    described = read_json(folder / CONFIG)
    family = _family(described, folder)
    config = _config(family, described, folder)
    model = build(config, device="meta")
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    table = family.entries(config, shapes)
    with Weights(folder) as weights:
        found = weights.shapes()
        file_name = {family.canonical(name): name for name in found}
        known = {new: found[name] for new, name in file_name.items() if new is not None}
        known = {name: shape for name, shape in known.items() if not _unread(name, family, config)}
        fitting(table, shapes, known, str(folder / WEIGHTS))
        placed = {
            name: tensor.to(device=device, dtype=dtype)
            for name, tensor in from_theirs(table, lambda name: weights[file_name[name]])
        }
    model.load_state_dict(placed, assign=True)
    model.tokenizer = _tokenizer(folder)
    model.described = described
    return model.eval()


def save(model: Model, folder: str | Path) -> Saved:
    """Write a model to a folder, whole or not at all; `load` brings it back bit by bit.

    Where `transformers` has a counterpart the files are those it opens; the answer says so.

    >>> import tempfile
    >>> model = build("council", seed=0)
    >>> with tempfile.TemporaryDirectory() as place:
    ...     saved = save(model, place + "/council")
    ...     again = load(saved.folder)
    >>> again.config == model.config
    True
    """
    config = cast(ModelConfig, model.config)
    name, described = _counterpart(config, getattr(model, "described", None))
    state = model.state_dict()
    tensors = to_theirs(FAMILIES[name].entries(config, state), state)
    kind = str(next(iter(state.values())).dtype).removeprefix("torch.")
    text = json.dumps({**described, "dtype": kind}, indent=1)
    files = {
        WEIGHTS: partial(save_file, tensors, metadata={"format": "pt"}),
        CONFIG: partial(_write_text, text),
    }
    tokenizer = getattr(model, "tokenizer", None)
    if tokenizer is not None:
        files[TOKENIZER] = partial(_write_text, tokenizer.to_str())
    write_folder(Path(folder), files)
    return Saved(Path(folder), name)


def _counterpart(
    config: ModelConfig, loaded_from: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The first family whose own config can say all that ours says; the last one is our own.

    A model that is still what its folder described keeps that description, with label names, token
    ids and whatever else ours has no place for.
    """
    if loaded_from is not None:
        name = str(loaded_from["model_type"])
        if _same(FAMILIES[name].config_of(loaded_from), config):
            return name, loaded_from
    for family in dict.fromkeys(FAMILIES.values()):
        described = family.describe(config)
        if described is not None and _same(family.config_of(described), config):
            return str(described["model_type"]), described
    raise AssertionError("our own layout can say everything")


def _same(one: ModelConfig, other: ModelConfig) -> bool:
    # How weights were once drawn is no part of the model that they make.
    return type(one) is type(other) and replace(one, init=Init()) == replace(other, init=Init())


def _unread(name: str, family: ModuleType, config: ModelConfig) -> bool:
    """Some files repeat a tied table under the name of the head, or keep what no head reads."""
    if name in getattr(family, "UNREAD", {}).get(type(config.readout), ()):
        return True
    return name in getattr(family, "TIED_COPIES", ()) and _is_tied(config)


def _is_tied(config: ModelConfig) -> bool:
    return bool(getattr(config.readout, "tied", False))


def _family(described: Mapping[str, Any], folder: Path) -> ModuleType:
    name = described.get("model_type")
    if name not in FAMILIES:
        raise InputError(
            f"{folder / CONFIG} says model_type={name!r}, a family manyheads does not know",
            f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]


def _config(family: ModuleType, described: Mapping[str, Any], folder: Path) -> Any:
    try:
        return family.config_of(described)
    except ConfigError as error:
        raise InputError(f"{folder / CONFIG}: {error.problem}", error.remedy) from None
    except KeyError as error:
        raise InputError(f"{folder / CONFIG} lacks {error}", "use a whole config.json") from None


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
