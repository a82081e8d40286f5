"""DeBERTa's disentangled attention: content meets relative positions, in both directions."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from einops import einsum
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import DropoutRate
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError
from manyheads.parts.norms import LayerNorm, Norm, make_norm
from manyheads.parts.positions.alibi import At, Scores
from manyheads.ragged import Lengths


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Disentangled:
    """Queries with the key of a distance, and keys with its query (DeBERTa, arXiv 2006.03654).

    There are `buckets` distances per side, with a vector each that all layers of a stack share.
    Half of them are single distances, half grow logarithmically up to `reach`; with
    `reach="linear"` all are single. A layer makes keys and queries of these vectors by the
    projections of its tokens, or by its own with `projections="own"`. Scores are usually scaled by
    the root of the head size times one plus the number of terms.
    """

    buckets: int = 256
    reach: int | Literal["linear"] = 512
    terms: Literal["both", "content_to_position", "position_to_content"] = "both"
    projections: Literal["shared", "own"] = "shared"
    norm: Norm = LayerNorm()
    dropout: DropoutRate = 0.0

    def __post_init__(self) -> None:
        middle = self.buckets // 2
        if self.buckets < 1 or (self.reach != "linear" and middle < 1):
            raise ConfigError(f"buckets must be at least 2, got {self.buckets}")
        if self.reach != "linear" and self.reach - 1 <= middle:
            raise ConfigError(
                f"reach must be above {middle + 1}, half of buckets={self.buckets}, "
                f"got {self.reach}",
                'use a larger reach, or reach="linear"',
            )

    @property
    def counts_content(self) -> bool:
        """Whether queries meet the keys of distances."""
        return self.terms != "position_to_content"

    @property
    def counts_position(self) -> bool:
        """Whether keys meet the queries of distances."""
        return self.terms != "content_to_position"

    def index(self, distance: Int[Tensor, "*at"]) -> Int[Tensor, "*at"]:
        """Which vector belongs to query position minus key position."""
        bucket = distance if self.reach == "linear" else self._logarithmic(distance, self.reach)
        return (bucket + self.buckets).clamp(0, 2 * self.buckets - 1)

    def _logarithmic(self, distance: Int[Tensor, "*at"], reach: int) -> Int[Tensor, "*at"]:
        middle = self.buckets // 2
        far = distance.abs().clamp(min=middle)
        # In float32 and in this order, since the ceiling shows the last bit.
        growth = (far / middle).log() / torch.tensor((reach - 1) / middle).log().to(distance.device)
        coarse = ((growth * (middle - 1)).ceil() + middle).long()
        return torch.where(distance.abs() <= middle, distance, distance.sign() * coarse)


class DisentangledTable(nn.Module):
    """The vectors of the distances."""

    def __init__(self, config: Disentangled, width: int) -> None:
        super().__init__()
        self.config = config
        self.vectors = nn.Parameter(torch.randn(2 * config.buckets, width) * 0.02)
        self.norm = make_norm(config.norm, width)

    def encode(self) -> "RelativeVectors":
        return RelativeVectors(self.config, self.norm(self.vectors))


class DistanceProjections(nn.Module):
    """The projections of a layer that makes keys and queries of distances by its own."""

    def __init__(self, config: Disentangled, width: int, rows: dict[str, int]) -> None:
        super().__init__()
        self.key = nn.Linear(width, rows["key"]) if config.counts_content else None
        self.query = nn.Linear(width, rows["query"]) if config.counts_position else None

    def forward(self, vectors: Float[Tensor, "r c"]) -> dict[str, Float[Tensor, "r rows"]]:
        parts = {"key": self.key, "query": self.query}
        return {name: part(vectors) for name, part in parts.items() if part is not None}


@dataclass(frozen=True, slots=True, eq=False)
class RelativeVectors:
    """The normed vectors of all distances, which layers share."""

    config: Disentangled
    values: Float[Tensor, "r c"]

    def within(self, longest: int) -> tuple[Float[Tensor, "some c"], Int[Tensor, " distances"]]:
        """The vectors that texts of this length need, and which of them each distance has.

        The first distance is 1 - `longest`.
        """
        last = max(longest - 1, 0)
        distance = torch.arange(-last, last + 1, device=self.values.device)
        index = self.config.index(distance)
        ends = self.config.index(torch.tensor([-last, last]))
        first, stop = int(ends[0]), int(ends[1]) + 1
        return self.values[first:stop], index - first


@dataclass(frozen=True, slots=True, eq=False)
class DisentangledBias:
    """The scores of queries and of keys with each distance, for the kernels.

    `index` says which column a distance has; `first_key` is the row of the first key that the
    sequence of a query has.
    """

    by_query: Float[Tensor, "n h r"] | None
    by_key: Float[Tensor, "m h r"] | None
    index: Int[Tensor, " distances"]
    first_key: Int[Tensor, " n"]

    @classmethod
    def of(
        cls,
        query: Float[Tensor, "n h d"],
        key: Float[Tensor, "m h d"],
        distances: tuple[
            Float[Tensor, "r h d"] | None, Float[Tensor, "r h d"] | None, Int[Tensor, " distances"]
        ],
        lengths: tuple[Lengths, Lengths],
        scale: float,
    ) -> "DisentangledBias":
        """From the queries and keys of tokens, and the queries, keys and index of distances."""
        distance_query, distance_key, index = distances
        queries, keys = lengths
        starts = (
            keys.offsets[:-1].long()
            if keys.tight
            else torch.tensor(keys.starts, dtype=torch.long, device=query.device)
        )
        return cls(
            by_query=None if distance_key is None else scale * _products(query, distance_key),
            by_key=None if distance_query is None else scale * _products(key, distance_query),
            index=index,
            first_key=starts[queries.sequence_of_token],
        )

    @property
    def requires_grad(self) -> bool:
        return any(term is not None and term.requires_grad for term in (self.by_query, self.by_key))

    def of_heads(self, spans: Sequence[slice]) -> "DisentangledBias":
        """The bias of these heads only."""
        by_query, by_key = (
            None if term is None else torch.cat([term[:, span] for span in spans], dim=1)
            for term in (self.by_query, self.by_key)
        )
        return DisentangledBias(by_query, by_key, self.index, self.first_key)

    def column(self, distance: Int[Tensor, "*at"]) -> Int[Tensor, "*at"]:
        """The column of key position minus query position; beyond the longest text, of its end."""
        far = self.index.shape[0] // 2
        return self.index[far - distance.clamp(-far, far)]

    def score(self, head: At, row: At, query: At, key: At) -> Scores:
        column = self.column(key - query)
        if self.by_key is None:
            assert self.by_query is not None
            return self.by_query[row, head, column]
        # Kernels also ask for pairs that their mask hides, which may have no row.
        key_row = (self.first_key[row] + key).clamp(0, self.by_key.shape[0] - 1)
        scored = self.by_key[key_row, head, column]
        return scored if self.by_query is None else scored + self.by_query[row, head, column]


def _products(
    x: Float[Tensor, "n h d"], distances: Float[Tensor, "r h d"]
) -> Float[Tensor, "n h r"]:
    return einsum(x.float(), distances.float(), "n h d, r h d -> n h r")
