"""Adapters in the files of `peft`: adapter_config.json and adapter_model.safetensors."""

import json
import math
import re
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mode
from typing import Annotated, Any, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from manyheads.annotations import Between, DropoutRate
from manyheads.argument_checks import check_argument
from manyheads.atomic_write import write_tensors
from manyheads.bridge.automatic import native_models_only
from manyheads.checkpoints.config_json import family_of
from manyheads.checkpoints.files import read_json, write_folder
from manyheads.checkpoints.side_files import TOKENIZER, read_tokenizer
from manyheads.checkpoints.tensor_map import Either, Entry
from manyheads.errors import ArgumentError, ConfigError, InputError, short_repr
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2Seq
from manyheads.surgery.lora.adapters import (
    Adapter,
    check_exist,
    check_name,
    list_adapters,
    set_adapter,
)
from manyheads.surgery.lora.low_rank import LowRankUpdate, adapters_on, attach, span_indices
from manyheads.surgery.lora.modules_to_save import add_modules, modules_of
from manyheads.surgery.lora.targets import Projection, join_spans, projections_of
from manyheads.train.regularizers import final_gates

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
DOWN, UP = ".lora_A.weight", ".lora_B.weight"
# Beyond it float32 is infinite.
MAX_ALPHA = 1e30
# Options of peft that are not supported, with the values that have no effect.
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "use_dora": (False, None),
    "bias": ("none", None),
    "lora_bias": (False, None),
    "trainable_token_indices": (None, [], {}),
    "target_parameters": (None, []),
    "layer_replication": (None, []),
    "init_lora_weights": (True, False, None, "gaussian", "orthogonal", "eva"),
}
Alpha = Annotated[float, Between(-MAX_ALPHA, MAX_ALPHA)]
TYPES: dict[str, tuple[Any, str]] = {
    "lora_alpha": (Alpha, "use a number"),
    "lora_dropout": (DropoutRate, "use a number in [0, 1)"),
    "use_rslora": (bool | None, "use true or false"),
    "alpha_pattern": (dict[str, Any] | None, "use a number for each pattern"),
    "base_model_name_or_path": (str | None, "use the name of a model"),
}
# Patterns without these need no search.
PLAIN_PATTERN = re.compile(r"\^?(?:[\w.-]|\\[\W_])*", re.ASCII)
FORM = r"(.*\.)?({})$"
# Others may take for ever, so another process compares them with all modules, for so long.
PATTERN_SECONDS = 5
MATCH = """
import json, re, sys
try:
    import resource
    resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))
except ImportError:
    pass
patterns, modules = json.load(sys.stdin)
first = ((n for n, form in enumerate(patterns) if re.match(form, module)) for module in modules)
print(json.dumps([next(numbers, None) for numbers in first]))
"""


@native_models_only
def save_adapter(model: Model, folder: Path | str, name: str = "default") -> Path:
    """Save one adapter in the format of `peft`, for the same model in `transformers`.

    Updates of single heads, or of parts that are one matrix there, are saved as an equal update of
    the full matrix, with zeros elsewhere and the ranks of all parts. The base model is named as it
    was loaded.
    """
    check_exist(model, name)
    if final_gates(model):
        raise ConfigError(
            "the model has gates of L0Gates, which the files of an adapter cannot store",
            "set adapter.merged=true in the run file, which saves the full model",
        )
    family = family_of(model)
    updates_by_module = {
        family.module_name(module): update
        for path, layer, entry in _linears(model)
        for module, update in _to_peft(entry, adapters_on(layer).get(name, {}), path).items()
    }
    modules = modules_to_peft(model, modules_of(model, name))
    stored = {key: tensor.detach() for key, tensor in modules.items()}
    for module, update in updates_by_module.items():
        stored |= {f"{module}{DOWN}": update.down, f"{module}{UP}": update.up}
    tensors = {PREFIX + key: tensor.contiguous().cpu() for key, tensor in stored.items()}
    described = _config(model, updates_by_module)
    names = sorted({key.rpartition(".")[0] for key in modules})
    described["modules_to_save"] = names or None
    files: dict[str, Callable[[Path], Any]] = {
        WEIGHTS: partial(write_tensors, tensors),
        CONFIG: lambda path: path.write_text(json.dumps(described, indent=1), "utf-8"),
    }
    if model.reads_pairs and model.tokenizer is not None:
        # It may end texts in another way than that of the base model.
        files[TOKENIZER] = lambda path: path.write_text(model.tokenizer.to_str(), "utf-8")
    write_folder(Path(folder), files)
    return Path(folder)


