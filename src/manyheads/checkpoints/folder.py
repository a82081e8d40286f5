"""Load a model from a folder, or save one to a folder."""

import json
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from operator import methodcaller
from pathlib import Path
from typing import Any, Literal, cast, get_args

import torch
from torch import Tensor

from manyheads.atomic_write import recover_folder, write_tensors
from manyheads.bridge import ctranslate2_file, loading
from manyheads.bridge.automatic import native_model_error
from manyheads.checkpoints import config_json, late_interaction, sentence_transformers, tensor_map
from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.files import WEIGHTS, WeightFiles, read_json, write_folder
from manyheads.checkpoints.gguf_config import MODEL_TYPES, architecture_of, translate
from manyheads.checkpoints.gguf_file import GGUFFile, GGUFWeights, keep_quantized
from manyheads.checkpoints.gguf_tokenizer import side_files_from
from manyheads.checkpoints.hub import BUNDLED_FOLDER, folder_of
from manyheads.checkpoints.per_layer_config import KEY as PER_LAYER
from manyheads.checkpoints.per_layer_config import read_description
from manyheads.checkpoints.side_files import (
    SIDE_FILES,
    padding_id,
    read_generation,
    read_side_files,
    read_tokenizer,
    read_trained_length,
    side_files_of,
)
from manyheads.devices import resolve_device
from manyheads.errors import ConfigError, InputError, MixedDtypeWarning, WrappedModelWarning
from manyheads.models.build import Model, build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.non_finite_weights import check_finite, is_finite, warn_not_finite
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout
from manyheads.models.recipes import ModelConfig
from manyheads.progress import Progress
from manyheads.quantization.integer_codes import LARGEST, IntegerCodes, Layout, WeightName
from manyheads.quantization.model_weights import (
    format_of,
    layouts_of,
    make_integer_layers,
    quantize_weights,
    weights_of,
)

# The key of config.json that names the format of integer weights, and their tensors.
INTEGER_WEIGHTS = "integer_weights"
STORED_NAMES = (".codes", ".scales", ".offsets")
TOKEN_TABLE = "embedding.tokens.weight"
DTYPES = "torch.float32, torch.bfloat16 or torch.float16"
DTYPE_NAMES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}
# What a value of the wrong type or size raises where it is used.
MALFORMED = (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RuntimeError)
# How often a folder is read again that others keep replacing.
RETRIES = 8
# Receives the entries of a model, and returns those to read at once.
TakeLater = Callable[[Model, tensor_map.TensorMap, "StoredTensors"], tensor_map.TensorMap]


@dataclass(frozen=True, slots=True)
class Saved:
    """Where a model was saved, and which library can open it."""

    folder: Path
    family: str
    opened_by: str = "transformers"
    uneven: bool = False
    """Whether layers differ in their sizes, as `per_layer_config` in config.json says."""

    def __str__(self) -> str:
        if self.uneven:
            return (
                f"saved to {self.folder} as {self.family} with {PER_LAYER}, which manyheads can "
                f"open; transformers has this key, but its {self.family} does not follow it so far"
            )
        if self.family == "manyheads":
            return f"saved to {self.folder} in our own layout, which only manyheads can open"
        return f"saved to {self.folder} as {self.family}, which {self.opened_by} can open"


