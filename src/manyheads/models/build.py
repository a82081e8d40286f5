"""Build a model from a config or a name."""

import re
import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from importlib.resources import files
from typing import Any, overload

import torch
from torch import nn

from manyheads.argument_checks import checked
from manyheads.devices import check_memory
from manyheads.errors import ConfigError
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.recipes import RECIPES, ModelConfig
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.vision import Vision, VisionConfig

Model = Encoder | Decoder | Seq2Seq | Vision

# The deepest that was published (arXiv 2203.00555).
MAX_LAYERS = 1000
# Models of fewer weights in their layers and without such sizes are built without further ado.
LARGE, LARGE_SIZE = 2**24, 2**20


@cache
def _sizes() -> dict[str, dict[str, Any]]:
    return tomllib.loads(files(__package__).joinpath("sizes.toml").read_text("utf-8"))


def list_configs() -> tuple[str, ...]:
    """The names that `get_config` and `build` accept.

    >>> "gpt2" in list_configs()
    True
    """
    return tuple(_sizes())


def get_recipe(name: str) -> Callable[..., ModelConfig]:
    """The function that makes the config of this name."""
    if name not in _sizes():
        raise ConfigError(f"there is no config named {name!r}", f"use {', '.join(_sizes())}")
    return RECIPES[_sizes()[name]["recipe"]]


def get_config(name: str, **changes: Any) -> ModelConfig:
    """The config of a known model, with changes to the arguments of its recipe.

    >>> get_config("gpt2", layers=2).stack.width
    768
    """
    recipe = get_recipe(name)
    arguments = {key: value for key, value in _sizes()[name].items() if key != "recipe"}
    layers = changes.get("layers", 1)
    if isinstance(layers, int) and layers > MAX_LAYERS:
        raise ConfigError(f"layers must be at most {MAX_LAYERS:,}, got {layers:,}")
    return checked(recipe)(**arguments | changes)


@overload
def build(
    config: EncoderConfig, *, seed: int | None = None, device: str = "cpu", dtype: Any = None
) -> Encoder: ...
@overload
def build(
    config: DecoderConfig, *, seed: int | None = None, device: str = "cpu", dtype: Any = None
) -> Decoder: ...
@overload
def build(
    config: Seq2SeqConfig, *, seed: int | None = None, device: str = "cpu", dtype: Any = None
) -> Seq2Seq: ...
@overload
def build(
    config: VisionConfig, *, seed: int | None = None, device: str = "cpu", dtype: Any = None
) -> Vision: ...
@overload
def build(
    config: str, *, seed: int | None = None, device: str = "cpu", dtype: Any = None, **changes: Any
) -> Any: ...


def build(
    config: ModelConfig | str,
    *,
    seed: int | None = None,
    device: str = "cpu",
    dtype: torch.dtype | None = None,
    **changes: Any,
) -> Model:
    """A model with freshly initialized weights, in eval mode.

    With a `seed` the weights are reproducible, and the global random state is not changed. On
    `device="meta"` the weights have shapes but no memory.
    """
    if isinstance(config, str):
        config = get_config(config, **changes)
    elif changes:
        raise ConfigError(
            f"{sorted(changes)} can only be given with the name of a config",
            "change the config itself",
        )
    _check_memory(config, device)
    # A context of torch's takes a third of the time that a small model does.
    usual = torch.get_default_device() == torch.device(device)
    with _seeded(seed, device), nullcontext() if usual else torch.device(device):
        model = _model(config)
    return (model if dtype is None else model.to(dtype=dtype)).eval()


def _model(config: ModelConfig) -> Model:
    match config:
        case EncoderConfig():
            return Encoder(config)
        case DecoderConfig():
            return Decoder(config)
        case Seq2SeqConfig():
            return Seq2Seq(config)
        case VisionConfig():
            return Vision(config)


def _check_memory(config: ModelConfig, device: str) -> None:
    """Refuse a model that does not fit the device, if it looks large."""
    stacks = [getattr(config, name, None) for name in ("stack", "encoder", "decoder")]
    weights = sum(len(stack.layers) * stack.width**2 for stack in stacks if stack is not None)
    sizes = map(int, re.findall(r"\d+", repr(config)))
    if device == "meta" or (weights < LARGE and max(sizes) < LARGE_SIZE):
        return
    remedy = 'use a smaller vocabulary, length or width, fewer layers, or device="meta"'
    try:
        with torch.device("meta"):
            parameters = dict(_model(config).named_parameters())
    except (RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ConfigError(f"the model is too large ({reason})", remedy) from None
    name, largest = max(parameters.items(), key=lambda item: item[1].numel())
    shape = " x ".join(f"{size:,}" for size in largest.shape)
    total = sum(weight.numel() * weight.element_size() for weight in parameters.values())
    check_memory(total, f"the weights, of which {name} has {shape},", remedy, device)


@contextmanager
def _seeded(seed: int | None, device: str) -> Iterator[None]:
    """Seed the generators that draw the weights, and restore them afterwards.

    `torch.manual_seed` would also seed the generators of all other devices.
    """
    if seed is None:
        yield
        return
    devices = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        torch.default_generator.manual_seed(seed)
        for cuda_device in devices:
            with torch.cuda.device(cuda_device):
                torch.cuda.manual_seed(seed)
        yield


@contextmanager
def eval_mode(model: nn.Module) -> Iterator[None]:
    """Put a model into eval mode inside the block; each module gets its own mode back."""
    training = [module for module in model.modules() if module.training]
    for module in training:
        module.training = False
    try:
        yield
    finally:
        for module in training:
            module.training = True