@native_models_only
def load_adapter(model: Model, folder: Path | str, name: str = "default") -> Adapter:
    """Load an adapter and activate it; its parameters are frozen.

    If the folder has a tokenizer with the same vocabulary, the model gets it.
    """
    check_name(model, name)
    place = Path(folder)
    _check_files(place)
    described = read_json(place / CONFIG)
    _check_supported(described, place)
    pairs, others = _read(place / WEIGHTS)
    modules = modules_from_peft(model, others, place)
    linears, parts = _named_linears(model), projections_of(model)
    alphas = _alphas(described, list(pairs), place)
    canonical, planned = family_of(model).canonical_name, []
    for module, (down, up) in pairs.items():
        our_name = canonical(f"{module}.weight") or module
        target = linears.get(str(our_name).removesuffix(".weight"))
        if target is None:
            near = ", ".join(sorted({key.rpartition(".")[2] for key in linears}))
            base = described.get("base_model_name_or_path")
            remedy = f"load it into {base}" if base else "use an adapter of the same model"
            raise InputError(
                f"{place} adapts {module}, which this model does not have",
                f"{remedy}; this one can have adapters on {near}",
            )
        layer, path, rows = target
        _check_shapes(module, down, up, (len(rows), layer.in_features), place)
        update = _update(described, alphas[module], layer, rows, down, up)
        planned.append((layer, _label(parts, path, rows), update))
    for layer, label, update in planned:
        attach(layer, name, label, update.to(layer_device(layer)).train(layer.training))
    add_modules(model, name, modules)
    set_adapter(model, name)
    _load_tokenizer(model, place)
    return list_adapters(model)[name]


def _load_tokenizer(model: Model, place: Path) -> None:
    if model.tokenizer is None or not (place / TOKENIZER).is_file():
        return
    tokenizer = read_tokenizer({TOKENIZER: (place / TOKENIZER).read_bytes()}, place)
    if tokenizer.get_vocab() == model.tokenizer.get_vocab():
        model.tokenizer = tokenizer


@dataclass(frozen=True, slots=True, eq=False)
class _PeftUpdate:
    """An update of one module in `transformers`."""

    down: Tensor
    up: Tensor
    scale: float
    dropout: float
    root: bool
    transposed: bool


def _linears(model: Model) -> list[tuple[str, nn.Linear, Entry]]:
    """Every adaptable layer, with the entry of its weight in the tensor map."""
    linears = {part.linear: part.layer for part in projections_of(model)}
    names = [*model.state_dict(), *(f"{path}.weight" for path in linears)]
    result = []
    for entry in family_of(model).tensor_map(cast(ModelConfig, model.config), names):
        plain = entry.usual if isinstance(entry, Either) else entry
        if not isinstance(plain, Entry) or not plain.name.endswith(".weight"):
            continue
        path = plain.name.removesuffix(".weight")
        if path in linears:
            result.append((path, linears[path], plain))
    return result


def _to_peft(
    entry: Entry, updates: Mapping[str, LowRankUpdate], path: str
) -> dict[str, _PeftUpdate]:
    """The updates of one layer as updates of its modules in `transformers`."""
    if not updates:
        return {}
    flat = replace(entry, transposed=False)
    factors = list(updates.values())
    ups, downs, owner = [], [], []
    for index, update in enumerate(factors):
        rows, columns = (span_indices(spans) for spans in (update.rows, update.columns))
        up = update.up.weight.new_zeros(update.shape[0], update.rank)
        up[rows.to(up.device)] = update.up.weight.detach()
        down = update.down.weight.new_zeros(update.rank, update.shape[1])
        down[:, columns.to(down.device)] = update.down.weight.detach()
        ups.append(up)
        downs.append(down)
        owner += [index] * update.rank
    touched = torch.zeros(factors[0].shape[0], len(factors))
    for index, update in enumerate(factors):
        touched[span_indices(update.rows), index] = 1.0
    shares, joined_up = flat.part(touched), flat.part(torch.cat(ups, dim=1))
    whole = torch.cat(downs)
    result = {}
    for name, up in joined_up.items():
        used = shares[name].any(0)
        ranks = [place for place, index in enumerate(owner) if used[index]]
        if ranks:
            first = factors[owner[ranks[0]]]
            # A module has one scale, not 0: other updates are rescaled in their weights.
            scale = first.scale or 1.0
            ratios = up.new_tensor([factors[owner[place]].scale / scale for place in ranks])
            result[name.removesuffix(".weight")] = _PeftUpdate(
                whole[ranks],
                up[:, ranks] * ratios,
                scale,
                first.dropout.p,
                first.root,
                entry.transposed,
            )
    assert result, f"the update of {path} has no rows"
    return result


