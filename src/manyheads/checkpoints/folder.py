"""Load a model from a folder, save one to a folder."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any, cast

import torch

from manyheads.checkpoints import (
    bert,
    gpt2,
    llama,
    marian,
    modernbert,
    native,
    qwen_gated,
    qwen_next,
    t5,
    vit,
)
from manyheads.checkpoints.companions import (
    KNOWN,
    companions,
    read_companions,
    read_generation,
    read_tokenizer,
)
from manyheads.checkpoints.files import WEIGHTS, Weights, read_json, write_folder
from manyheads.checkpoints.hub import HOUSE_FOLDER, folder_of
from manyheads.checkpoints.names import fitting, from_theirs, to_theirs
from manyheads.checkpoints.sentences import MODULES, modules_of, sentence_files, sentence_of
from manyheads.checkpoints.stored import Stored, corrected, says, unread_as_stored
from manyheads.checkpoints.tokenizer_settings import padding_id, settings_file
from manyheads.devices import device_of
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model, build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.readout import ClassHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.whole import write_tensors

__all__ = ["FAMILIES", "Saved", "description_of", "family_of", "load", "refuse_changed", "save"]

# What config.json calls a family, and the file that knows it. Each has four functions: `config_of`
# reads their config, `describe` writes it or says None, `entries` is the table of names, and
# `canonical` brings older names up to date or says None of what is no weight. Some have more to say
# of their files, which `stored` reads: `unread`, TIED_COPIES, FILE_TIES.
FAMILIES: dict[str, ModuleType] = {
    "gpt2": gpt2,
    "bert": bert,
    "roberta": bert,
    "modernbert": modernbert,
    "llama": llama,
    "mistral": llama,
    "qwen2": llama,
    "qwen3": qwen_gated,
    "qwen3_next": qwen_next,
    "vit": vit,
    "t5": t5,
    "marian": marian,
    "manyheads": native,
}
CONFIG = "config.json"
# What these say is true of one model alone, and would be a lie beside another's weights.
OF_ONE = (*KNOWN, MODULES)
DTYPES = "torch.float32, torch.bfloat16 or torch.float16"


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a model went, and who can open it there."""

    folder: Path
    family: str
    opened_by: str = "transformers"

    def __str__(self) -> str:
        if self.family == "manyheads":
            return f"saved to {self.folder} in our own layout, which manyheads alone opens"
        return f"saved to {self.folder} as {self.family}, as {self.opened_by} reads it"


def load(
    where: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
) -> Model:
    """The model of a folder or of a name, read straight to its device and type.

    A folder goes first, then the house models "house-gpt", "house-gpt-gated" and "house-bert",
    which need no network, then a name on the hub: "org/name", of which `revision` or
    "org/name@revision" is one. Without a `dtype` it is as stored, but the house models, stored in
    half the room, come in float32.
    """
    place, home = folder_of(where, revision), device_of(str(device))
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise InputError(f"dtype={dtype!r} is none that a model computes in", f"use {DTYPES}")
    if dtype is None and place.parent == HOUSE_FOLDER:
        dtype = torch.float32
    modules = modules_of(place)
    folder = modules.transformer
    _check_holds_model(folder)
    described = read_json(folder / CONFIG)
    family = _family(described, folder)
    asked = _read(lambda: family.config_of(described), folder)
    beside = read_companions(folder) | modules.files(place)
    sentence = sentence_of(modules, beside, described, asked)
    with Weights(folder) as weights:
        stored = Stored(family, weights)
        config = stored.config(asked)
        model = _read(lambda: build(config, device="meta"), folder)
        shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
        table = family.entries(config, shapes)
        fitting(table, shapes, stored.read_by(config), str(folder / WEIGHTS), stored.in_file)
        placed = {
            name: tensor.to(device=home, dtype=dtype)
            for name, tensor in from_theirs(table, stored.__getitem__)
        }
        model.unread = stored.unread(config)
    model.load_state_dict(placed, assign=True)
    model.described = corrected(family, described, config)
    model.tokenizer, model.generation = read_tokenizer(beside, folder), read_generation(beside)
    model.sentence, model.side_files = sentence, beside
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
    name, described = _counterpart(config, model.described)
    family, state = FAMILIES[name], model.state_dict()
    refuse_changed(model, state)
    kind = next(iter(state.values())).dtype
    tensors = to_theirs(family.entries(config, state), state)
    tensors |= unread_as_stored(family, config, model.unread, kind)
    beside = companions(model, Path(folder))
    beside |= settings_file(model, beside)
    described = described | _padding(model, described, beside)
    text = json.dumps({**described, "dtype": str(kind).removeprefix("torch.")}, indent=1)
    beside |= {CONFIG: text.encode()}
    beside |= sentence_files(model.sentence, _width(config), model.side_files)
    files: dict[str, Callable[[Path], object]] = {WEIGHTS: partial(write_tensors, tensors)}
    files |= {name: partial(_write, data) for name, data in beside.items()}
    write_folder(Path(folder), files, without=_outdated(Path(folder), files))
    return Saved(Path(folder), name, _opened_by(family, described))


