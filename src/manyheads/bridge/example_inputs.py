"""Inputs for the forward that finds the parts of a model."""

from collections.abc import Iterator
from contextlib import contextmanager
from inspect import Parameter, signature
from typing import Any

import torch
from torch import Tensor

from manyheads.errors import InputError, ManyheadsError

TOKENS, TARGET_TOKENS, SAMPLES = 7, 5, 4000
# A processor tiles an image into one to five pieces, and some models read only those.
TILES = 5
# Parameters of a forward that no processor makes.
INNER: tuple[str, ...] = (
    *("labels", "past_", "use_", "return_", "output_", "logits_", "cache_", "head_", "mm_"),
    *("inputs_embeds", "position_ids", "decoder_inputs_embeds", "decoder_position_ids"),
    *("encoder_outputs", "interpolate_", "cross_attn_head", "decoder_head", "vision_feature"),
)


def example_inputs(model: Any) -> dict[str, Tensor]:
    """Inputs for the probing forward: a few random tokens, an image, a second of noise."""
    accepts = set(signature(model.forward).parameters)
    config, name = model.config, model.main_input_name
    generator = torch.Generator().manual_seed(0)
    inputs: dict[str, Tensor] = {}
    texts = name == "pixel_values" and hasattr(config, "text_config")
    if "input_ids" in accepts and (name in ("input_ids", "inputs") or texts):
        inputs["input_ids"] = _tokens(model, TOKENS, generator)
    if "pixel_values" in accepts and name in ("pixel_values", "input_ids"):
        inputs |= _images(model, accepts, inputs, generator)
    if name == "input_features" or "audio_config" in config.sub_configs:
        inputs |= _sounds(config, generator)
    if name == "input_values":
        bins, frames = (getattr(config, key, None) for key in ("num_mel_bins", "max_length"))
        spectrogram = hasattr(config, "patch_size") and bins and frames
        shape: list[Any] = [1, frames, bins] if spectrogram else [1, SAMPLES]
        inputs["input_values"] = torch.randn(shape, generator=generator)
    if config.is_encoder_decoder and "decoder_input_ids" in accepts:
        rows = getattr(getattr(config, "decoder", None), "num_codebooks", 1)
        inputs["decoder_input_ids"] = _tokens(model, TARGET_TOKENS, generator).repeat(rows, 1)
    if "input_ids" in inputs:
        inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
    if not inputs:
        raise InputError(
            f"{type(model).__name__} reads {name}, which cannot be made up", _remedy(model)
        )
    return {name: _placed(model, tensor) for name, tensor in inputs.items() if name in accepts}


@contextmanager
def explained(model: Any, inputs: Any, *, made_up: bool) -> Iterator[None]:
    """Errors of a model that cannot run on its inputs, in one line that says what to pass."""
    try:
        yield
    except (ManyheadsError, ImportError):
        raise
    except Exception as error:
        shapes = ", ".join(
            f"{name} {'x'.join(map(str, value.shape))}"
            for name, value in inputs.items()
            if isinstance(value, Tensor)
        )
        reason = " ".join(str(error).split()) or type(error).__name__
        raise InputError(
            f"{type(model).__name__} does not run on {'made-up inputs' if made_up else 'example='} "
            f"({shapes}): {reason:.200}",
            _remedy(model),
        ) from error


def _remedy(model: Any) -> str:
    parameters = signature(model.forward).parameters.values()
    names = [
        parameter.name
        for parameter in parameters
        if parameter.kind is not Parameter.VAR_KEYWORD and not parameter.name.startswith(INNER)
    ]
    return (
        "pass wrap(model, example=processor(...)), the inputs of one example as its processor "
        f"makes them: what it needs of {', '.join(names)}"
    )


def _placed(model: Any, tensor: Tensor) -> Tensor:
    weight = next(model.parameters())
    return tensor.to(weight.device, weight.dtype if tensor.is_floating_point() else None)