def load(
    where: str | Path,
    *,
    revision: str | None = None,
    dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    weights: WeightName | Literal["stored"] | None = None,
) -> Model:
    """Load a model from a folder, from a GGUF file or by name.

    `where` is a folder, a .gguf file, one of the bundled models "house-gpt", "house-gpt-gated" and
    "house-bert", "smollm2" or another name of `manyheads get`, or a name on the hub: "org/name",
    with a revision as `revision` or "org/name@revision". All weights have one dtype: the requested
    one, or else, as in `transformers`, the one that config.json names, or else that of the first
    stored tensor. Quantized files and the bundled models, which are stored in half precision, are
    loaded in float32. With `weights` linear layers and the vocabulary are rounded to eight bits,
    or linear layers to four, for the CPU; with "stored" the matrices of a quantized GGUF file stay
    integers. A folder that is replaced meanwhile is read again.
    """
    home = resolve_device(str(device))
    if dtype is not None and not getattr(dtype, "is_floating_point", False):
        raise InputError(f"dtype must be {DTYPES}, got {dtype!r}")
    if weights is not None:
        dtype = _integer_dtype(weights, dtype, home)
    root = folder_of(where, revision)
    if weights == "stored" and not root.is_file():
        problem = f"{where} is not a GGUF file, whose quantized weights could stay as stored"
        raise InputError(problem, f"use one of {', '.join(LARGEST)}, or leave `weights` out")
    take = _take_quantized if weights == "stored" else None
    for last in (*[False] * RETRIES, True):
        before = _identity(root)
        try:
            model = read_folder(root, dtype, home, take)
        except (InputError, OSError):
            if last or before == _identity(root):
                raise
            recover_folder(root)
        else:
            if last or before == _identity(root):
                break
    if weights is not None and weights != "stored":
        stored = weights_of(model)
        if stored not in (None, weights):
            problem = f"{where} has {stored} weights, and weights={weights!r}"
            raise InputError(
                problem, "leave `weights` out, or load the model before it was rounded"
            )
        if stored is None:
            quantize_weights(model, weights)
    model.source = str(where)
    return model


def _integer_dtype(weights: str, dtype: torch.dtype | None, home: torch.device) -> torch.dtype:
    """The dtype that models with integer weights compute in, on the CPU."""
    if home.type != "cpu":
        problem = f"{weights} weights are computed on the CPU, not on {home}"
        raise InputError(problem, 'use device="cpu", or load the model without integer weights')
    if dtype not in (None, torch.float32):
        problem = f"{weights} weights are computed in float32, not in {dtype}"
        raise InputError(problem, "leave dtype out")
    return torch.float32


def _identity(folder: Path) -> tuple[int, ...]:
    """What changes when another folder takes the name."""
    try:
        status = folder.stat()
    except OSError:
        return ()
    return status.st_dev, status.st_ino, status.st_mtime_ns


def read_folder(
    root: Path, dtype: torch.dtype | None, home: torch.device, take: TakeLater | None = None
) -> Model:
    """The model of a folder or a GGUF file; `take` decides which weights are read later."""
    if root.is_file():
        return _load_gguf(root, dtype, home, take)
    if dtype is None and root.parent == BUNDLED_FOLDER:
        dtype = torch.float32
    modules = sentence_transformers.modules_of(root)
    folder = modules.transformer
    _check_holds_model(folder)
    if ctranslate2_file.is_ctranslate2(folder):
        whisper = ctranslate2_file.load_whisper(folder, dtype, home)
        return _with_side_files(whisper, read_side_files(folder), folder, "Whisper")
    description = read_json(folder / config_json.CONFIG)
    stanford, name = late_interaction.is_stanford(description), description.get("model_type")
    # The bridge opens a family that is not ours, or says why it cannot.
    if isinstance(name, str) and name not in FAMILIES and find_spec("transformers") is not None:
        if modules.late or stanford:
            raise InputError(
                f"{folder} is late interaction on {name!r:.100}, which manyheads does not open "
                "itself",
                f"use a model of {', '.join(FAMILIES)}",
            )
        wrapped = loading.load_wrapped(folder, description, dtype, home)
        return _with_side_files(wrapped, read_side_files(folder), folder, name)
    family = _family(description, folder)
    with WeightFiles(folder) as weights:
        _reading(lambda: config_json.check_sizes(description, weights.shapes()), folder)
        if INTEGER_WEIGHTS in description:
            _integer_weights(description, folder)
            dtype = _integer_dtype("integer", dtype, home)
            weights.as_stored = STORED_NAMES
        weights.dtype = dtype or _reading(lambda: _stored_dtype(description, weights), folder)
        side_files = read_side_files(folder) | modules.files(root)
        if stanford:
            # The class is Stanford's own: the bare model, and a projection beside it.
            del description["architectures"]
            side_files |= late_interaction.artifact_of(modules)
        return _assemble(modules, side_files, (description, family, weights), home, take)