def _padding(
    model: Model, described: Mapping[str, Any], beside: Mapping[str, bytes]
) -> dict[str, int]:
    """`transformers` reads a text's class off the last token that is no padding.

    A decoder that does not say which token that is takes one text at a time there.
    """
    config = model.config
    if not isinstance(config, DecoderConfig) or not isinstance(config.readout, ClassHead):
        return {}
    if described.get("pad_token_id") is not None:
        return {}
    found = padding_id(model, beside)
    known = range(config.embedding.vocabulary)
    return {"pad_token_id": found} if found is not None and found in known else {}


def _outdated(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """What an older model left; beside none, a tokenizer was put there for the new one."""
    if not any((folder / name).is_file() for name in (CONFIG, MODULES)):
        return []
    return [name for name in OF_ONE if name not in files]


def family_of(model: Model) -> ModuleType:
    """The family whose files and names a model is saved with."""
    return FAMILIES[_counterpart(cast(ModelConfig, model.config), model.described)[0]]


def description_of(model: Model) -> dict[str, Any]:
    """What the config.json of a model says when it is saved."""
    return _counterpart(cast(ModelConfig, model.config), model.described)[1]


def refuse_changed(model: Model, state: Mapping[str, Any]) -> None:
    """What the config does not say would be lost without a word, and what is not there too."""
    told = build(cast(ModelConfig, model.config), device="meta").state_dict()
    if any(".adapters." in name or name.startswith("wholes.") for name in state):
        raise ConfigError(
            "the model has adapters, which no checkpoint of a model holds",
            "save them with surgery.save_adapter, or put them into the weights with "
            "surgery.merge and surgery.delete_adapter",
        )
    missing = [name for name in told if name not in state]
    if missing:
        raise ConfigError(
            f"the model has no {missing[0]}, as its config says",
            "bring it back to plain weights, with surgery.dequantise if it has four bits",
        )
    more = [name for name in state if name not in told]
    if more:
        raise ConfigError(
            f"the model has {more[0]}, of which its config says nothing",
            "take it off; gates of L0Gates go into the weights with train.folding.folded",
        )


def _counterpart(
    config: ModelConfig, loaded_from: dict[str, Any] | None
) -> tuple[str, dict[str, Any]]:
    """The first family whose own config can say all that ours says; the last one is our own.

    A model that is still what its folder described keeps that description, with label names, token
    ids and whatever else ours has no place for.
    """
    if loaded_from is not None:
        name = str(loaded_from["model_type"])
        if says(FAMILIES[name], loaded_from, config):
            return name, loaded_from
    for family in dict.fromkeys(FAMILIES.values()):
        described = family.describe(config)
        if described is not None and says(family, described, config):
            facts = native.facts_of(loaded_from)
            return str(described["model_type"]), _with_facts(family, described, facts, config)
    raise AssertionError("our own layout can say everything")


def _with_facts(
    family: ModuleType, described: dict[str, Any], facts: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
    """A new description with what was true of the model before, unless it tells of another one."""
    ids = {name: value for name, value in facts.items() if name.endswith("_token_id")}
    for known in (facts, ids):
        if says(family, {**described, **known}, config):
            return {**described, **known}
    return described


def _opened_by(family: ModuleType, described: Mapping[str, Any]) -> str:
    """`transformers`, unless the family knows better."""
    name: str = getattr(family, "opened_by", lambda _: "transformers")(described)
    return name


def _check_holds_model(folder: Path) -> None:
    """Point on from folders that are near one of a model."""
    if (folder / CONFIG).is_file():
        return
    if (folder / "model" / CONFIG).is_file():
        raise InputError(f"{folder} is the folder of a run", f"name its model, {folder / 'model'}")
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds a low-rank adapter and no model",
            "load the model it was made for and give both to surgery.load_adapter, or adapt "
            "with merged = true, which saves the whole model too",
        )


def _family(described: Mapping[str, Any], folder: Path) -> ModuleType:
    name = described.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"{folder / CONFIG} says model_type={name!r}, a family manyheads does not know",
            f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]


def _read(make: Callable[[], Any], folder: Path) -> Any:
    """What a config.json makes, or what in it cannot be."""
    try:
        return make()
    except ConfigError as error:
        raise InputError(f"{folder / CONFIG}: {error.problem}", error.remedy) from None
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{folder / CONFIG} lacks {error}", "use a whole config.json") from None
    except (TypeError, ValueError, AttributeError, IndexError, RuntimeError) as error:
        first = str(error).partition("\n")[0]
        raise InputError(
            f"{folder / CONFIG} says something of the wrong type, so that no model can be made "
            f"of it ({first})",
            "give whole numbers for sizes, numbers and lists where they belong",
        ) from error


def _width(config: ModelConfig) -> int:
    return config.encoder.width if isinstance(config, Seq2SeqConfig) else config.stack.width


def _write(data: bytes, file: Path) -> None:
    file.write_bytes(data)
