"""An image file as a model reads it: its size, its colours, its range."""

from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from manyheads.data.habits import image_range, image_size
from manyheads.data.images import MODES, SUFFIXES, read_pixels, scaled
from manyheads.errors import InputError
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
    patches = model.config.patches
    if patches.channels not in MODES:
        raise InputError(
            f"the model reads images of {patches.channels} channels and a file has 1 or 3",
            "give it tensors of its own",
        )
    pixels = read_pixels(file, channels=patches.channels, size=image_size(model))
    return scaled(pixels, *image_range(model))
