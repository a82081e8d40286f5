"""How well a pattern agrees with an ideal one of ones and zeros: previous, duplicate, induction."""

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError, ShapeError

__all__ = ["detect", "duplicate_ideal", "induction_ideal", "offset_ideal"]


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
