"""The range that a model's images are brought to, as its preprocessor_config.json says."""

import json
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.images import MODES, SUFFIXES, ByChannel, read_pixels, scaled
from manyheads.errors import InputError
from manyheads.models.vision import Vision

FILE = "preprocessor_config.json"
BICUBIC = 3
# How bright red, green and blue are (ITU-R 601), as Pillow reads a coloured image as a grey one.
BRIGHTNESS = (0.299, 0.587, 0.114)


def grey(image: Float[Tensor, "3 height width"]) -> Float[Tensor, "1 height width"]:
    """A coloured image as training reads it for a model of one channel."""
    weights = torch.tensor(BRIGHTNESS, dtype=image.dtype, device=image.device)
    return (image * weights.reshape(-1, 1, 1)).sum(0, keepdim=True)


def image_habits(model: Vision, channels: int) -> tuple[Tensor, Tensor]:
    """The mean and the deviation a channel; a half of each where nothing is said."""
    said = json.loads(model.side_files.get(FILE, b"{}"))
    found = []
    for name in ("image_mean", "image_std"):
        value = said.get(name) or [0.5] * channels
        found.append(torch.tensor(value, dtype=torch.float32)[:channels].reshape(-1, 1, 1))
    return found[0], found[1]


def image_range(model: Vision) -> tuple[ByChannel, ByChannel]:
    """The same as numbers: one where all channels are alike."""
    mean, deviation = map(_numbers, image_habits(model, model.config.patches.channels))
    return mean, deviation


def _numbers(by_channel: Tensor) -> ByChannel:
    """Without what single precision put behind the sixth digit."""
    found = tuple(round(each, 6) for each in by_channel.flatten().tolist())
    return found[0] if len(set(found)) == 1 else found


def image_size(model: Vision) -> int:
    """Pixels a side of what it learnt from; its patches are made for another size perhaps.

    Where larger images are cropped, what is left is what they are made for.
    """
    said = json.loads(model.side_files.get(FILE, b"{}"))
    size = said.get("size")
    side = size.get("height") if isinstance(size, dict) else None
    if side is None or side != size.get("width") or said.get("do_center_crop"):
        return model.config.patches.image
    return int(side)


def tell_image_habits(
    model: Vision, mean: ByChannel, std: ByChannel, size: int | None = None
) -> None:
    """Write down how images were made numbers, for us and for `transformers`.

    What the model says besides, of cropping for example, stays.
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
    said = json.loads(model.side_files.get(FILE, b"{}"))
    now: dict[str, Any] = {"image_mean": _listed(mean, model), "image_std": _listed(std, model)}
    if size is not None:
        now["size"] = _square(size)
    told = json.dumps({**usual, **said, **now}, indent=2).encode()
    model.side_files = {**model.side_files, FILE: told}


def _square(side: int) -> dict[str, int]:
    return {"height": side, "width": side}


def _listed(given: ByChannel, model: Vision) -> list[float]:
    return list(given) if isinstance(given, tuple) else [given] * model.config.patches.channels


def images_in(path: Path) -> list[Path]:
    """The file itself, or all images in a folder and those within it."""
    if not path.is_dir():
        return [path]
    found = [each for each in sorted(path.rglob("*")) if each.suffix.lower() in SUFFIXES]
    if not found:
        raise InputError(f"{path} holds no image", f"lay {', '.join(SUFFIXES[:3])} files there")
    return found


def read_image(model: Vision, file: Path) -> Float[Tensor, "channels height width"]:
    """Any image that Pillow reads, brought to the size and the range that the model learnt."""
    patches = model.config.patches
    if patches.channels not in MODES:
        raise InputError(
            f"the model reads images of {patches.channels} channels and a file has 1 or 3",
            "give it tensors of its own",
        )
    pixels = read_pixels(file, channels=patches.channels, size=image_size(model))
    return scaled(pixels, *image_range(model))
