"""An image as a report needs it: pixels for the model, a picture for the page, patches by name."""

from base64 import b64encode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import torch
from torch import Tensor

from manyheads.data.habits import grey, image_habits
from manyheads.errors import InputError
from manyheads.models.vision import Vision

__all__ = ["Picture", "read_image"]


@dataclass(frozen=True, slots=True, eq=False)
class Picture:
    """What the page lays weights over: the image as a data address, its rows and columns."""

    address: str
    rows: int
    columns: int
    pixels: Tensor

    @property
    def patches(self) -> list[str]:
        """The class token, then the patches, a row after the other."""
        places = [(row, column) for row in range(self.rows) for column in range(self.columns)]
        return ["class", *(f"row {row} column {column}" for row, column in places)]


def read_image(model: Vision, file: Path) -> Picture:
    """Any image that Pillow reads, brought to the size and the range that the model learnt."""
    from PIL import Image, UnidentifiedImageError

    if not file.is_file():
        raise InputError(f"there is no file {file}", "name an image")
    patches = model.config.patches
    try:
        with Image.open(file) as opened:
            whole = opened.convert("RGB").resize((patches.image, patches.image))
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise InputError(f"{file} is no image", "name a PNG or a JPEG") from None
    written = BytesIO()
    whole.save(written, format="PNG")
    raw = torch.frombuffer(bytearray(whole.tobytes()), dtype=torch.uint8)
    pixels = raw.reshape(patches.image, patches.image, 3).permute(2, 0, 1).float() / 255
    if patches.channels == 1:
        pixels = grey(pixels)
    mean, deviation = image_habits(model, patches.channels)
    weight = next(model.parameters())
    side = patches.image // patches.size
    return Picture(
        address=f"data:image/png;base64,{b64encode(written.getvalue()).decode('ascii')}",
        rows=side,
        columns=side,
        pixels=((pixels - mean) / deviation).contiguous().to(weight.device, weight.dtype),
    )
