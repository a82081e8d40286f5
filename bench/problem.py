"""One attention to be timed: its sequences, heads, mask and bias, and the tensors that fill it."""

from dataclasses import dataclass
from functools import cached_property

import torch
from einops import rearrange
from jaxtyping import Float
from torch import Tensor

from manyheads.kernels import choose
from manyheads.kernels.contract import Request, TensorFacts, Want
from manyheads.parts.masks import Mask, visible
from manyheads.parts.positions.relative import Bias
from manyheads.ragged import Lengths

__all__ = ["Problem"]

# Pairs looked at in one go while visible ones are counted.
ROWS_TIMES_KEYS = 2**24


@dataclass(frozen=True, kw_only=True)
class Problem:
    """Self-attention over a ragged batch, with random tokens."""

    lengths: tuple[int, ...]
    mask: Mask
    heads: int = 8
    size: int = 64
    bias: Bias | None = None
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    grad: bool = False

    @cached_property
    def tokens(
        self,
    ) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n h d"], Float[Tensor, "n h d"]]:
        """Queries, keys and values."""
        generator = torch.Generator(self.device).manual_seed(0)
        q, k, v = (
            torch.randn(
                sum(self.lengths),
                self.heads,
                self.size,
                generator=generator,
                device=self.device,
                dtype=self.dtype,
            ).requires_grad_(self.grad)
            for _ in range(3)
        )
        return q, k, v

    @cached_property
    def cotangent(self) -> Float[Tensor, "n h d"]:
        """The gradient of some loss by the output."""
        return torch.randn_like(self.tokens[0].detach())

    @cached_property
    def padded(
        self,
    ) -> tuple[Float[Tensor, "b h t d"], Float[Tensor, "b h t d"], Float[Tensor, "b h t d"]]:
        """The same tokens as PyTorch's attention wants them, zeros behind shorter sequences."""
        q, k, v = (self.to_padded(x).detach().requires_grad_(self.grad) for x in self.tokens)
        return q, k, v

    @cached_property
    def padded_cotangent(self) -> Float[Tensor, "b h t d"]:
        return self.to_padded(self.cotangent)

    @cached_property
    def _lengths(self) -> Lengths:
        return Lengths.of(self.lengths, self.device)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @cached_property
    def flops(self) -> float:
        """Products of visible pairs alone, two to score them and two to mix the values."""
        return 4.0 * self.heads * self.size * sum(self._pairs(length) for length in self.lengths)

    def request(self, *, lse: bool = False) -> Request:
        return Request(
            queries=self._lengths,
            keys=self._lengths,
            mask=self.mask,
            scale=self.size**-0.5,
            bias=self.bias,
            want=Want(lse=lse),
        )

    def attend(self, kernel: str = "auto", *, lse: bool = False) -> Float[Tensor, "n h d"]:
        return choose.attend(*self.tokens, self.request(lse=lse), kernel).output

    def chosen(self) -> str:
        """The kernel that "auto" means here."""
        request = self.request()
        return choose.choose(request, TensorFacts.of(*self.tokens, request)).kernel

    def to_padded(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "b h t d"]:
        padded = x.new_zeros(len(self.lengths), self.longest, *x.shape[1:])
        for row, piece in zip(padded, x.detach().split(self.lengths), strict=True):
            row[: piece.shape[0]] = piece
        return rearrange(padded, "b t h d -> b h t d").contiguous()

    def to_packed(self, x: Tensor) -> Float[Tensor, "n h d"]:
        """Drops the padding of a padded answer; leaves a packed one as it is."""
        if x.dim() == 3:
            return x
        return torch.cat(
            [
                rearrange(row, "h t d -> t h d")[:length]
                for row, length in zip(x, self.lengths, strict=True)
            ]
        )

    def _pairs(self, length: int) -> int:
        device, step = torch.device(self.device), max(1, ROWS_TIMES_KEYS // length)
        starts = range(0, length, step)
        rows = (range(start, min(start + step, length)) for start in starts)
        return sum(int(visible(self.mask, each, length, length, device).sum()) for each in rows)