def _images(
    model: Any, accepts: set[str], inputs: dict[str, Tensor], generator: torch.Generator
) -> dict[str, Tensor]:
    """An image or a video, and in the text the tokens that its features replace."""
    config = model.config
    vision = getattr(config, "vision_config", config)
    side = getattr(vision, "image_size", None)
    if side is None or (model.main_input_name == "input_ids" and vision is config):
        return {}
    height, width = (side, side) if isinstance(side, int) else side
    shape = (getattr(vision, "num_channels", 3), height, width)
    frames, tiles = getattr(vision, "num_frames", None), getattr(vision, "max_num_tiles", None)
    if "aspect_ratio_ids" in accepts and tiles:
        return {
            "pixel_values": torch.randn(1, 1, tiles, *shape, generator=generator),
            "aspect_ratio_ids": torch.ones(1, 1, dtype=torch.long),
            "aspect_ratio_mask": torch.ones(1, 1, tiles, dtype=torch.long),
            "cross_attention_mask": torch.ones(1, TOKENS, 1, tiles, dtype=torch.long),
        }
    pixels = torch.randn(1, *((frames,) if frames else ()), *shape, generator=generator)
    token = getattr(config, "image_token_id", getattr(config, "image_token_index", None))
    if token is None or "input_ids" not in inputs:
        return {"pixel_values": pixels}
    tiled = pixels[:, None].expand(-1, TILES, *shape)
    sizes = {"image_sizes": torch.tensor([[height, width]])}
    for values, options in ((pixels, {}), (pixels[:, None], {}), (tiled, sizes), (pixels, sizes)):
        images = {"pixel_values": values, **options}
        if count := _count_features(model, images):
            ids = inputs["input_ids"]
            ids = torch.cat((ids[:, :1], torch.full((1, count), token), ids[:, 1:]), dim=1)
            return {**images, "input_ids": ids, "token_type_ids": (ids == token).long()}
    return {"pixel_values": pixels}


def _count_features(model: Any, images: dict[str, Tensor]) -> int:
    """The tokens that an image becomes; 0 where the model cannot read it in this shape."""
    placed = {name: _placed(model, tensor) for name, tensor in images.items()}
    try:
        with torch.no_grad():
            output = model.get_image_features(**placed)
        features = getattr(output, "pooler_output", output)
        features = [features] if isinstance(features, Tensor) else list(features)
        width = model.get_input_embeddings().weight.shape[1]
        return sum(part.numel() for part in features) // width
    # Whatever a model raises on an image of another shape.
    except Exception:
        return 0


def _sounds(config: Any, generator: torch.Generator) -> dict[str, Tensor]:
    """A spectrogram, in the layout that the config tells."""
    config = getattr(config, "audio_config", config)
    bins = getattr(config, "num_mel_bins", getattr(config, "feature_size", 80))
    shape: tuple[int, ...] = (1, bins, 2 * getattr(config, "max_source_positions", 50))
    if hasattr(config, "spec_size"):
        channels = 4 if getattr(config, "enable_fusion", False) else 1
        shape = (1, channels, config.spec_size**2 // bins, bins)
    elif hasattr(config, "input_feat_per_channel"):
        shape = (1, shape[2], config.input_feat_per_channel)
    features = {"input_features": torch.randn(shape, generator=generator)}
    return features | ({"is_longer": torch.zeros(1, 1)} if len(shape) == 4 else {})


def _tokens(model: Any, count: int, generator: torch.Generator) -> Tensor:
    """Random tokens that are not special."""
    special: set[Any] = set()
    for name, token in model.config.to_dict().items():
        if name.endswith(("_token_id", "_token_index")):
            # A model may have several ends.
            special |= set(token) if isinstance(token, list | tuple) else {token}
    config = getattr(model.config, "text_config", model.config)
    # The two sides of a model may have their own.
    configs = (config, *(getattr(config, name, None) for name in ("encoder", "decoder")))
    sizes = [getattr(part, "vocab_size", None) for part in configs]
    size = min((size for size in sizes if size), default=1)
    ordinary = [token for token in range(min(size, 1000)) if token not in special] or [0]
    drawn = torch.randint(len(ordinary), (1, count), generator=generator)
    return torch.tensor(ordinary)[drawn]
