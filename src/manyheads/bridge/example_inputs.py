"""Inputs for the forward that finds the parts of a model."""

from inspect import signature
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import InputError


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Inputs for the probing forward: a few random tokens, an image, a second of noise."""
    accepts = set(signature(model.forward).parameters)
    device, config = next(model.parameters()).device, model.config
    dtype = next(model.parameters()).dtype
    generator = torch.Generator().manual_seed(0)
    name = model.main_input_name
    inputs: dict[str, Tensor] = {}
    if name == "input_ids":
        inputs["input_ids"] = _tokens(model, 7, generator)
        inputs["attention_mask"] = torch.ones(1, 7, dtype=torch.long)
    if "pixel_values" in accepts and name in ("pixel_values", "input_ids"):
        vision = getattr(config, "vision_config", config)
        side = getattr(vision, "image_size", None)
        if side is not None and (name == "pixel_values" or hasattr(config, "vision_config")):
            height, width = (side, side) if isinstance(side, int) else side
            channels = getattr(vision, "num_channels", 3)
            inputs["pixel_values"] = torch.randn(1, channels, height, width, generator=generator)
    if name == "input_features":
        frames = 2 * getattr(config, "max_source_positions", 50)
        bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 80))
        inputs["input_features"] = torch.randn(1, bins, frames, generator=generator)
    if name == "input_values":
        inputs["input_values"] = torch.randn(1, 4000, generator=generator)
    if config.is_encoder_decoder and "decoder_input_ids" in accepts:
        inputs["decoder_input_ids"] = _tokens(model, 5, generator)
    if not inputs:
        raise InputError(
            f"{type(model).__name__} reads {name}, which cannot be made up",
            "pass example={...}, the inputs of one example by name",
        )
    return {
        name: tensor.to(device=device, dtype=dtype if tensor.is_floating_point() else None)
        for name, tensor in inputs.items()
        if name in accepts
    }


def _tokens(model: Any, count: int, generator: torch.Generator) -> Tensor:
    """Random tokens that are not special."""
    config = getattr(model.config, "text_config", model.config)
    size = int(getattr(config, "vocab_size", 1))
    settings = model.config.to_dict()
    special = {token for name, token in settings.items() if name.endswith("_token_id")}
    special |= {token for name, token in settings.items() if name.endswith("_token_index")}
    ordinary = [token for token in range(min(size, 1000)) if token not in special] or [0]
    drawn = torch.randint(len(ordinary), (1, count), generator=generator)
    return torch.tensor(ordinary)[drawn]