def _load_gguf(
    root: Path, dtype: torch.dtype | None, home: torch.device, take: TakeLater | None
) -> Model:
    """Open a GGUF file as the folder that its family would have."""
    file = GGUFFile(root)
    try:
        name = architecture_of(file)
        foreign = MODEL_TYPES.get(name) not in FAMILIES
        if foreign and take is None and find_spec("transformers") is not None:
            wrapped = loading.load_wrapped_gguf(root, dtype, home)
            return _with_side_files(wrapped, side_files_from(file), root, f"GGUF files of {name}")
        content = _reading(lambda: translate(file), root)
        description: dict[str, Any] = content.description
        weights = GGUFWeights(file, content.names, content.change)
        if take is not None and not weights.quantized:
            problem = f"{root} has no quantized weights, which could stay as stored"
            raise InputError(problem, "leave `weights` out")
        family = _family(description, root)
        _reading(lambda: config_json.check_sizes(description, weights.shapes()), root)
        weights.dtype = dtype or weights.dtypes()[0]
        modules = sentence_transformers.Modules(root)
        parts = description, family, weights
        return _assemble(modules, side_files_from(file), parts, home, take)
    finally:
        file.close()


def _take_quantized(
    model: Model, entries: tensor_map.TensorMap, stored: "StoredTensors"
) -> tensor_map.TensorMap:
    """Give a model the quantized matrices of its file as integers, and return what is left."""
    return keep_quantized(model, entries, stored.codes)


def _with_side_files(model: Any, side_files: dict[str, bytes], where: Path, family: str) -> Model:
    """A model that `transformers` opened, which the user should know."""
    model.tokenizer = read_tokenizer(side_files, where)
    model.trained_length = read_trained_length(side_files, where)
    model.side_files = side_files
    warnings.warn(
        f"transformers opened {where}, since manyheads does not open {family!s:.100} itself: the "
        "lens reads it; pruning, gates, adapters and training need a family that manyheads opens",
        WrappedModelWarning,
        stacklevel=2,
    )
    check_finite(model)
    return cast(Model, model)


def _assemble(
    modules: sentence_transformers.Modules,
    side_files: dict[str, bytes],
    parts: tuple[dict[str, Any], Family, WeightFiles | GGUFWeights],
    home: torch.device,
    take: TakeLater | None = None,
) -> Model:
    folder, (description, family, weights) = modules.transformer, parts
    described = _reading(lambda: read_description(family, description), folder)
    sentence = sentence_transformers.sentence_of(modules, side_files, description, described)
    stanford = late_interaction.ARTIFACT in side_files
    if stanford and late_interaction.LINEAR not in weights.shapes():
        raise InputError(
            f"{folder / WEIGHTS} has no {late_interaction.LINEAR}, "
            "the projection of Stanford's ColBERT",
            "use complete weights",
        )
    stored = StoredTensors(family, weights, (late_interaction.LINEAR,) if stanford else ())
    tokenizer = read_tokenizer(side_files, folder)
    content = tokenizer, weights[late_interaction.LINEAR] if stanford else None
    late = late_interaction.late_interaction_of(
        modules, side_files, description, described, content
    )
    config = stored.config(described)
    model = _reading(lambda: build(config, device="meta"), folder)
    if INTEGER_WEIGHTS in description:
        make_integer_layers(model, _integer_weights(description, folder))
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    entries = family.tensor_map(config, shapes)
    if modules.pooling and stored.lacks_readout(entries):
        # sentence-transformers keeps the class that a model was trained from, without its head.
        bare = f"{family.classes[str(description['model_type'])]}{family.class_ends[NoReadout]}"
        bare_description = {**description, "architectures": [bare]}
        return _assemble(modules, side_files, (bare_description, family, weights), home, take)
    where = str(folder if folder.is_file() else folder / WEIGHTS)
    tensor_map.check_fits(entries, shapes, stored.used(config), where, stored.in_file)
    if take is not None:
        entries = take(model, entries, stored)
    tensors: dict[str, Tensor] = {}
    checks: list[tuple[tensor_map.MapEntry, Future[bool]]] = []
    # Beside the reading, which it would slow down by a twelfth.
    bar = Progress("loading", total=len(shapes), unit="tensors", enabled=folder.is_file())
    with ThreadPoolExecutor(max_workers=1) as checker, bar:
        for entry in entries:
            read_tensors = entry.read(stored.__getitem__)
            checks += [
                (entry, checker.submit(is_finite, tensor)) for tensor in read_tensors.values()
            ]
            tensors |= {name: tensor.to(home) for name, tensor in read_tensors.items()}
            bar.advance(len(read_tensors))
    doubtful = [entry for entry, check in checks if not check.result()]
    not_finite = [name for entry in doubtful for name in stored.not_finite(entry)]
    model.unread = stored.unused(config)
    warn_not_finite(list(dict.fromkeys(not_finite)), where)
    for name, tensor in model.state_dict().items():
        if name.endswith(STORED_NAMES) and name in tensors and tensors[name].dtype != tensor.dtype:
            problem = f"{where} stores {name} as {tensors[name].dtype}, expected {tensor.dtype}"
            raise InputError(problem, "save the model again")
    model.load_state_dict(tensors, assign=True, strict=take is None)
    model.source_config = config_json.corrected(family, description, config)
    model.tokenizer = tokenizer
    model.trained_length = read_trained_length(side_files, folder)
    model.generation = read_generation(side_files)
    model.sentence, model.late, model.side_files = sentence, late, side_files
    return model.eval()


