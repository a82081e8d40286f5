"""Folders of sentence-transformers: a transformer, pooling, projections and normalization."""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, Literal

from safetensors.torch import save as to_bytes

from manyheads.checkpoints.files import WEIGHTS, WeightFiles, read_json
from manyheads.errors import InputError
from manyheads.models.encoder import TextConfig
from manyheads.models.provenance import DenseProjection, Pooling, SentenceConfig
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.parts.feedforward import Activation
from manyheads.parts.positions import Learned

CONFIG = "config.json"
MODULES = "modules.json"
POOLING = "1_Pooling/config.json"
SETTINGS = "sentence_bert_config.json"
VECTORS = "config_sentence_transformers.json"
# Module names that every version opens; the newest writes longer ones.
THEIRS = "sentence_transformers."
TORCH = "torch.nn.modules."
PYLATE = "pylate.models.Dense."
KINDS = ("Transformer", "Pooling", "Dense", "Normalize")
# The modules in their order: what follows the pooling may be missing, and so may the pooling.
ORDER = re.compile("Transformer( Pooling( Dense)*( Normalize)?)?")
# The modules of late interaction, and those that PyLate writes, which imply the others.
LATE_KINDS = ("Transformer", "Dense", "MultiVectorMask", "Normalize")
LATE_ORDER = re.compile(
    "Transformer( Dense)* (MultiVectorMask( Normalize)?|Normalize MultiVectorMask)"
)
PYLATE_ORDER = re.compile("Transformer( Dense)*")
PYLATE_KEYS = (
    "query_prefix",
    "document_prefix",
    "query_length",
    "document_length",
    "query_expansion",
    "do_query_expansion",
    "attend_to_expansion_tokens",
    "attend_to_mask_tokens",
    "skiplist_words",
)
MASK = "MultiVectorMask/config.json"
# The names that modules read and write unless their config says otherwise.
EMBEDDING = "sentence_embedding"
TOKENS = "token_embeddings"
# The classes of torch.nn that a Dense module names, by our names.
DENSE_ACTIVATIONS: dict[str, Activation | Literal["none"]] = {
    "activation.Tanh": "tanh",
    "linear.Identity": "none",
    "activation.ReLU": "relu",
    "activation.GELU": "gelu",
    "activation.SiLU": "silu",
}
MODES: dict[str, Pooling] = {"mean": "mean", "cls": "cls", "lasttoken": "last"}
FLAGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
WIDTHS = ("word_embedding_dimension", "embedding_dimension")
# A tokenizer without a limit has about 1e30.
ENDLESS = 10**9


@dataclass(frozen=True, slots=True)
class Modules:
    """The modules of a folder: the transformer, and optionally what follows it."""

    transformer: Path
    pooling: Path | None = None
    dense: tuple[Path, ...] = ()
    normalizes: bool = False
    late: bool = False
    mask: Path | None = None

    def files(self, folder: Path) -> dict[str, bytes]:
        """The files beside the weights, by the names that we write."""
        if not (folder / MODULES).is_file():
            return {}
        alone = {} if self.pooling or self.late else module_files(KINDS[:1], (), EMBEDDING)
        paths = {POOLING: self.pooling / CONFIG} if self.pooling else {}
        if self.mask:
            paths[MASK] = self.mask / CONFIG
        if (folder / VECTORS).is_file():
            paths[VECTORS] = folder / VECTORS
        # Older folders name this file after the family.
        settings = sorted(self.transformer.glob("sentence_*_config.json"))
        if settings:
            paths[SETTINGS] = settings[0]
        for path in paths.values():
            read_json(path)
        return alone | {name: path.read_bytes() for name, path in paths.items()}


def modules_of(folder: Path) -> Modules:
    """The modules that modules.json lists; without it the folder is the transformer itself."""
    file = folder / MODULES
    if not file.is_file():
        return Modules(folder)
    listed = [_listed(item, file) for item in read_json(file, list)]
    kinds, by_kind = [kind for kind, _ in listed], dict(listed)
    names = " ".join(kinds)
    late = LATE_ORDER.fullmatch(names) or (PYLATE_ORDER.fullmatch(names) and _is_pylate(folder))
    if not late and not ORDER.fullmatch(names):
        raise InputError(
            f"the modules of {file} must be {', '.join(KINDS)}, or for late interaction "
            f"{', '.join(LATE_KINDS)}, got {', '.join(kinds) or 'none'}"
        )
    transformer, mask, last = listed[0][1], by_kind.get("MultiVectorMask"), by_kind.get("Normalize")
    dense = tuple(path for kind, path in listed if kind == "Dense")
    if not late:
        return Modules(transformer, by_kind.get("Pooling"), dense, normalizes=last is not None)
    # PyLate leaves out what follows the projection.
    normalizes = mask is None
    if last is not None and (last / CONFIG).is_file():
        normalizes = read_json(last / CONFIG).get("module_input_name") == TOKENS
    return Modules(transformer, None, dense, normalizes, late=True, mask=mask)


