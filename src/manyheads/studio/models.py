"""The models of a studio by name, with their inputs and outputs as text."""

import re
from collections.abc import Collection, Sequence
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from manyheads.data.images import image_normalization, image_size, to_grayscale
from manyheads.data.masking import MASK_NAMES
from manyheads.decoding.request import check_generates
from manyheads.encoding.text_reader import open_reader, require_text_model, resolve_max_length
from manyheads.errors import InputError, ManyheadsError
from manyheads.lens.measure.statistics import check_heads
from manyheads.lens.results.addresses import blocks_of
from manyheads.models.build import Model
from manyheads.models.model_interface import ModelInputs, PredictedOutput
from manyheads.models.non_finite_weights import describe_not_finite
from manyheads.models.vision import Vision
from manyheads.parts.positions import Axial, Learned
from manyheads.ragged import Ragged
from manyheads.studio.examples import ABOUT, SELECTED, examples_for
from manyheads.studio.requests import LIMITS, RawImage
from manyheads.tokenizers import token_text, token_texts

# A mask as people type it.
TYPED_MASK = re.compile("|".join(map(re.escape, MASK_NAMES)), re.IGNORECASE)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class StudioInput:
    """A text or an image as the model reads it, and its tokens as text."""

    inputs: ModelInputs
    tokens: tuple[str, ...]
    key: tuple[Any, ...]
    truncated: bool = False
    # The letters of the text that begin in each token, see `token_texts`.
    letters: tuple[str | None, ...] | None = None
    # The token to select at first.
    start: int = 0
    # What the page should say about how the text was read.
    note: str = ""

    def __len__(self) -> int:
        return len(self.tokens)

    def truncate(self, max_tokens: int) -> "StudioInput":
        """The first tokens of a text; images are never that long."""
        if self.inputs.ids is None or len(self) <= max_tokens:
            return self
        ids = Ragged.from_list([self.inputs.ids.values[:max_tokens]])
        return StudioInput(
            inputs=ModelInputs(ids=ids),
            tokens=self.tokens[:max_tokens],
            key=(*self.key, max_tokens),
        )


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """One model with its name on the page."""

    name: str
    model: Model

    @property
    def output(self) -> PredictedOutput:
        return self.model.predicted_output

    @property
    def generates(self) -> bool:
        """Whether it can continue a text."""
        try:
            check_generates(self.model)
        except ManyheadsError:
            return False
        return True

    @property
    def max_tokens(self) -> int:
        """The longest text that it can read here."""
        if self.model.reads_images:
            return LIMITS.tokens
        position = require_text_model(self.model).config.embedding.position
        longest = position.longest if isinstance(position, Learned | Axial) else LIMITS.tokens
        return min(longest, LIMITS.tokens)

    @property
    def trained_tokens(self) -> int | None:
        """The length that it was trained on, if known; some models can read longer texts."""
        if self.model.reads_images:
            return None
        reader = require_text_model(self.model)
        return reader.trained_length or resolve_max_length(reader, None)

    @property
    def parameters(self) -> int:
        return sum(weight.numel() for weight in self.model.parameters())

    def describe(self) -> dict[str, Any]:
        """What the page needs to know before its first request."""
        model = self.model
        description: dict[str, Any] = {
            "name": self.name,
            "about": ABOUT.get(self.name, ""),
            "input": "image" if model.reads_images else "text",
            "output": self.output,
            "generates": self.generates,
            "parameters": self.parameters,
            "layers": [{"layer": block.layer, "heads": block.heads} for block in blocks_of(model)],
            "max_tokens": self.max_tokens,
            "trained_tokens": self.trained_tokens,
            "warning": describe_not_finite(model),
        }
        if isinstance(model, Vision):
            patches = model.config.patches
            description["image"] = {
                "side": image_size(model),
                "patch": patches.size,
                "registers": patches.registers,
            }
        else:
            examples = examples_for(self.name, self.output, self.mask, self.count_tokens)
            description["examples"] = [asdict(example) for example in examples]
        return description

    def count_tokens(self, text: str) -> int:
        """The number of tokens of a text, at most `max_tokens`."""
        return len(self._tokenize(self._with_mask(text)[0])[0])

    def read_text(self, text: str) -> StudioInput:
        """Tokenize a text, truncated to `max_tokens`."""
        written, note = self._with_mask(text)
        numbers, truncated = self._tokenize(written)
        if not numbers:
            raise InputError("the text is empty", "type at least one character")
        inputs = ModelInputs(ids=Ragged.from_list([torch.tensor(numbers)]).to(self._device))
        tokens, letters = zip(*token_texts(self.model.tokenizer, written, numbers), strict=True)
        return StudioInput(
            inputs=inputs,
            tokens=tokens,
            key=("text", self.name, *numbers),
            truncated=truncated,
            letters=letters,
            start=self._start(text, numbers, letters),
            note=note,
        )

    def read_image(self, image: RawImage) -> StudioInput:
        """Split an image into patches, after the class token."""
        if not isinstance(self.model, Vision):
            raise InputError(f"{self.name} reads text, not images", "type a text")
        config = self.model.config.patches
        size = config.size
        if image.width % size or image.height % size:
            raise InputError(
                f"the image has {image.width} x {image.height} pixels",
                f"use multiples of the patch size, {size}",
            )
        rows, columns = image.height // size, image.width // size
        if rows * columns >= LIMITS.tokens:
            raise InputError(
                f"the image has {rows * columns:,} patches, too many", "make it smaller"
            )
        raw = np.frombuffer(image.data, dtype=np.uint8).astype(np.float32) / 255
        pixels = torch.from_numpy(raw.reshape(image.height, image.width, 3).transpose(2, 0, 1))
        if config.channels == 1:
            pixels = to_grayscale(pixels)
        mean, std = image_normalization(self.model, config.channels)
        scaled = ((pixels - mean) / std).contiguous().to(self._device)
        registers = [f"[register {index + 1}]" for index in range(config.registers)]
        places = product(range(1, rows + 1), range(1, columns + 1))
        patches = [f"row {row}, column {column}" for row, column in places]
        return StudioInput(
            inputs=ModelInputs(images=(scaled,)),
            tokens=("[class]", *registers, *patches),
            key=("image", self.name, image.width, image.height, image.data),
        )

    def output_text(self, number: int) -> str:
        """The text of a token, or the name of a class."""
        if self.output in ("classes", "token classes"):
            names = (self.model.source_config or {}).get("id2label") or {}
            return str(names.get(str(number), names.get(number, f"class {number}")))
        return token_text(self.model.tokenizer, number)

    def _tokenize(self, text: str) -> tuple[list[int], bool]:
        """The ids of a text up to `max_tokens`, and whether there are more."""
        if self.model.reads_images:
            raise InputError(f"{self.name} reads images, not text", "choose an image")
        reader = open_reader(require_text_model(self.model), [text], self.max_tokens)
        [ids], truncated = reader.read(range(1))
        return ids.tolist(), bool(truncated)

    def _with_mask(self, text: str) -> tuple[str, str]:
        """A text with the model's own mask, however it was typed, and what was changed."""
        mask = self.mask if self.output == "masked token" else None
        if mask is None:
            return text, ""
        text = TYPED_MASK.sub(mask, text)
        # Tokens that begin with their space leave the one before a mask alone.
        closed = text.replace(f" {mask}", mask)
        if len(self._tokenize(closed)[0]) >= len(self._tokenize(text)[0]):
            return text, ""
        return closed, (
            f"The space before {mask} is left out, because the tokens of this model begin with "
            "their space."
        )

    def _start(self, text: str, ids: list[int], letters: Sequence[str | None]) -> int:
        """The mask or the word of an example; else the last token of the text, or the very last."""
        if self.output == "masked token" and self.mask is not None:
            mask = self.model.tokenizer.token_to_id(self.mask)
            if mask in ids:
                return ids.index(mask)
        if self.output != "next token":
            own = [position for position, letter in enumerate(letters) if letter is not None]
            words = [place for place in own if (letters[place] or "").strip() == SELECTED.get(text)]
            return (words or own or [len(ids) - 1])[-1]
        return len(ids) - 1

    @property
    def mask(self) -> str | None:
        """The name of the mask token, if the tokenizer has one."""
        tokenizer = self.model.tokenizer
        return next((name for name in MASK_NAMES if tokenizer.token_to_id(name) is not None), None)

    @property
    def _device(self) -> torch.device:
        return next(self.model.parameters()).device


