"""An image file as a model reads it: its size, its colours, its range."""

from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.data.habits import image_habits
from manyheads.data.images import MODES, SUFFIXES
from manyheads.errors import InputError, MissingExtraError
from manyheads.models.vision import Vision

__all__ = ["images_in", "read_image"]


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
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingExtraError(f"{file} needs the package pillow", "pip install pillow") from None
    if not file.is_file():
        raise InputError(f"there is no file {file}", "name an image")
    patches = model.config.patches
    if patches.channels not in MODES:
        raise InputError(
            f"the model reads images of {patches.channels} channels and a file has 1 or 3",
            "give it tensors of its own",
        )
    size = (patches.image, patches.image)
    try:
        with Image.open(file) as stored:
            image = stored.convert(MODES[patches.channels]).resize(size, Image.Resampling.BICUBIC)
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise InputError(f"{file} is no image", "name a PNG or a JPEG") from None
    except OSError as error:
        raise InputError(f"{file} is a broken image ({error})", "name another") from None
    pixels = torch.from_numpy(np.array(image, dtype=np.float32)).reshape(*size, -1) / 255
    mean, deviation = image_habits(model, patches.channels)
    return ((pixels.permute(2, 0, 1) - mean) / deviation).contiguous()