def _integer_weights(
    description: Mapping[str, Any], folder: Path
) -> WeightName | dict[str, Layout]:
    """One format for all layers, or the layout of each."""
    value = description[INTEGER_WEIGHTS]
    by_module = isinstance(value, dict)
    allowed = get_args(Layout if by_module else WeightName)
    for name in value.values() if by_module else [value]:
        if name not in allowed:
            problem = f"{folder / config_json.CONFIG} has {INTEGER_WEIGHTS}={name!r:.100}"
            raise InputError(problem, f"use one of {', '.join(allowed)}")
    return value


def _stored_dtype(description: Mapping[str, Any], weights: WeightFiles) -> torch.dtype:
    """The dtype that config.json names, else that of the first tensor, as in `transformers`."""
    dtypes, named = weights.dtypes(), description.get("dtype") or description.get("torch_dtype")
    if named is not None and named not in DTYPE_NAMES:
        raise ConfigError(f"dtype={named!r:.200} is not supported", f"use {', '.join(DTYPE_NAMES)}")
    first = dtypes[0] if dtypes else torch.float32
    chosen = first if named is None else DTYPE_NAMES[named]
    if len(dtypes) > 1:
        names = " and ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        why = "the dtype in config.json" if named else "that of the first tensor"
        warnings.warn(
            f"the weights are stored in {names} and were loaded in {chosen}, {why}; pass dtype to "
            "choose another",
            MixedDtypeWarning,
            stacklevel=2,
        )
    return chosen


def save(model: Model, folder: str | Path) -> Saved:
    """Save a model to a folder; `load` restores it exactly, integer weights included.

    If `transformers` has such a model, it can open the folder; the result says so. If saving
    fails, the folder stays as it was.

    >>> import tempfile
    >>> model = build("tiny-encoder", seed=0)
    >>> with tempfile.TemporaryDirectory() as parent:
    ...     saved = save(model, parent + "/tiny-encoder")
    ...     again = load(saved.folder)
    >>> again.config == model.config
    True
    """
    if not model.native:
        raise native_model_error(model, "save")
    config, weights = cast(ModelConfig, model.config), format_of(model)
    description = {**config_json.description_of(model, native=weights is not None)}
    description.pop(INTEGER_WEIGHTS, None)
    if weights is not None:
        description[INTEGER_WEIGHTS] = weights
    name = str(description["model_type"])
    family, state = FAMILIES[name], model.state_dict()
    refuse_changed(model, state)
    dtype = torch.float32 if weights is not None else next(iter(state.values())).dtype
    tensors = tensor_map.to_file(family.tensor_map(config, state), state)
    unused = family.unused_tensors(config)
    tensors |= {
        unused[key]: tensor.to(dtype) for key, tensor in model.unread.items() if key in unused
    }
    side_files = side_files_of(model, Path(folder))
    description = description | _padding(model, description, side_files)
    description, tensors, artifact = late_interaction.stanford_layout(model, description, tensors)
    text = json.dumps({**description, "dtype": str(dtype).removeprefix("torch.")}, indent=1)
    side_files |= {config_json.CONFIG: text.encode(), **artifact}
    if model.late is None:
        side_files |= sentence_transformers.sentence_files(
            model.sentence, sentence_transformers.width_of(config), model.side_files
        )
    else:
        side_files |= late_interaction.late_files(model)
    files: dict[str, Callable[[Path], object]] = {WEIGHTS: partial(write_tensors, tensors)}
    files |= {name: methodcaller("write_bytes", data) for name, data in side_files.items()}
    write_folder(Path(folder), files, outdated=lambda before: _outdated(before, files))
    uneven = PER_LAYER in description
    opened_by = "manyheads" if uneven else family.opened_by(description)
    return Saved(Path(folder), name, opened_by, uneven)


