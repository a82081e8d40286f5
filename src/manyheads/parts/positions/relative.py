"""Learned biases by distance: T5's buckets and Shaw's vectors."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError
from manyheads.parts.positions import alibi, disentangled
from manyheads.parts.positions.alibi import At, Scores


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class T5Buckets:
    """A learned score per head for each bucket of distances (arXiv 1910.10683).

    Half of the buckets are single distances, half grow logarithmically up to `reach`. If `shared`,
    all layers of a stack use one table, as in T5.
    """

    buckets: int = 32
    reach: int = 128
    bidirectional: bool = True
    shared: bool = True

    def __post_init__(self) -> None:
        exact = self._per_side // 2
        if exact < 1 or self.reach <= exact:
            raise ConfigError(
                f"buckets={self.buckets} do not fit reach={self.reach}",
                f"use at least 4 buckets and a reach above {exact}",
            )

    @property
    def _per_side(self) -> int:
        return self.buckets // 2 if self.bidirectional else self.buckets

    def bucket(self, distance: Int[Tensor, "*at"]) -> Int[Tensor, "*at"]:
        """The bucket of key position minus query position."""
        count = self._per_side
        if self.bidirectional:
            first = (distance > 0).long() * count
            far = distance.abs()
        else:
            first = torch.zeros_like(distance)
            far = (-distance).clamp(min=0)
        exact = count // 2
        growth = (far.float().clamp(min=1) / exact).log() / math.log(self.reach / exact)
        coarse = (exact + (growth * (count - exact)).long()).clamp(max=count - 1)
        return first + torch.where(far < exact, far, coarse)


class BucketTable(nn.Module):
    """The table of T5's buckets, one column per head."""

    def __init__(self, config: T5Buckets, heads: int) -> None:
        super().__init__()
        self.config = config
        self.table = nn.Parameter(torch.randn(config.buckets, heads) * 0.02)

    def bias(self) -> "BucketBias":
        return BucketBias(self.config, self.table.float())


@dataclass(frozen=True, slots=True, eq=False)
class BucketBias:
    """T5's table in the form that kernels use."""

    config: T5Buckets
    table: Float[Tensor, "buckets h"]

    @property
    def requires_grad(self) -> bool:
        return self.table.requires_grad

    def of_heads(self, spans: Sequence[slice]) -> "BucketBias":
        """The bias of these heads only."""
        return BucketBias(self.config, torch.cat([self.table[:, span] for span in spans], dim=1))

    def score(self, head: At, row: At, query: At, key: At) -> Scores:  # noqa: ARG002
        return self.table[self.config.bucket(key - query), head]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Shaw:
    """A learned vector per distance up to `reach`, multiplied by the query (arXiv 1803.02155).

    `values` adds a second vector per distance to the output of the head. That needs the attention
    on each distance, which fused kernels do not give.
    """

    reach: PositiveInt = 16
    values: bool = False


class ShawTable(nn.Module):
    """Shaw's vectors, shared by the heads of a layer."""

    def __init__(self, config: Shaw, size: int) -> None:
        super().__init__()
        self.config = config
        self.keys = nn.Parameter(torch.randn(2 * config.reach + 1, size) * 0.02)
        self.values = (
            nn.Parameter(torch.randn(2 * config.reach + 1, size) * 0.02) if config.values else None
        )

    def bias(self, query: Float[Tensor, "n h d"], scale: float) -> "ShawBias":
        products = query.float() @ (scale * self.keys.float()).T
        return ShawBias(self.config.reach, products, self.values)


@dataclass(frozen=True, slots=True, eq=False)
class ShawBias:
    """The score of each query with each distance, and the vectors to add to the output."""

    reach: int
    products: Float[Tensor, "n h distances"]
    values: Float[Tensor, "distances d"] | None

    @property
    def requires_grad(self) -> bool:
        values_do = self.values is not None and self.values.requires_grad
        return self.products.requires_grad or values_do

    def of_heads(self, spans: Sequence[slice]) -> "ShawBias":
        """The bias of these heads only."""
        products = torch.cat([self.products[:, span] for span in spans], dim=1)
        return ShawBias(self.reach, products, self.values)

    def distance(self, query: At, key: At) -> At:
        """The index of the distance between query and key, in 0 to 2 * reach."""
        return (key - query).clamp(-self.reach, self.reach) + self.reach

    def score(self, head: At, row: At, query: At, key: At) -> Scores:
        return self.products[row, head, self.distance(query, key)]


@dataclass(frozen=True, slots=True, eq=False)
class DenseBias:
    """A score for each query and key of each sequence, as a tensor that somebody else computed.

    `sequence` and `position` say where a packed row of queries stands in it.
    """

    values: Float[Tensor, "b h t s"]
    sequence: Int[Tensor, " n"]
    position: Int[Tensor, " n"]

    @property
    def requires_grad(self) -> bool:
        return self.values.requires_grad

    def of_heads(self, spans: Sequence[slice]) -> "DenseBias":
        """The bias of these heads only."""
        values = torch.cat([self.values[:, span] for span in spans], dim=1)
        return DenseBias(values, self.sequence, self.position)

    def score(self, head: At, row: At, query: At, key: At) -> Scores:  # noqa: ARG002
        batch, heads = self.values.shape[:2]
        return self.values[
            self.sequence[row] % batch, head % heads, self.position[row], key
        ].float()


# Each has `score(head, row, query, key)`, elementwise over index tensors that broadcast: one kernel
# computes blocks with it, another uses it as a score_mod.
Bias = alibi.AlibiBias | BucketBias | DenseBias | disentangled.DisentangledBias | ShawBias
