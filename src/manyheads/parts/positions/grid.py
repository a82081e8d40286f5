"""Learned positions on a grid of patches, resampled to other resolutions."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import ConfigError

__all__ = ["Grid", "GridTable"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Grid:
    """One vector for each of `rows` x `columns` patches, and one for the class token."""

    rows: int
    columns: int

    def __post_init__(self) -> None:
        if self.rows < 1 or self.columns < 1:
            raise ConfigError(f"a grid of {self.rows} x {self.columns} is empty", "use 1 or more")


class GridTable(nn.Module):
    """The vectors; another grid gets them by bicubic interpolation (arXiv 2010.11929)."""

    def __init__(self, config: Grid, width: int) -> None:
        super().__init__()
        self.config = config
        self.class_token = nn.Parameter(torch.randn(width) * 0.02)
        self.patches = nn.Parameter(torch.randn(config.rows, config.columns, width) * 0.02)

    def forward(self, rows: int, columns: int) -> Float[Tensor, "n c"]:
        """Vectors for the class token, then for the patches row by row."""
        patches = resample(self.patches, rows, columns)
        return torch.cat((self.class_token[None], patches.flatten(0, 1)))


def resample(grid: Float[Tensor, "r q c"], rows: int, columns: int) -> Float[Tensor, "_ _ c"]:
    """The same grid at another resolution, corners not aligned; its own resolution is exact."""
    if grid.shape[:2] == (rows, columns):
        return grid
    image = rearrange(grid, "r q c -> 1 c r q").float()
    resized = F.interpolate(image, size=(rows, columns), mode="bicubic", align_corners=False)
    return rearrange(resized, "1 c r q -> r q c").to(grid.dtype)