def _is_pylate(folder: Path) -> bool:
    """Whether PyLate wrote the folder, which keeps the settings of modules in another file."""
    settings = read_json(folder / VECTORS) if (folder / VECTORS).is_file() else {}
    return settings.get("model_type") == "ColBERT" or any(key in settings for key in PYLATE_KEYS)


def sentence_of(
    modules: Modules,
    side_files: Mapping[str, bytes],
    config_json: Mapping[str, Any],
    config: ModelConfig,
) -> SentenceConfig | None:
    """How the folder makes sentence embeddings, or None if it does not."""
    if modules.pooling is None:
        return None
    return SentenceConfig(
        pooling=_pooling(json.loads(side_files[POOLING]), modules.pooling / "config.json"),
        dense=dense_projections(modules.dense, config, EMBEDDING),
        normalize=modules.normalizes,
        max_length=longest_text(side_files, config_json, config),
    )


def sentence_files(
    sentence: SentenceConfig | None, width: int, side_files: Mapping[str, bytes]
) -> dict[str, bytes]:
    """The files that `SentenceTransformer` needs beside the transformer, unchanged if possible.

    The transformer is in the folder itself, as in newer versions. A transformer without pooling,
    such as that of a cross-encoder, keeps its files.
    """
    if sentence is None:
        names = (MODULES, SETTINGS, VECTORS) if MODULES in side_files else ()
        return {name: side_files[name] for name in names if name in side_files}
    vectors: dict[str, Any] = {
        "prompts": {},
        "default_prompt_name": None,
        "similarity_fn_name": "cosine",
    }
    kinds = [*KINDS[:2], *["Dense"] * len(sentence.dense), *KINDS[3:][: sentence.normalize]]
    return {
        **module_files(kinds, sentence.dense, EMBEDDING),
        POOLING: _pooling_file(sentence, width, side_files.get(POOLING)),
        SETTINGS: _settings_file(sentence, side_files.get(SETTINGS)),
        VECTORS: side_files.get(VECTORS, as_bytes(vectors)),
    }


def lowercases(side_files: Mapping[str, bytes]) -> bool:
    """Whether texts are lowercased before they are tokenized."""
    return bool(json.loads(side_files.get(SETTINGS, b"{}")).get("do_lower_case"))


def module_files(
    kinds: Sequence[str],
    dense: Sequence[DenseProjection],
    name: str,
    types: Mapping[str, str] | None = None,
) -> dict[str, bytes]:
    """modules.json, and the files of Dense and Normalize modules that read and write `name`."""
    folders = [f"{index}_{kind}" if index else "" for index, kind in enumerate(kinds)]
    files: dict[str, bytes] = {}
    listed, projections = [], iter(dense)
    for index, (kind, folder) in enumerate(zip(kinds, folders, strict=True)):
        module = types[kind] if types else f"models.{kind}"
        listed.append({"idx": index, "name": str(index), "path": folder, "type": THEIRS + module})
        if kind == "Dense":
            files |= _dense_files(folder, next(projections), name)
        if kind == "Normalize":
            ends = {"module_input_name": name, "module_output_name": name}
            files[f"{folder}/{CONFIG}"] = as_bytes(ends)
    return {MODULES: as_bytes(listed), **files}


def _listed(module: Any, file: Path) -> tuple[str, Path]:
    """The kind of a module that modules.json lists, and its folder."""
    kind = module.get("type") if isinstance(module, dict) else None
    name = str(kind).rpartition(".")[2]
    supported = isinstance(kind, str) and kind.startswith((THEIRS, PYLATE))
    if not supported or name not in (*KINDS, *LATE_KINDS):
        raise InputError(
            f"{file} has a module {kind!r}, which manyheads does not support",
            f"use a model with only {', '.join(KINDS)}, or only {', '.join(LATE_KINDS)}",
        )
    path = PurePosixPath(str(module.get("path", "")))
    if path.is_absolute() or ".." in path.parts:
        raise InputError(f"{file} has a path outside its folder, {path}", "use one inside it")
    return name, file.parent / path


def width_of(config: ModelConfig) -> int:
    return config.encoder.width if isinstance(config, Seq2SeqConfig) else config.stack.width


def dense_projections(
    folders: Sequence[Path], config: ModelConfig, name: str
) -> tuple[DenseProjection, ...]:
    """The Dense modules of these folders, which read and write what has this name."""
    width, projections = width_of(config), []
    for folder in folders:
        projections.append(_projection(folder, width, name))
        width = projections[-1].weight.shape[0]
    return tuple(projections)


