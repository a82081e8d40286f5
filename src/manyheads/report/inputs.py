"""The texts, pairs or image of a report: what is measured, and the tokens that the page shows."""

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
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models import build, vision
from manyheads.tokenizers import token_text, token_texts


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
    """The texts to measure on, and the ids and the text of the tokens that are shown.

    Of an encoder-decoder, `ids` and `tokens` are the decoder's; the encoder reads the source.
    """

    measured: tuple[Any, ...]
    ids: tuple[int, ...]
    tokens: tuple[str, ...]
    image: ReportImage | None = None
    source_ids: tuple[int, ...] = ()
    source_tokens: tuple[str, ...] = ()

    @property
    def shown(self) -> list[Any]:
        """What the patterns are measured on, as the lens takes it."""
        if self.image is not None:
            return [self.image.pixels]
        ids = list(self.ids)
        return [(list(self.source_ids), ids)] if self.source_ids else [ids]

    def tokens_of(self, stack: str) -> tuple[str, ...]:
        """The tokens that the heads of a stack look from."""
        return self.source_tokens if self.source_ids and stack == "encoder" else self.tokens

    def __len__(self) -> int:
        return len(self.tokens)


def check_model(model: build.Model, name: str) -> text_reader.TextReader:
    """Raise an InputError for a model that no report of a text can show."""
    if model.reads_images:
        raise InputError(f"{name} reads images", "pass one with --image")
    if not model.reads_token_ids:
        raise InputError(
            f"{name} reads more than texts", "use manyheads inspect, which reads sounds too"
        )
    if model.tokenizer is None:
        raise InputError(f"{name} has no tokenizer", "put a tokenizer.json into its folder")
    return text_reader.require_text_model(model)


def read_text_input(
    model: build.Model,
    name: str,
    texts: str | Sequence[str] | Sequence[tuple[str, str]],
    *,
    measured: int,
    shown: int,
) -> ReportInput:
    """Take `measured` tokens of the texts, and the first `shown` for the page.

    Of the (source, target) pairs of an encoder-decoder the page shows the first.
    """
    reader = check_model(model, name)
    listed: list[Any] = [texts] if isinstance(texts, str) else list(texts)
    pairs = [text for text in listed if not isinstance(text, str)]
    if model.reads_pairs and len(pairs) < len(listed):
        raise InputError(
            f"{name} has an encoder and a decoder", "pass (source, target) pairs of texts"
        )
    if not "".join("".join(text) for text in listed).strip():
        raise InputError("the text is empty", "pass one with at least two words")
    limit = text_reader.resolve_max_length(reader, None)
    length = shown if limit is None else min(shown, limit)
    first, _ = text_reader.first_texts(model.tokenizer, listed, measured)
    fitting = tuple(text_reader.fit_texts(model, first))
    if pairs:
        return _read_pair(model, fitting, length)
    text = "\n\n".join(listed)
    [ids], _ = text_reader.open_reader(reader, [text], length).read(range(1))
    if len(ids) < 2:
        raise InputError(
            f"the text must have at least 2 tokens, got {len(ids)}", "pass a longer one"
        )
    numbers = ids.tolist()
    return ReportInput(fitting, tuple(numbers), _tokens(model, text, numbers))


def _read_pair(model: build.Model, pairs: tuple[Any, ...], length: int) -> ReportInput:
    """The first pair for the page; the decoder's tokens begin with its start token."""
    source, target = pairs[0]
    inputs = read_inputs(model, [(source, target)], length)
    assert inputs.source is not None, "the model reads pairs"
    assert inputs.ids is not None, "the model reads pairs"
    read, (start, *written) = inputs.source.values.tolist(), inputs.ids.values.tolist()
    tokens = (token_text(model.tokenizer, start), *_tokens(model, target, written))
    return ReportInput(
        pairs,
        (start, *written),
        tokens,
        source_ids=tuple(read),
        source_tokens=_tokens(model, source, read),
    )


def _tokens(model: build.Model, text: str, ids: list[int]) -> tuple[str, ...]:
    """Tokens as text: a letter of several tokens is at the first of them, bytes at the others."""
    return tuple(letters or token for token, letters in token_texts(model.tokenizer, text, ids))


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
