"""Size, colours and normalisation of images, as in a model's preprocessor_config.json."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.images import MODES, SUFFIXES, PerChannel, normalise_pixels, read_pixels
from manyheads.errors import InputError
from manyheads.models.vision import Vision

FILE = "preprocessor_config.json"
BICUBIC = 3
# Luma weights of red, green and blue (ITU-R 601), as Pillow converts to greyscale.
BRIGHTNESS = (0.299, 0.587, 0.114)


def to_greyscale(image: Float[Tensor, "3 height width"]) -> Float[Tensor, "1 height width"]:
    """A colour image as greyscale, for a model with one channel."""
    weights = torch.tensor(BRIGHTNESS, dtype=image.dtype, device=image.device)
    return (image * weights.reshape(-1, 1, 1)).sum(0, keepdim=True)


def image_normalisation(model: Vision, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel; 0.5 by default."""
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    found = []
    for name in ("image_mean", "image_std"):
        value = settings.get(name) or [0.5] * channels
        found.append(torch.tensor(value, dtype=torch.float32)[:channels].reshape(-1, 1, 1))
    return found[0], found[1]


def image_mean_std(model: Vision) -> tuple[PerChannel, PerChannel]:
    """The same as numbers: one number if all channels are equal."""
    mean, deviation = map(_numbers, image_normalisation(model, model.config.patches.channels))
    return mean, deviation


def _numbers(by_channel: Tensor) -> PerChannel:
    """Rounded to six digits, the precision of float32."""
    found = tuple(round(each, 6) for each in by_channel.flatten().tolist())
    return found[0] if len(set(found)) == 1 else found


def image_size(model: Vision) -> int:
    """The side of the images the model was trained on, in pixels; the patch grid may differ.

    With centre cropping it is the size after the crop.
    """
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    size = settings.get("size")
    side = size.get("height") if isinstance(size, dict) else None
    if side is None or side != size.get("width") or settings.get("do_center_crop"):
        return model.config.patches.image
    return int(side)


def record_image_preprocessing(
    model: Vision, mean: PerChannel, std: PerChannel, size: int | None = None
) -> None:
    """Record the image preprocessing in the model, for us and for `transformers`.

    Other settings, such as cropping, are kept.
    """
    patches = model.config.patches
    usual = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True if patches.channels == 3 else None,
        "do_resize": True,
        "size": _square(patches.image),
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    now: dict[str, Any] = {"image_mean": _listed(mean, model), "image_std": _listed(std, model)}
    if size is not None:
        now["size"] = _square(size)
    text = json.dumps({**usual, **settings, **now}, indent=2).encode()
    model.side_files = {**model.side_files, FILE: text}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _listed(given: PerChannel, model: Vision) -> list[float]:
    return list(given) if isinstance(given, tuple) else [given] * model.config.patches.channels


def find_images(path: Path) -> list[Path]:
    """The file itself, or all images in a folder and those within it."""
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in SUFFIXES]
    if not found:
        raise InputError(f"{path} has no images", f"add {', '.join(SUFFIXES[:3])} files")
    return found


def read_image(model: Vision, file: Path) -> Float[Tensor, "channels height width"]:
    """Any image that Pillow reads, resized and normalised for the model."""
    patches = model.config.patches
    if patches.channels not in MODES:
        raise InputError(
            f"the model reads images of {patches.channels} channels, and files have 1 or 3",
            "use tensors instead of files",
        )
    pixels = read_pixels(file, channels=patches.channels, size=image_size(model))
    return normalise_pixels(pixels, *image_mean_std(model))
