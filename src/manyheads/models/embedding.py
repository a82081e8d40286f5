"""Token embeddings, with positions and token types."""

import itertools
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.parts.norms import NoNorm, Norm, make_norm
from manyheads.parts.positions import Axial, EmbeddingPosition, Learned, NoPosition, Sinusoidal
from manyheads.parts.positions.absolute import AxialTable
from manyheads.ragged import Ragged


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Embedding:
    """A vector per token, times `scale`, plus those of its position and type (BERT's segments).

    If `round_scale`, the scale is first rounded to the dtype of the vectors, as in Gemma. With
    `projected` a linear layer follows the norm, as in FNet; then the vectors may have another
    `table_width` than the model, as in ALBERT (arXiv 1909.11942).
    """

    vocabulary: PositiveInt
    width: PositiveInt
    position: EmbeddingPosition = NoPosition()
    types: NonNegativeInt = 0
    norm: Norm = NoNorm()
    scale: float = 1.0
    round_scale: bool = False
    projected: bool = False
    table_width: PositiveInt | Literal["same"] = "same"
    dropout: float = 0.0

    def __post_init__(self) -> None:
        if self.size != self.width and not self.projected:
            raise ConfigError(
                f"vectors of table_width={self.table_width} do not have the width {self.width}",
                "set projected=True",
            )
        at = self.position
        if isinstance(at, Axial) and at.row_size + at.column_size != self.size:
            raise ConfigError(
                f"{at.row_size} channels of rows and {at.column_size} of columns do not make the "
                f"{self.size} of a token",
                "make row_size + column_size equal to the width",
            )

    @property
    def size(self) -> int:
        """Channels of the vectors in the tables."""
        return self.width if self.table_width == "same" else self.table_width


def _table(rows: int, size: int) -> nn.Embedding:
    """An embedding, drawn as torch does.

    On the meta device there is nothing to draw, and torch would load its compiler for it.
    """
    if torch.get_default_device().type == "meta":
        return nn.Embedding(rows, size, _weight=torch.empty(rows, size))
    return nn.Embedding(rows, size)


class TokenEmbedding(nn.Module):
    """The tables of an `Embedding`, with checks of the ids."""

    def __init__(self, config: Embedding) -> None:
        super().__init__()
        self.config = config
        self.tokens = _table(config.vocabulary, config.size)
        self.positions: nn.Embedding | None = None
        if isinstance(config.position, Learned):
            self.positions = _table(config.position.count, config.size)
        self.axial = AxialTable(config.position) if isinstance(config.position, Axial) else None
        self.types = _table(config.types, config.size) if config.types else None
        self.norm = make_norm(config.norm, config.size)
        self.project = nn.Linear(config.size, config.width) if config.projected else None
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
        """Without checking the ids, which would wait for the device."""
        (_, x), *added = self.vectors(ids, positions, types)
        for _, vectors in added:
            x = x + vectors
        return ids.with_values(self.dropout(self.finished(x)))

    def vectors(
        self, ids: Ragged, positions: Int[Tensor, " n"], types: Ragged | None = None
    ) -> list[tuple[str, Float[Tensor, "n e"]]]:
        """The vectors that are summed, by what they are of: "token", "position", "type"."""
        x = self.scaled(self.tokens(ids.values))
        vectors = [("token", x)]
        match self.config.position:
            case Learned(offset=offset):
                assert self.positions is not None
                vectors.append(("position", self.positions(positions + offset)))
            case Axial():
                assert self.axial is not None
                vectors.append(("position", self.axial(positions)))
            case Sinusoidal() as sinusoidal:
                own = sinusoidal.vectors(positions, self.config.size).to(x.dtype)
                vectors.append(("position", own))
        if self.types is not None:
            type_ids = torch.zeros_like(ids.values) if types is None else types.values
            vectors.append(("type", self.types(type_ids)))
        return vectors

    def finished(self, x: Float[Tensor, "n e"]) -> Float[Tensor, "n c"]:
        """What still happens to the sum of vectors: the norm, and a projection if there is one."""
        normed: Tensor = self.norm(x)
        return normed if self.project is None else self.project(normed)

    def scaled(self, x: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        scale = self.config.scale
        if scale == 1.0:
            return x
        # Made on the device: a copy from the host would wait for it.
        return x * (torch.full_like(x[:1, :1], scale) if self.config.round_scale else scale)

    def _check(self, ids: Ragged, positions: Int[Tensor, " n"], types: Ragged | None) -> None:
        if types is not None and types.lengths.each != ids.lengths.each:
            raise ShapeError(
                f"types have lengths {types.lengths.each}, and ids {ids.lengths.each}",
                "give one type per token",
            )
        if ids.values.dtype not in (torch.int64, torch.int32):
            remedy = "convert them with .long()"
            raise InputError(f"token ids must be integers, got {ids.values.dtype}", remedy)
        home = next(itertools.chain(self.tokens.parameters(), self.tokens.buffers())).device
        if ids.device != home:
            raise InputError(
                f"the token ids are on {ids.device}, and the model is on {home}",
                f'move them with .to("{home}")',
            )
        if not ids.values.numel() or ids.values.is_meta:
            return
        _check_range("token id", ids.values, self.config.vocabulary, "vocabulary")
        if types is not None:
            _check_range("type", types.values, self.config.types, "types")
        if isinstance(self.config.position, Learned | Axial):
            longest, limit = int(positions.max()) + 1, self.config.position.longest
            if longest > limit:
                raise InputError(
                    f"a sequence of {longest} tokens is longer than the model's {limit} positions",
                    f"truncate it to {limit}, or use a model without learned positions",
                )


def _check_range(name: str, values: Int[Tensor, " n"], count: int, table: str) -> None:
    low, high = (int(bound) for bound in values.aminmax())
    if low < 0 or high >= count:
        worst, remedy = low if low < 0 else high, f"use ids of 0 to {count - 1}"
        if not count:
            remedy = f"leave them out, the model has no {table}"
        raise InputError(f"{name} {worst} is outside {table}={count}", remedy)
