"""The texts or the image of a report: what is measured, and the tokens that the page shows."""

from base64 import b64encode
from collections.abc import Sequence
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

from torch import Tensor

from manyheads.data import images
from manyheads.data.images import image_size
from manyheads.encoding import text_reader
from manyheads.errors import InputError
from manyheads.models import build, vision
from manyheads.tokenizers import token_texts


@dataclass(frozen=True, slots=True, eq=False)
class ReportImage:
    """The image that the page draws weights over, as a data URL, with its grid of patches."""

    url: str
    rows: int
    columns: int
    pixels: Tensor
    registers: int = 0

    @property
    def patches(self) -> list[str]:
        """The class token, registers if there are any, then the patches row by row."""
        places = [(row, column) for row in range(self.rows) for column in range(self.columns)]
        registers = [f"register {index + 1}" for index in range(self.registers)]
        return ["class", *registers, *(f"row {row} column {column}" for row, column in places)]


@dataclass(frozen=True, slots=True, eq=False)
class ReportInput:
    """The texts to measure on, and the ids and the text of the tokens that are shown."""

    measured: tuple[Any, ...]
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    image: ReportImage | None = None

    @property
    def shown(self) -> list[Any]:
        """What the patterns are measured on, as the lens takes it."""
        return [list(self.ids)] if self.image is None else [self.image.pixels]

    def __len__(self) -> int:
        return len(self.tokens)


def check_model(model: build.Model, name: str) -> text_reader.TextReader:
    """Raise an InputError for a model that no report of a text can show."""
    if model.reads_images:
        raise InputError(f"{name} reads images", "pass one with --image")
    if model.reads_pairs:
        raise InputError(
            f"{name} has an encoder and a decoder, and a report shows one stack of layers",
            "use manyheads inspect, which shows the heads of both",
        )
    if model.tokenizer is None:
        raise InputError(f"{name} has no tokenizer", "put a tokenizer.json into its folder")
    return text_reader.require_text_model(model)


def read_text_input(
    model: build.Model, name: str, texts: str | Sequence[str], *, measured: int, shown: int
) -> ReportInput:
    """Take `measured` tokens of the texts, and the first `shown` for the page."""
    reader = check_model(model, name)
    texts = [texts] if isinstance(texts, str) else list(texts)
    text = "\n\n".join(texts)
    if not text.strip():
        raise InputError("the text is empty", "pass one with at least two words")
    limit = text_reader.resolve_max_length(reader, None)
    length = shown if limit is None else min(shown, limit)
    [ids], _ = text_reader.open_reader(reader, [text], length).read(range(1))
    if len(ids) < 2:
        raise InputError(
            f"the text must have at least 2 tokens, got {len(ids)}", "pass a longer one"
        )
    numbers = ids.tolist()
    first, _ = text_reader.first_texts(model.tokenizer, texts, measured)
    pairs = token_texts(model.tokenizer, text, numbers)
    # A letter of several tokens is written at the first of them, bytes at the others.
    tokens = (letters or token for token, letters in pairs)
    return ReportInput(tuple(text_reader.fit_texts(model, first)), tuple(numbers), tuple(tokens))


def read_image(model: vision.Vision, file: Path) -> ReportImage:
    """Read an image file for the model, and once more for the page."""
    pixels = images.read_image(model, file)
    from PIL import Image

    size = image_size(model)
    buffer = BytesIO()
    with Image.open(file) as opened:
        opened.convert("RGB").resize((size, size)).save(buffer, format="PNG")
    weight = next(model.parameters())
    side = size // model.config.patches.size
    return ReportImage(
        url=f"data:image/png;base64,{b64encode(buffer.getvalue()).decode('ascii')}",
        rows=side,
        columns=side,
        pixels=pixels.to(weight.device, weight.dtype),
        registers=model.config.patches.registers,
    )


def read_image_input(model: build.Model, name: str, file: Path) -> ReportInput:
    """Read one image; its patches take the place of tokens."""
    if not isinstance(model, vision.Vision):
        raise InputError(f"{name} does not read images", "pass a text with --text or --file")
    image = read_image(model, file)
    return ReportInput((image.pixels,), (), tuple(image.patches), image)
