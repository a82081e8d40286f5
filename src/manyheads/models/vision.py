"""Vision transformers: images as sequences of patches."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.models.initialization import Initialization, initialize
from manyheads.models.model_interface import ModelInputs, ModelInterface
from manyheads.models.padding import BatchLayout, Output
from manyheads.models.readout import NoReadout, Readout, make_readout
from manyheads.models.stack import KernelChoices, Stack, StackConfig
from manyheads.parts.positions.absolute import GridTable, LearnedGrid
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher

Images = Tensor | Sequence[Tensor]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Patches:
    """Images of `image` pixels per side, divided into squares of `size` by a convolution.

    `registers` are learned tokens without a position between the class token and the patches
    (arXiv 2309.16588). `antialias` is how positions are interpolated for smaller images.
    """

    width: PositiveInt
    image: PositiveInt = 224
    size: PositiveInt = 16
    channels: PositiveInt = 3
    registers: NonNegativeInt = 0
    antialias: bool = False
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.image % self.size:
            raise ConfigError(
                f"image={self.image} is not a multiple of the patch size={self.size}",
                f"use {self.image // self.size * self.size} or "
                f"{(self.image // self.size + 1) * self.size}",
            )

    @property
    def grid(self) -> LearnedGrid:
        side = self.image // self.size
        return LearnedGrid(rows=side, columns=side, antialias=self.antialias)


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The config of a vision transformer (arXiv 2010.11929)."""

    patches: Patches
    stack: StackConfig
    readout: Readout = NoReadout()
    init: Initialization = Initialization()

    def __post_init__(self) -> None:
        if self.patches.width != self.stack.width:
            raise ConfigError(
                f"the patches have width {self.patches.width}, and the stack {self.stack.width}",
                "give both the same width",
            )


class PatchEmbedding(nn.Module):
    """Patches to vectors, with a class token in front and positions added."""

    def __init__(self, config: Patches) -> None:
        super().__init__()
        self.config = config
        size = config.size
        self.convolution = nn.Conv2d(config.channels, config.width, kernel_size=size, stride=size)
        self.class_token = nn.Parameter(torch.zeros(config.width))
        registers = torch.zeros(config.registers, config.width)
        self.registers = nn.Parameter(registers) if config.registers else None
        self.positions = GridTable(config.grid, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, images: Float[Tensor, "b channels y x"]) -> Float[Tensor, "b n c"]:
        self._check(images)
        patches = self.convolution(images.to(self.convolution.weight.dtype))
        rows, columns = patches.shape[2:]
        tokens = rearrange(patches, "b c y x -> b (y x) c")
        first = self.class_token.expand(images.shape[0], 1, -1)
        embedded = torch.cat((first, tokens), dim=1) + self.positions(rows, columns)
        if self.registers is not None:
            registers = self.registers.expand(images.shape[0], -1, -1)
            embedded = torch.cat((embedded[:, :1], registers, embedded[:, 1:]), dim=1)
        return self.dropout(embedded)

    def _check(self, images: Float[Tensor, "b channels y x"]) -> None:
        channels, height, width = images.shape[1:]
        size = self.config.size
        if channels != self.config.channels:
            raise ShapeError(f"an image must have {self.config.channels} channels, got {channels}")
        if height % size or width % size or not height or not width:
            nearest = (max(height // size, 1) * size, max(width // size, 1) * size)
            raise InputError(
                f"an image of {height} x {width} is not a multiple of the patch size {size}",
                f"resize or crop it, for example to {nearest[0]} x {nearest[1]}",
            )


class Vision(ModelInterface):
    """A model that reads images: one (batch, channels, y, x) tensor, or a list of any sizes.

    A list gives ragged hidden states, a tensor rectangular ones; the class token comes first.
    """

    reads_images = True

    def __init__(self, config: VisionConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = PatchEmbedding(config.patches)
        self.stack = Stack(config.stack)
        self.readout = make_readout(config.readout, config.stack.width)
        initialize(self, config.init)

    def forward(self, images: Images, *, watch: Watcher | None = None) -> Output:
        batch, layout = self._to_ragged(images)
        hidden, router = self.stack(batch, watch=watch)
        return layout.output(hidden, self._read(hidden), router)

    def stacks(self) -> dict[str, Stack]:
        return {self.stack.name: self.stack}

    def run_inputs(self, inputs: ModelInputs, watch: Watcher | None = None) -> Output:
        return self(list(inputs.images), watch=watch)

    def image_tokens(self, image: Tensor) -> int:
        side = self.config.patches.size
        return 1 + (image.shape[1] // side) * (image.shape[2] // side)

    def explain_kernels(self, images: Images) -> KernelChoices:
        """Which kernel each layer would use for these images, and why."""
        with torch.no_grad():
            lengths = self._to_ragged(images)[0].lengths
        return self.stack.explain_kernels(lengths)

    def _to_ragged(self, images: Images) -> tuple[Ragged, BatchLayout]:
        if isinstance(images, Tensor):
            if images.dim() != 4:
                raise ShapeError(
                    f"images have shape {tuple(images.shape)}",
                    "give (batch, channels, height, width), or a list of (channels, height, width)",
                )
            tokens = self.embedding(images)
            batch, count = tokens.shape[:2]
            lengths = Lengths.of([count] * batch, tokens.device)
            return Ragged(tokens.flatten(0, 1), lengths), BatchLayout((batch, count))
        if not images:
            raise InputError("the list of images is empty", "give at least one")
        return Ragged.from_list(self._embed_each(images)), BatchLayout()

    def _embed_each(self, images: Sequence[Tensor]) -> list[Tensor]:
        """Images of one size are embedded together."""
        by_shape: dict[tuple[int, ...], list[int]] = {}
        for index, image in enumerate(images):
            if image.dim() != 3:
                raise ShapeError(
                    f"image {index} has shape {tuple(image.shape)}",
                    "give (channels, height, width)",
                )
            by_shape.setdefault(tuple(image.shape), []).append(index)
        embedded: dict[int, Tensor] = {}
        for indices in by_shape.values():
            tokens = self.embedding(torch.stack([images[index] for index in indices]))
            embedded |= dict(zip(indices, tokens, strict=True))
        return [embedded[index] for index in range(len(images))]