def _config(model: Model, updates: Mapping[str, _PeftUpdate]) -> dict[str, Any]:
    stabilized = any(update.root for update in updates.values())
    ranks = {module: update.down.shape[0] for module, update in updates.items()}
    alphas = {
        module: update.scale * (math.sqrt(ranks[module]) if stabilized else ranks[module])
        for module, update in updates.items()
    }
    rank, alpha = mode(ranks.values()), mode(alphas.values())
    writes = isinstance(model.config.readout, LanguageHead)
    task = {Decoder: "CAUSAL_LM", Seq2Seq: "SEQ_2_SEQ_LM"}.get(type(model)) if writes else None
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": model.source or None,
        "inference_mode": True,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": max(update.dropout for update in updates.values()),
        "use_rslora": stabilized,
        "fan_in_fan_out": any(update.transposed for update in updates.values()),
        "bias": "none",
        "init_lora_weights": True,
        "target_modules": sorted(updates),
        # Patterns that match only one module.
        "rank_pattern": {f"^{re.escape(name)}": n for name, n in ranks.items() if n != rank},
        "alpha_pattern": {f"^{re.escape(name)}": n for name, n in alphas.items() if n != alpha},
    }


def _check_files(place: Path) -> None:
    if not (place / WEIGHTS).exists() and (place / PICKLE).exists():
        raise InputError(
            f"{place} has a pickle ({PICKLE}), which can run any code",
            "if you trust it, convert it: safetensors.torch.save_file("
            f"torch.load({PICKLE!r}, weights_only=True), {WEIGHTS!r})",
        )
    for name in (CONFIG, WEIGHTS):
        if not (place / name).is_file():
            raise InputError(f"there is no {place / name}", "give a folder with a saved adapter")


def _check_supported(described: Mapping[str, Any], place: Path) -> None:
    kind = described.get("peft_type")
    if kind != "LORA":
        raise InputError(
            f"{place / CONFIG} has peft_type={short_repr(kind)}, which is not supported",
            "use a LORA adapter",
        )
    try:
        for key in TYPES.keys() & described.keys():
            check_argument(key, described[key], TYPES[key][0])
        for number in (described.get(key := "alpha_pattern") or {}).values():
            check_argument(key, number, Alpha)
    except ArgumentError:
        value = short_repr(described[key])
        raise InputError(f"{place / CONFIG} has {key}={value}", TYPES[key][1]) from None
    for key, neutral in NEUTRAL.items():
        if described.get(key) not in neutral and key in described:
            raise InputError(
                f"{place / CONFIG} has {key}={short_repr(described[key])}, which is not supported",
                "merge the adapter with peft, and load the merged model",
            )


def _read(file: Path) -> tuple[dict[str, tuple[Tensor, Tensor]], dict[str, Tensor]]:
    """The two matrices of every module, and the tensors of modules_to_save."""
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{file} is damaged ({error})", "copy or download it again") from None
    pairs: dict[str, tuple[Tensor, Tensor]] = {}
    others: dict[str, Tensor] = {}
    for name in tensors:
        if not name.endswith((DOWN, UP)):
            others[name.removeprefix(PREFIX)] = tensors[name]
            continue
        stem = name.removesuffix(DOWN).removesuffix(UP)
        both = stem + DOWN, stem + UP
        if any(key not in tensors for key in both):
            raise InputError(f"{file} has {name} without its counterpart", "save it again")
        pairs[stem.removeprefix(PREFIX)] = tensors[both[0]], tensors[both[1]]
    if not pairs:
        raise InputError(f"{file} has no LoRA weights", "save it again")
    return pairs, others


def _named_linears(model: Model) -> dict[str, tuple[nn.Linear, str, Tensor]]:
    """By the name in `transformers`: our layer, its path, and our rows in their order."""
    result = {}
    for path, layer, entry in _linears(model):
        flat = replace(entry, transposed=False, prefix="")
        for name, rows in flat.part(torch.arange(layer.out_features)).items():
            result[name.removesuffix(".weight")] = (layer, path, rows)
    return result


def _check_shapes(
    module: str, down: Tensor, up: Tensor, shape: tuple[int, int], place: Path
) -> None:
    rows, columns = shape
    if down.dim() == up.dim() == 2 and down.numel() and down.is_floating_point():
        rank = down.shape[0]
        if down.shape[1] == columns and tuple(up.shape) == (rows, rank):
            return
    raise InputError(
        f"{place} has shapes {tuple(down.shape)} and {tuple(up.shape)} for {module}, "
        f"which maps {columns} channels to {rows} in this model",
        "use an adapter of a model with this shape",
    )


