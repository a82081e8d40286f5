"""Absolute positions: learned, sinusoidal, a learned grid for images, or none."""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Learned:
    """A table of `count` vectors; the first token takes number `offset` (2 in RoBERTa)."""

    count: int
    offset: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.offset < self.count:
            raise ConfigError(f"offset must be in 0 to {self.count - 1}, got {self.offset}")

    @property
    def longest(self) -> int:
        """The longest sequence that has a vector for every token."""
        return self.count - self.offset


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Axial:
    """A vector per row and one per column of a table in which positions are laid out row by row.

    The vectors of a position are joined: `row_size` channels and `column_size` channels. So
    `rows` * `columns` positions need only `rows` + `columns` vectors (arXiv 2001.04451).
    """

    rows: PositiveInt
    columns: PositiveInt
    row_size: PositiveInt
    column_size: PositiveInt

    @property
    def longest(self) -> int:
        """The longest sequence that has a vector for every token."""
        return self.rows * self.columns


class AxialTable(nn.Module):
    """The vectors of rows and columns."""

    def __init__(self, config: Axial) -> None:
        super().__init__()
        self.config = config
        self.rows = nn.Embedding(config.rows, config.row_size)
        self.columns = nn.Embedding(config.columns, config.column_size)

    def forward(self, positions: Int[Tensor, " n"]) -> Float[Tensor, "n c"]:
        row = positions.div(self.config.columns, rounding_mode="floor")
        column = positions % self.config.columns
        return torch.cat((self.rows(row), self.columns(column)), dim=-1)


@check_fields
@dataclass(frozen=True, slots=True)
class NoPosition:
    """No positions."""


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Sinusoidal:
    """Position p becomes sin(p / theta^(2i/c)) and cos of the same.

    `interleaved` alternates sine and cosine as the paper does; `halves` puts all sines first, as
    Marian does.

    >>> Sinusoidal().vectors(torch.tensor([0]), 4).tolist()
    [[0.0, 1.0, 0.0, 1.0]]
    >>> Sinusoidal(layout="halves").vectors(torch.tensor([0]), 4).tolist()
    [[0.0, 0.0, 1.0, 1.0]]
    """

    layout: Literal["interleaved", "halves"] = "interleaved"
    theta: float = 10_000.0

    def vectors(self, positions: Int[Tensor, " n"], width: int) -> Float[Tensor, "n c"]:
        if width % 2:
            raise ConfigError(f"width must be even for pairs of sine and cosine, got {width}")
        channel = torch.arange(0, width, 2, device=positions.device, dtype=torch.float64)
        angles = positions.unsqueeze(1) * self.theta ** (-channel / width)
        pair = (angles.sin().float(), angles.cos().float())
        if self.layout == "halves":
            return torch.cat(pair, dim=1)
        return torch.stack(pair, dim=2).flatten(1)


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LearnedGrid:
    """One vector for each of `rows` x `columns` patches, and one for the class token.

    Other grids are interpolated, smaller ones with a wider filter if `antialias`.
    """

    rows: PositiveInt
    columns: PositiveInt
    antialias: bool = False


class GridTable(nn.Module):
    """The vectors; for another grid they are interpolated bicubically (arXiv 2010.11929)."""

    def __init__(self, config: LearnedGrid, width: int) -> None:
        super().__init__()
        self.config = config
        self.class_token = nn.Parameter(torch.randn(width) * 0.02)
        self.patches = nn.Parameter(torch.randn(config.rows, config.columns, width) * 0.02)

    def forward(self, rows: int, columns: int) -> Float[Tensor, "n c"]:
        """Vectors for the class token, then for the patches row by row."""
        patches = resample(self.patches, rows, columns, antialias=self.config.antialias)
        return torch.cat((self.class_token[None], patches.flatten(0, 1)))


def resample(
    grid: Float[Tensor, "r q c"], rows: int, columns: int, *, antialias: bool = False
) -> Float[Tensor, "_ _ c"]:
    """The grid at another resolution, without aligned corners; at its own it is exact."""
    if grid.shape[:2] == (rows, columns):
        return grid
    image = rearrange(grid, "r q c -> 1 c r q").float()
    resized = F.interpolate(
        image, size=(rows, columns), mode="bicubic", align_corners=False, antialias=antialias
    )
    return rearrange(resized, "1 c r q -> r q c").to(grid.dtype)