class ModelStore:
    """The models that the studio was started with; no request can add one."""

    def __init__(self, models: Sequence[tuple[str, Model]]) -> None:
        if not models:
            raise InputError("the studio needs at least one model", "pass a folder or a name")
        self.models: dict[str, LoadedModel] = {}
        for name, model in models:
            check_model(name, model)
            unique = unique_name(name, self.models)
            self.models[unique] = LoadedModel(unique, model)

    def __getitem__(self, name: str) -> LoadedModel:
        if name not in self.models:
            raise InputError(f"there is no model {name[:80]!r}", f"use {', '.join(self.models)}")
        return self.models[name]


def last_part(path: str) -> str:
    """The name of a model or an index on the page: the last part of its path or address.

    >>> last_part("runs/tiny/"), last_part("org/model"), last_part("house-gpt")
    ('tiny', 'model', 'house-gpt')
    >>> last_part("notes/my.index/"), last_part("s3://bucket/docs")
    ('my.index', 'docs')
    """
    return path.replace("\\", "/").rstrip("/").rpartition("/")[2] or path


def check_model(name: str, model: Model) -> None:
    """Refuse a model that the studio cannot show."""
    if model.reads_pairs:
        raise InputError(
            f"{name} has an encoder and a decoder, and the studio shows one stack of layers",
            "use manyheads inspect, which shows the heads of both",
        )
    check_heads(model)
    if not model.reads_images and model.tokenizer is None:
        raise InputError(f"{name} has no tokenizer", "put a tokenizer.json into its folder")


def unique_name(name: str, names: Collection[str]) -> str:
    """Two folders may have the same last part.

    >>> unique_name("tiny", {"tiny"})
    'tiny (2)'
    """
    unique, count = name, 2
    while unique in names:
        unique, count = f"{name} ({count})", count + 1
    return unique