def _projection(folder: Path, width: int, name: str) -> DenseProjection:
    """One Dense module, whose input has this width and name."""
    file = folder / CONFIG
    config = read_json(file)
    for key in ("module_input_name", "module_output_name"):
        if config.get(key) not in (None, name):
            raise InputError(f"{file} has {key}={config[key]!r:.200}", f"use {name}")
    if config.get("use_residual"):
        raise InputError(
            f"{file} has use_residual=true, which manyheads does not support", "use false"
        )
    named = str(config.get("activation_function", f"{TORCH}activation.Tanh"))
    activation = DENSE_ACTIVATIONS.get(named.removeprefix(TORCH))
    if activation is None or not named.startswith(TORCH):
        names = ", ".join(name.partition(".")[2] for name in DENSE_ACTIVATIONS)
        raise InputError(
            f"{file} has activation_function={named!r:.200}, which is not supported",
            f"use one of torch.nn: {names}",
        )
    with WeightFiles(folder) as weights:
        shapes = weights.shapes()
        outputs = shapes.get("linear.weight", (0,))[0]
        expected: dict[str, tuple[int, ...]] = {"linear.weight": (outputs, width)}
        if config.get("bias", True):
            expected["linear.bias"] = (outputs,)
        if shapes != expected:
            raise InputError(
                f"{folder} has {shapes}, expected linear.weight (any, {width})"
                + (" and linear.bias" if config.get("bias", True) else ""),
                "use the config and the weights of the same model",
            )
        tensors = {name: weights[name].float().clone() for name in shapes}
    return DenseProjection(tensors["linear.weight"], tensors.get("linear.bias"), activation)


def _dense_files(folder: str, dense: DenseProjection, reads: str) -> dict[str, bytes]:
    """The files of a Dense module that reads and writes what has the name `reads`."""
    outputs, inputs = dense.weight.shape
    name = next(name for name, ours in DENSE_ACTIVATIONS.items() if ours == dense.activation)
    config = {
        "in_features": inputs,
        "out_features": outputs,
        "bias": dense.bias is not None,
        "activation_function": TORCH + name,
    }
    if reads != EMBEDDING:
        config |= {"module_input_name": reads, "module_output_name": reads}
    tensors = {"linear.weight": dense.weight.detach().cpu().contiguous()}
    if dense.bias is not None:
        tensors["linear.bias"] = dense.bias.detach().cpu().contiguous()
    return {f"{folder}/{CONFIG}": as_bytes(config), f"{folder}/{WEIGHTS}": to_bytes(tensors)}


def _pooling(config: Mapping[str, Any], file: Path) -> Pooling:
    modes = _modes(config)
    if len(modes) != 1 or modes[0] not in MODES:
        raise InputError(
            f"the pooling of {file} is {' and '.join(modes)}", f"use {', '.join(MODES)}"
        )
    return MODES[modes[0]]


def _modes(config: Mapping[str, Any]) -> list[str]:
    """Newer files name the mode or modes, older ones have a flag for each; the default is mean."""
    named = config.get("pooling_mode")
    if named is not None:
        return [named] if isinstance(named, str) else [str(mode) for mode in named]
    return [mode for flag, mode in FLAGS.items() if config.get(flag)] or ["mean"]


def longest_text(
    side_files: Mapping[str, bytes], config_json: Mapping[str, Any], config: ModelConfig
) -> int | None:
    """The maximum length of a text, from the folder, the tokenizer or the positions."""
    settings = json.loads(side_files.get(SETTINGS, b"{}"))
    bounds = [settings.get("max_seq_length")]
    if bounds[0] is None:
        tokenizer = json.loads(side_files.get("tokenizer_config.json", b"{}"))
        bounds = [tokenizer.get("model_max_length"), config_json.get("max_position_embeddings")]
    if isinstance(config, TextConfig) and isinstance(config.embedding.position, Learned):
        bounds.append(config.embedding.position.longest)
    lengths = [int(bound) for bound in bounds if bound is not None and 0 < bound < ENDLESS]
    return min(lengths, default=None)


def _pooling_file(sentence: SentenceConfig, width: int, was: bytes | None) -> bytes:
    old = json.loads(was or b"{}")
    pooling = next(name for name, mode in MODES.items() if mode == sentence.pooling)
    if was is not None and _modes(old) == [pooling] and width in map(old.get, WIDTHS):
        return was
    flags = {flag: mode == pooling for flag, mode in FLAGS.items()}
    written = (*FLAGS, *WIDTHS, "pooling_mode")
    others = {key: value for key, value in old.items() if key not in written}
    return as_bytes({WIDTHS[0]: width, **flags, **others})


def _settings_file(sentence: SentenceConfig, was: bytes | None) -> bytes:
    old = json.loads(was or b"{}")
    if was is not None and old.get("max_seq_length") == sentence.max_length:
        return was
    return as_bytes({**old, "max_seq_length": sentence.max_length})


def as_bytes(value: object) -> bytes:
    """A value as the content of a .json file."""
    return json.dumps(value, indent=2).encode()
