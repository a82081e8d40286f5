"""Heads whose patterns are written by hand: their scores are the logarithms of the weights."""

from collections.abc import Sequence

import torch
from torch import Tensor

from manyheads.kernels.contract import Request
from manyheads.lens.measure.measures import (
    MeasureScope,
    MeasureSums,
    add_measures,
    has_earlier_copy,
)
from manyheads.lens.measure.row_sums import RowSumSpec, sum_rows
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.results.addresses import Block
from manyheads.parts.masks import Causal, Full, Mask
from manyheads.ragged import Lengths

# A weight of nothing: e to this power is zero in float32.
NEVER = -200.0


def measured(
    *patterns: Tensor,
    ids: Sequence[int] | None = None,
    classes: dict[str, Sequence[int]] | None = None,
    offsets: tuple[int, ...] = (),
    causal: bool = True,
) -> dict[str, float]:
    """Every measure of one head that has these patterns, one a text."""
    lengths = Lengths.of([len(pattern) for pattern in patterns])
    longest = lengths.longest
    query = torch.full((lengths.total, 1, longest), NEVER)
    key = torch.zeros(lengths.total, 1, longest)
    for pattern, place in zip(patterns, lengths.slices(), strict=True):
        count = len(pattern)
        query[place, 0, :count] = pattern.log().clamp(min=NEVER)
        key[place, 0, :count] = torch.eye(count)
    mask: Mask = Causal() if causal else Full()
    request = Request(queries=lengths, keys=lengths, mask=mask, scale=1.0)
    tokens = torch.arange(lengths.total) if ids is None else torch.tensor(list(ids))
    classes = classes or {}
    columns = [torch.isin(tokens, torch.tensor(list(each))).float() for each in classes.values()]
    marks = torch.stack(columns, 1) if columns else torch.zeros(lengths.total, 0)
    spec = RowSumSpec(offsets=(-1, 0, 1, *offsets), marks=marks, ids=tokens)
    scope = MeasureScope(
        classes=tuple(classes), repeats=has_earlier_copy(tokens, lengths), same=True
    )
    tally, block = MeasureSums(), Block(0, 1)
    tiled = TiledScores(query, key, request)
    add_measures(tally, block, tiled, spec, sum_rows(tiled, spec), scope)
    return {name: float(tally.means((block,), name)[0]) for name in tally.names}


def offset_head(length: int, offset: int) -> Tensor:
    """Looks at the key `offset` on, and at the first where there is none."""
    pattern = torch.zeros(length, length)
    for row in range(length):
        pattern[row, row + offset if 0 <= row + offset < length else 0] = 1.0
    return pattern


def even_head(length: int) -> Tensor:
    """Looks at all it may see alike."""
    pattern = torch.ones(length, length).tril()
    return pattern / pattern.sum(-1, keepdim=True)


def column_head(length: int, column: int = 0) -> Tensor:
    pattern = torch.zeros(length, length)
    pattern[:, column] = 1.0
    return pattern


def induction_head(block: int) -> tuple[Tensor, list[int]]:
    """A first token, `block` others twice; the head looks at what came after, else at the first."""
    ids = [block, *range(block), *range(block)]
    pattern = column_head(len(ids))
    for row in range(block + 1, len(ids)):
        pattern[row] = 0.0
        pattern[row, row - block + 1] = 1.0
    return pattern, ids
