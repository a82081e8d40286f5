"""The type of a pattern: the ideal pattern that it shares most of its weight with."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.errors import InputError, ShapeError

# A pattern that overlaps less than this with every ideal is mixed.
MIXED_BELOW = 0.5


@dataclass(frozen=True, slots=True)
class PatternType:
    """The ideal nearest to a pattern, the overlap with it, and the overlaps with all others.

    `detail` is the offset, the column or the block size.
    """

    name: str
    score: float
    detail: int | None
    scores: dict[str, float]

    @property
    def full_name(self) -> str:
        """The name and the detail, as in "offset -3"."""
        return self.name if self.detail is None else f"{self.name} {self.detail}"

    def __str__(self) -> str:
        return f"{self.full_name} ({self.score:.2f})"


class _Candidate(NamedTuple):
    name: str
    score: float
    detail: int | None = None


@checked
def typology(
    pattern: Float[Tensor, "t s"],
    visible: Bool[Tensor, "t s"] | None = None,
    *,
    segments: Sequence[int] | None = None,
) -> PatternType:
    """Classify a pattern: diagonal, previous, next, offset, vertical, block, uniform or mixed.

    The score is the mean over queries of the overlap with the ideal, sum_j min(A, D); for an offset
    over queries that have such a key, for a column over queries that see it. Without `visible`, a
    pattern with zeros above its diagonal is taken as causal. Blocks have equal sizes, or begin at
    `segments`.

    >>> str(typology(torch.eye(6)))
    'diagonal (1.00)'
    """
    pattern = pattern.double()
    if pattern.dim() != 2 or 0 in pattern.shape:
        raise InputError(
            f"a pattern must be a non-empty matrix, got shape {tuple(pattern.shape)}",
            "pass t x s weights",
        )
    if visible is None:
        visible = torch.ones_like(pattern, dtype=torch.bool)
        if pattern.shape[0] == pattern.shape[1] and not pattern.triu(1).any():
            visible = visible.tril()
    # The column with the largest weight among those that at least half of the queries see.
    queries = visible.sum(0)
    means = (pattern * visible).sum(0) / queries.clamp(min=1)
    means = means.masked_fill(2 * queries < len(pattern), -1.0)
    column = int(means.argmax())
    candidates = [
        *_offsets(pattern),
        _Candidate("vertical", max(0.0, float(means[column])), column),
        *_blocks(pattern, visible, segments),
        _Candidate("uniform", _uniform_overlap(pattern, visible)),
    ]
    best: dict[str, _Candidate] = {}
    for ideal in candidates:
        if ideal.name not in best or ideal.score > best[ideal.name].score + 1e-9:
            best[ideal.name] = ideal
    scores = {name: ideal.score for name, ideal in best.items()}
    # Ties go to the first: a single query fits every ideal.
    winner = max(best.values(), key=lambda ideal: round(ideal.score, 9))
    if winner.score < MIXED_BELOW:
        winner = _Candidate("mixed", winner.score)
    return PatternType(*winner, scores)


def _offsets(pattern: Float[Tensor, "t s"]) -> Iterator[_Candidate]:
    """Every diagonal that at least half of the queries have."""
    names = {0: "diagonal", -1: "previous", 1: "next"}
    queries, keys = pattern.shape
    # The last query is at the last key.
    shift = keys - queries
    for offset in sorted(range(-queries // 2, queries // 2 + 1), key=abs):
        weights = pattern.diagonal(offset + shift)
        if 2 * len(weights) >= queries and len(weights):
            detail = None if offset in names else offset
            yield _Candidate(names.get(offset, "offset"), float(weights.mean()), detail)


def _blocks(
    pattern: Float[Tensor, "t s"], visible: Bool[Tensor, "t s"], segments: Sequence[int] | None
) -> Iterator[_Candidate]:
    queries, keys = pattern.shape
    if queries != keys:
        return
    position = torch.arange(keys, device=pattern.device)
    sizes: Sequence[int] = range(2, keys // 2 + 1)
    if keys > 128:
        # Powers of two and the sizes halfway between.
        powers = [2**exponent for exponent in range(1, keys.bit_length())]
        sizes = [size for power in powers for size in (power, power * 3 // 2) if size <= keys // 2]
    owners: dict[int | None, Tensor] = {size: position // size for size in sizes}
    if segments is not None:
        starts = torch.tensor(sorted({0, *segments}), device=pattern.device)
        owners = {None: torch.searchsorted(starts, position, right=True)}
    for size, owner in owners.items():
        same = visible & (owner[:, None] == owner)
        yield _Candidate("block", _uniform_overlap(pattern, same), size)


def _uniform_overlap(pattern: Float[Tensor, "t s"], allowed: Bool[Tensor, "t s"]) -> float:
    """The overlap with uniform attention to the allowed keys."""
    uniform = allowed / allowed.sum(-1, keepdim=True).clamp(min=1)
    return float(torch.minimum(pattern, uniform).sum(-1).mean())


def offset_ideal(length: int, offset: int) -> Float[Tensor, "t s"]:
    """Ones at the key `offset` positions after each query: -1 is the previous token."""
    return torch.diag(torch.ones(max(0, length - abs(offset))), offset)


def duplicate_ideal(ids: Sequence[int] | Tensor) -> Float[Tensor, "t s"]:
    """Ones at all earlier copies of a query's token.

    >>> duplicate_ideal([7, 8, 7]).tolist()[2]
    [1.0, 0.0, 0.0]
    """
    tokens = torch.as_tensor(ids)
    return (tokens[:, None] == tokens[None]).float().tril(-1)


def induction_ideal(ids: Sequence[int] | Tensor) -> Float[Tensor, "t s"]:
    """Ones at the tokens after earlier copies of a query's token.

    >>> induction_ideal([7, 8, 7]).tolist()[2]
    [0.0, 1.0, 0.0]
    """
    shifted = duplicate_ideal(ids).roll(1, dims=1)
    shifted[:, :1] = 0.0
    return shifted


@checked
def detect(
    pattern: Float[Tensor, "t s"],
    ideal: Float[Tensor, "t s"],
    *,
    error_measure: Literal["mul", "abs"] = "mul",
    exclude_first: bool = False,
) -> float:
    """TransformerLens' head detector: "mul" is sum(A D) / sum(A), "abs" is 1 - sum|A - D| / n.

    `exclude_first` removes the first token from the pattern and from the ideal. Scores of different
    variants cannot be compared.
    """
    if pattern.shape != ideal.shape:
        raise ShapeError(
            f"the pattern has shape {tuple(pattern.shape)} and the ideal {tuple(ideal.shape)}",
            "use the same text for both",
        )
    if error_measure not in ("mul", "abs"):
        raise InputError(f"error_measure={error_measure!r} is unknown", 'use "mul" or "abs"')
    actual, expected = pattern.double().clone(), ideal.double().clone()
    if exclude_first:
        actual[:, 0] = expected[:, 0] = 0.0
    if error_measure == "abs":
        return float(1 - (actual - expected).abs().sum() / len(pattern))
    return float((actual * expected).sum() / actual.sum())
