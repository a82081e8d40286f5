"""What a pattern looks like: which of a few ideal pictures it shares most of its weight with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.errors import InputError, ShapeError

# A pattern that shares less than this with every ideal is mixed.
MIXED_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class Appearance:
    """The ideal a pattern is nearest to, the share of weight in common, and the others' shares.

    `detail` is the offset, the column or the size of the blocks.
    """

    name: str
    score: float
    detail: int | None
    scores: dict[str, float]

    def __str__(self) -> str:
        detail = "" if self.detail is None else f" {self.detail}"
        return f"{self.name}{detail} ({self.score:.2f})"


@dataclass(frozen=True, slots=True)
class _Found:
    name: str
    score: float
    detail: int | None = None


def typology(
    pattern: Float[Tensor, "t s"],
    visible: Bool[Tensor, "t s"] | None = None,
    *,
    segments: Sequence[int] | None = None,
) -> Appearance:
    """Diagonal, previous, next, offset, vertical, block, uniform or mixed, whichever it is most.

    The score is the mean over queries of the weight in common with the ideal, sum_j min(A, D); for
    an offset over queries that have such a key, for a column over queries that may see it. Without
    `visible`, a pattern with nothing above its diagonal is taken to be causal. Blocks are of one
    size each, or begin at `segments`.

    >>> str(typology(torch.eye(6)))
    'diagonal (1.00)'
    """
    pattern = pattern.double()
    if pattern.dim() != 2 or 0 in pattern.shape:
        raise InputError(f"a pattern of {tuple(pattern.shape)} shows nothing", "give t x s weights")
    if visible is None:
        visible = torch.ones_like(pattern, dtype=torch.bool)
        square = pattern.shape[0] == pattern.shape[1]
        if square and not bool(pattern.triu(1).any()):
            visible = visible.tril()
    found = [
        *_offsets(pattern),
        _vertical(pattern, visible),
        *_blocks(pattern, visible, segments),
        _Found("uniform", _common(pattern, visible)),
    ]
    best: dict[str, _Found] = {}
    for each in found:
        if each.name not in best or each.score > best[each.name].score + 1e-9:
            best[each.name] = each
    scores = {name: each.score for name, each in best.items()}
    # The first of equals: a single query looks like everything.
    winner = max(best.values(), key=lambda each: round(each.score, 9))
    if winner.score < MIXED_BELOW:
        return Appearance("mixed", winner.score, None, scores)
    return Appearance(winner.name, winner.score, winner.detail, scores)


def _offsets(pattern: Float[Tensor, "t s"]) -> Iterator[_Found]:
    """Every diagonal that at least half of the queries have."""
    names = {0: "diagonal", -1: "previous", 1: "next"}
    queries, keys = pattern.shape
    # The last query stands at the last key.
    shift = keys - queries
    for offset in sorted(range(-queries // 2, queries // 2 + 1), key=abs):
        weights = pattern.diagonal(offset + shift)
        if 2 * len(weights) >= queries and len(weights):
            detail = None if offset in names else offset
            yield _Found(names.get(offset, "offset"), float(weights.mean()), detail)


def _vertical(pattern: Float[Tensor, "t s"], visible: Bool[Tensor, "t s"]) -> _Found:
    """The column with most weight among those that at least half of the queries may see."""
    seen = visible.sum(0)
    means = (pattern * visible).sum(0) / seen.clamp(min=1)
    means = means.masked_fill(2 * seen < len(pattern), -1.0)
    column = int(means.argmax())
    return _Found("vertical", max(0.0, float(means[column])), column)


def _blocks(
    pattern: Float[Tensor, "t s"], visible: Bool[Tensor, "t s"], segments: Sequence[int] | None
) -> Iterator[_Found]:
    queries, keys = pattern.shape
    if queries != keys:
        return
    place = torch.arange(keys, device=pattern.device)
    if segments is not None:
        starts = torch.tensor(sorted({0, *segments}), device=pattern.device)
        owner = torch.searchsorted(starts, place, right=True)
        yield _Found("block", _common(pattern, visible & (owner[:, None] == owner)))
        return
    for size in _sizes(keys):
        owner = place // size
        same = visible & (owner[:, None] == owner)
        yield _Found("block", _common(pattern, same), size)


def _sizes(keys: int) -> list[int]:
    """All sizes of short texts; of long ones those that double, and those halfway between."""
    if keys <= 128:
        return list(range(2, keys // 2 + 1))
    doubling = [2**power for power in range(1, keys.bit_length())]
    return [size for each in doubling for size in (each, each * 3 // 2) if 2 <= size <= keys // 2]


def _common(pattern: Float[Tensor, "t s"], allowed: Bool[Tensor, "t s"]) -> float:
    """The weight in common with looking evenly at all that is allowed."""
    even = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    return float(torch.minimum(pattern, even).sum(-1).mean())


def offset_ideal(length: int, offset: int) -> Float[Tensor, "t s"]:
    """Ones where a query looks at the key `offset` places on: -1 is the previous token."""
    return torch.diag(torch.ones(max(0, length - abs(offset))), offset)


def duplicate_ideal(ids: Sequence[int] | Tensor) -> Float[Tensor, "t s"]:
    """Ones on all earlier copies of a query's token.

    >>> duplicate_ideal([7, 8, 7]).tolist()[2]
    [1.0, 0.0, 0.0]
    """
    tokens = torch.as_tensor(ids)
    return (tokens[:, None] == tokens[None]).float().tril(-1)


def induction_ideal(ids: Sequence[int] | Tensor) -> Float[Tensor, "t s"]:
    """Ones on the tokens after earlier copies of a query's token.

    >>> induction_ideal([7, 8, 7]).tolist()[2]
    [0.0, 1.0, 0.0]
    """
    shifted = duplicate_ideal(ids).roll(1, dims=1)
    shifted[:, :1] = 0.0
    return shifted


def detect(
    pattern: Float[Tensor, "t s"],
    ideal: Float[Tensor, "t s"],
    *,
    how: Literal["mul", "abs"] = "mul",
    first: bool = True,
) -> float:
    """TransformerLens' head detector: "mul" is sum(A D) / sum(A), "abs" is 1 - sum|A - D| / n.

    `first=False` takes the first token out of the pattern and out of the ideal. Scores of different
    variants cannot be compared with each other.
    """
    if pattern.shape != ideal.shape:
        raise ShapeError(
            f"a pattern of {tuple(pattern.shape)} meets an ideal of {tuple(ideal.shape)}",
            "make both of the same text",
        )
    if how not in ("mul", "abs"):
        raise InputError(f"there is no detector {how!r}", "use mul or abs")
    seen, meant = pattern.double().clone(), ideal.double().clone()
    if not first:
        seen[:, 0] = meant[:, 0] = 0.0
    if how == "abs":
        return float(1 - (seen - meant).abs().sum() / len(pattern))
    return float((seen * meant).sum() / seen.sum())
