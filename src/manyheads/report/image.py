"""An image as a report needs it: pixels for the model, a picture for the page, patches by name."""

from base64 import b64encode
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

from torch import Tensor

from manyheads.data import image_preprocessing as image_files
from manyheads.data.image_preprocessing import image_size
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
    """An image file as the model reads it, and as people see it."""
    pixels = image_files.read_image(model, file)
    from PIL import Image

    size = image_size(model)
    written = BytesIO()
    with Image.open(file) as opened:
        opened.convert("RGB").resize((size, size)).save(written, format="PNG")
    weight = next(model.parameters())
    side = size // model.config.patches.size
    return Picture(
        address=f"data:image/png;base64,{b64encode(written.getvalue()).decode('ascii')}",
        rows=side,
        columns=side,
        pixels=pixels.to(weight.device, weight.dtype),
    )
