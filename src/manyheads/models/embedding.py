"""Tokens to vectors: a table of words, and what is added to it."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.parts.norms import NoNorm, Norm, make_norm
from manyheads.parts.positions import EmbeddingPosition, Learned, NoPosition, Sinusoidal
from manyheads.ragged import Ragged


@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A vector a token, times `scale`, plus its position's, plus its type's (BERT's segments)."""

    vocabulary: int
    width: int
    position: EmbeddingPosition = NoPosition()
    types: int = 0
    norm: Norm = NoNorm()
    scale: float = 1.0
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.vocabulary < 1:
            raise ConfigError(f"vocabulary={self.vocabulary} has no token", "use 1 or more")


class TokenEmbedding(nn.Module):
    """The tables of an `Embedding`, with their checks."""

    def __init__(self, config: Embedding) -> None:
        super().__init__()
        self.config = config
        self.tokens = nn.Embedding(config.vocabulary, config.width)
        self.positions: nn.Embedding | None = None
        if isinstance(config.position, Learned):
            self.positions = nn.Embedding(config.position.count, config.width)
        self.types = nn.Embedding(config.types, config.width) if config.types else None
        self.norm = make_norm(config.norm, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self, ids: Ragged, positions: Int[Tensor, " n"], types: Ragged | None = None
    ) -> Ragged:
        if not torch.compiler.is_compiling():
            self._check(ids, positions, types)
        return self.embed(ids, positions, types)

    def embed(
        self, ids: Ragged, positions: Int[Tensor, " n"], types: Ragged | None = None
    ) -> Ragged:
        """Without a look at the numbers, which would wait for the device."""
        x = self.tokens(ids.values)
        x = x if self.config.scale == 1.0 else x * self.config.scale
        x = self._add_position(x, positions)
        if self.types is not None:
            kinds = torch.zeros_like(ids.values) if types is None else types.values
            x = x + self.types(kinds)
        return ids.with_values(self.dropout(self.norm(x)))

    def _add_position(
        self, x: Float[Tensor, "n c"], positions: Int[Tensor, " n"]
    ) -> Float[Tensor, "n c"]:
        match self.config.position:
            case Learned(offset=offset):
                assert self.positions is not None
                return x + self.positions(positions + offset)
            case Sinusoidal() as sinusoidal:
                return x + sinusoidal.vectors(positions, self.config.width).to(x.dtype)
            case _:
                return x

    def _check(self, ids: Ragged, positions: Int[Tensor, " n"], types: Ragged | None) -> None:
        if types is not None and types.lengths.each != ids.lengths.each:
            raise ShapeError(
                f"types come in lengths {types.lengths.each} and ids in {ids.lengths.each}",
                "give every token one type",
            )
        if not ids.values.numel() or ids.values.is_meta:
            return
        _check_range("token id", ids.values, self.config.vocabulary, "vocabulary")
        if types is not None:
            _check_range("type", types.values, self.config.types, "types")
        if isinstance(self.config.position, Learned):
            longest, limit = int(positions.max()) + 1, self.config.position.longest
            if longest > limit:
                raise InputError(
                    f"a sequence of {longest} tokens is longer than the model's {limit} positions",
                    f"cut it to {limit}, or choose a position scheme that extends",
                )


def _check_range(what: str, values: Int[Tensor, " n"], count: int, holder: str) -> None:
    low, high = (int(bound) for bound in values.aminmax())
    if low < 0 or high >= count:
        wrong = low if low < 0 else high
        raise InputError(
            f"{what} {wrong} is outside {holder}={count}",
            f"use ids of 0 to {count - 1}" if count else f"give none, the model has no {holder}",
        )