def _update(
    described: Mapping[str, Any],
    alpha: float,
    layer: nn.Linear,
    rows: Tensor,
    down: Tensor,
    up: Tensor,
) -> LowRankUpdate:
    rank = down.shape[0]
    root = bool(described.get("use_rslora"))
    order = rows.argsort()
    # In some families gates and queries are interleaved; ours are not.
    ours = rows[order]
    update = LowRankUpdate(
        rank=rank,
        scale=alpha / (math.sqrt(rank) if root else rank),
        dropout=float(described.get("lora_dropout", 0.0)),
        shape=(layer.out_features, layer.in_features),
        rows=join_spans((int(row), int(row) + 1) for row in ours),
        columns=((0, layer.in_features),),
        root=root,
    )
    exact = torch.float64 if down.dtype == torch.float64 else torch.float32
    with torch.no_grad():
        update.to(exact)
        update.down.weight.copy_(down)
        update.up.weight.copy_(up[order])
    return update.requires_grad_(False)


def _alphas(described: Mapping[str, Any], modules: list[str], place: Path) -> dict[str, float]:
    """The alpha of each module: that of the first pattern that matches it, as in peft."""
    patterns = {key: float(n) for key, n in (described.get("alpha_pattern") or {}).items()}
    default = float(described.get("lora_alpha", 8))
    for pattern in patterns:
        try:
            re.compile(FORM.format(pattern))
        except (re.error, RecursionError, OverflowError):
            raise ConfigError(
                f"alpha_pattern has the invalid pattern {short_repr(pattern)}", "correct it"
            ) from None
    if all(map(PLAIN_PATTERN.fullmatch, patterns)):
        plain = {re.compile(FORM.format(pattern)): patterns[pattern] for pattern in patterns}
        return {
            module: next((plain[form] for form in plain if form.match(module)), default)
            for module in modules
        }
    task = json.dumps([[*map(FORM.format, patterns)], modules])
    command = [sys.executable, "-I", "-c", MATCH]
    try:
        done = subprocess.run(
            command, input=task, capture_output=True, text=True, timeout=PATTERN_SECONDS, check=True
        )
    except (subprocess.SubprocessError, OSError):
        raise InputError(
            f"{place / CONFIG} has patterns in alpha_pattern that take over {PATTERN_SECONDS} "
            "seconds to compare with the names of the modules",
            "use the names themselves",
        ) from None
    numbers = list(patterns.values())
    first = zip(modules, json.loads(done.stdout), strict=True)
    return {module: default if index is None else numbers[index] for module, index in first}


def _label(parts: list[Projection], path: str, rows: Tensor) -> str:
    """Our name of these rows."""
    span = (int(rows.min()), int(rows.max()) + 1)
    for part in parts:
        if part.linear == path and part.rows == span and len(rows) == span[1] - span[0]:
            return part.name
    return f"rows_{span[0]}"


def layer_device(layer: nn.Linear) -> torch.device:
    return next(iter((*layer.parameters(recurse=False), *layer.buffers(recurse=False)))).device


def modules_to_peft(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of modules_to_save under their names in `transformers`."""
    check_saveable(model, weights)
    table = _table(model)
    tensors: dict[str, Tensor] = {}
    for address in weights:
        tensors |= table[address].write(weights)
    return tensors


def check_saveable(model: Model, addresses: Iterable[str]) -> None:
    """Raise for modules that are not one tensor in `transformers`, which peft cannot store."""
    table = _table(model)
    for address in addresses:
        if address not in table:
            raise ConfigError(
                f"peft cannot store {address} as a module", "leave it out of modules_to_save"
            )


def modules_from_peft(
    model: Model, tensors: Mapping[str, Tensor], place: Path
) -> dict[str, Tensor]:
    """The tensors of modules_to_save under our names; `place` is for error messages."""
    family, weights = family_of(model), {}
    owners = {entry.sources[0]: entry for entry in _table(model).values()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        entry = owners.get(family.canonical_name(name) or name)
        if entry is None or entry.name not in shapes:
            raise InputError(
                f"{place} has the module {name}, which this model does not have",
                "use the model it was made for; with_classes(model, classes) adds a missing head",
            )
        [expected] = entry.shapes(shapes[entry.name]).values()
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"{place} has {name} of shape {tuple(tensor.shape)}, expected {expected}",
                "use an adapter of a model with this shape",
            )
        weights[entry.name] = entry.join([tensor])
    return weights


def _table(model: Model) -> dict[str, Entry]:
    """By our address, the entries that are one tensor in both."""
    entries = family_of(model).tensor_map(cast(ModelConfig, model.config), model.state_dict())
    plain = [entry.usual if isinstance(entry, Either) else entry for entry in entries]
    return {
        entry.name: entry for entry in plain if isinstance(entry, Entry) and len(entry.sources) == 1
    }
