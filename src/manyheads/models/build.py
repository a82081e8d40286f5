"""Build a model from a config or a name."""

import tomllib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any, overload

import torch
from torch import nn

from manyheads.argument_checks import checked
from manyheads.errors import ConfigError
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.recipes import RECIPES, ModelConfig
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.vision import Vision, VisionConfig

Model = Encoder | Decoder | Seq2Seq | Vision


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
    model: Model
    with _seeded(seed, device), torch.device(device):
        match config:
            case EncoderConfig():
                model = Encoder(config)
            case DecoderConfig():
                model = Decoder(config)
            case Seq2SeqConfig():
                model = Seq2Seq(config)
            case VisionConfig():
                model = Vision(config)
    return model.to(dtype=dtype).eval()


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