class StoredTensors:
    """The tensors of a file under the newest names of their family."""

    def __init__(
        self, family: Family, weights: WeightFiles | GGUFWeights, left_out: tuple[str, ...] = ()
    ) -> None:
        self._family, self._weights = family, weights
        used = (name for name in weights.shapes() if name not in left_out)
        names = {name: family.canonical_name(name) for name in used}
        self._file_name = {new: old for old, new in names.items() if new is not None}

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._file_name[name]]

    def rows(self, name: str, rows: range, axis: int = 0) -> Tensor:
        """Some rows, or of axis 1 columns, of a tensor of a folder."""
        assert isinstance(self._weights, WeightFiles), "a GGUF file is not read in parts"
        return self._weights.rows(self._file_name[name], rows, axis)

    def codes(self, names: Sequence[str]) -> IntegerCodes | None:
        """Quantized matrices of a GGUF file as integers; None if one of them is not quantized."""
        assert isinstance(self._weights, GGUFWeights)
        codes = self._weights.codes([self._file_name[name] for name in names])
        parts = () if codes is None else (codes.scales, codes.offsets)
        if not all(part is None or is_finite(part) for part in parts):
            warn_not_finite([self.in_file(name) for name in names], "the GGUF file")
        return codes

    def in_file(self, name: str) -> str:
        """The name that the file itself has for a tensor."""
        return self._weights.in_file(self._file_name.get(name, name))

    def lacks_readout(self, entries: Iterable[tensor_map.MapEntry]) -> bool:
        """Whether the config has a readout with tensors of its own, and the file has none."""
        plain = (entry for entry in entries if isinstance(entry, tensor_map.Entry))
        own = [entry for entry in plain if entry.name.startswith("readout.")]
        names = [name for entry in own for name in entry.sources]
        return bool(names) and not any(name in self._file_name for name in names)

    def not_finite(self, entry: tensor_map.MapEntry) -> list[str]:
        """The tensors of the file with NaN or infinity among those that an entry reads."""
        names: list[str] = []

        def get(name: str) -> Tensor:
            tensor = self[name]
            names.extend([] if is_finite(tensor) else [self.in_file(name)])
            return tensor

        entry.read(get)
        return names

    def config(self, described: ModelConfig) -> ModelConfig:
        """The config as described, with the head tied or not as `transformers` would load it.

        A tied head has its own table where the file has one that differs, and a T5's is tied where
        the file has none.
        """
        head, family = described.readout, self._family
        if not isinstance(head, LanguageHead):
            return described
        tables = [name for name in family.tied_copies if name.endswith(".weight")]
        copies = [name for name in tables if name in self._file_name]
        if head.tied and any(self._differs(name, described) for name in copies):
            return config_json.with_tied(described, tied=False)
        if not head.tied and not copies and family.file_decides_tying:
            return config_json.with_tied(described, tied=True)
        return described

    def used(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of all but tied copies and what no part of the model uses."""
        ignored = set(self._family.unused_tensors(config))
        if getattr(config.readout, "tied", False):
            ignored |= set(self._family.tied_copies)
        shapes = self._weights.shapes()
        return {new: shapes[old] for new, old in self._file_name.items() if new not in ignored}

    def unused(self, config: ModelConfig) -> dict[str, Tensor]:
        """The tensors that no part of the model uses, in their own memory."""
        names = self._file_name.keys() & self._family.unused_tensors(config).keys()
        return {name: self[name].clone() for name in sorted(names)}

    def _differs(self, copy: str, config: ModelConfig) -> bool:
        """Whether a supposed copy of the token embedding differs from it."""
        entries = self._family.tensor_map(config, (TOKEN_TABLE,))
        tables = [entry for entry in entries if isinstance(entry, tensor_map.Entry)]
        names = [name for table in tables for name in table.sources if name in self._file_name]
        return any(not torch.equal(self[name], self[copy]) for name in names)


def refuse_changed(model: Model, state: Mapping[str, Any]) -> None:
    """Refuse a model with other parameters than its config has: a checkpoint would lose them."""
    plain = build(cast(ModelConfig, model.config), device="meta")
    make_integer_layers(plain, layouts_of(model))
    expected = plain.state_dict()
    if any(".adapters." in name or name.startswith("modules_to_save.") for name in state):
        raise ConfigError(
            "the model has adapters, which are not part of a model's checkpoint",
            "save them with surgery.save_adapter, or merge them with surgery.merge and "
            "surgery.delete_adapter",
        )
    missing = [name for name in expected if name not in state]
    if missing:
        raise ConfigError(
            f"the model has no {missing[0]}, which its config describes",
            "restore its weights, with surgery.dequantize if they are quantized",
        )
    surplus = [name for name in state if name not in expected]
    if surplus:
        raise ConfigError(
            f"the model has {surplus[0]}, which its config does not describe",
            "remove it; training with L0Gates folds its gates into the weights when it ends",
        )


def _padding(
    model: Model, description: Mapping[str, Any], side_files: Mapping[str, bytes]
) -> dict[str, int]:
    """The padding token of a decoder that classifies texts.

    `transformers` classifies a text by its last token that is not padding, and without this id it
    accepts one text at a time.
    """
    config = model.config
    if not isinstance(config, DecoderConfig) or not isinstance(config.readout, ClassHead):
        return {}
    if description.get("pad_token_id") is not None:
        return {}
    padding = padding_id(model, side_files)
    tokens = range(config.embedding.vocabulary)
    return {"pad_token_id": padding} if padding is not None and padding in tokens else {}


def _outdated(folder: Path, files: Mapping[str, Any]) -> list[str]:
    """Files of the previous model in this folder, which do not belong to the new one.

    In a folder without a model they were put there for the new one.
    """
    modules = sentence_transformers.MODULES
    if not any((folder / name).is_file() for name in (config_json.CONFIG, modules)):
        return []
    ours = (*SIDE_FILES, modules, late_interaction.ARTIFACT)
    return [name for name in ours if name not in files]


def _check_holds_model(folder: Path) -> None:
    """Refuse folders of runs and adapters, and say where the model is."""
    if (folder / config_json.CONFIG).is_file():
        return
    if (folder / "model" / config_json.CONFIG).is_file():
        raise InputError(f"{folder} is the folder of a run", f"use its model, {folder / 'model'}")
    if (folder / "adapter_config.json").is_file():
        raise InputError(
            f"{folder} holds an adapter, not a model",
            "load the model it was trained for and use surgery.load_adapter, or train with "
            "merged = true, which also saves the merged model",
        )


def _family(description: Mapping[str, Any], folder: Path) -> Family:
    name = description.get("model_type")
    if not isinstance(name, str) or name not in FAMILIES:
        raise InputError(
            f"{_config_name(folder)} has model_type={name!r:.200}, which manyheads does not "
            "support",
            f"use one of {', '.join(FAMILIES)}",
        )
    return FAMILIES[name]


def _config_name(where: Path) -> Path:
    """What holds the config: a GGUF file does so itself."""
    return where if where.is_file() else where / config_json.CONFIG


def _reading(make: Callable[[], Any], folder: Path) -> Any:
    """Call `make`, and name the config.json in its errors."""
    where = _config_name(folder)
    try:
        return make()
    except ConfigError as error:
        raise InputError(f"{where}: {error.problem[:500]}", error.remedy[:300]) from None
    except InputError:
        raise
    except KeyError as error:
        raise InputError(f"{where} has no {error!s:.200}", "use a complete config.json") from None
    except MALFORMED as error:
        first = str(error).partition("\n")[0][:200]
        raise InputError(
            f"{where} has a value of the wrong type ({first})",
            "use integers for sizes, and numbers and lists where they belong",
        ) from error
