"""From a name or a config to a model."""

import tomllib
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.resources import files
from typing import Any, overload

import torch

from manyheads.errors import ConfigError
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.recipes import RECIPES, ModelConfig
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.vision import Vision, VisionConfig

__all__ = ["Model", "build", "named", "sizes"]

Model = Encoder | Decoder | Seq2Seq | Vision


@cache
def sizes() -> dict[str, dict[str, Any]]:
    """The known shapes by name."""
    return tomllib.loads(files(__package__).joinpath("sizes.toml").read_text("utf-8"))


def named(name: str, **changes: Any) -> ModelConfig:
    """The config of a known shape, with some of its numbers changed.

    >>> named("gpt2", layers=2).stack.width
    768
    """
    if name not in sizes():
        raise ConfigError(f"no known shape is called {name!r}", f"use {', '.join(sizes())}")
    numbers = sizes()[name] | changes
    recipe = RECIPES[numbers.pop("recipe")]
    return recipe(**numbers)


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
    """A model with fresh weights, ready to run (in eval mode).

    With a `seed` the weights are the same each time and the global random state stays untouched.
    On `device="meta"` it has shapes and no memory.
    """
    if isinstance(config, str):
        config = named(config, **changes)
    elif changes:
        raise ConfigError(f"{sorted(changes)} change a known shape", "change the config itself")
    with _seeded(seed, device), torch.device(device):
        model = _make(config)
    return model.to(dtype=dtype).eval()


@contextmanager
def _seeded(seed: int | None, device: str) -> Iterator[None]:
    """Seed the generators that draw the weights, and put them back afterwards.

    `torch.manual_seed` would reach every generator of the machine and leave the others seeded.
    """
    if seed is None:
        yield
        return
    drawing = [torch.device(device)] if torch.device(device).type == "cuda" else []
    with torch.random.fork_rng(devices=drawing):
        torch.default_generator.manual_seed(seed)
        for each in drawing:
            with torch.cuda.device(each):
                torch.cuda.manual_seed(seed)
        yield


def _make(config: ModelConfig) -> Model:
    match config:
        case EncoderConfig():
            return Encoder(config)
        case DecoderConfig():
            return Decoder(config)
        case Seq2SeqConfig():
            return Seq2Seq(config)
        case VisionConfig():
            return Vision(config)
