"""MaxSim: the score of late interaction, exact and over ragged documents (arXiv 2004.12832)."""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.autograd.function import once_differentiable

from manyheads.errors import InputError
from manyheads.ragged import Lengths, Ragged

# Rows of documents per block: their products with a query are still in the cache when the maximum
# is taken. Products per block, which bounds memory when there are many queries.
BLOCK_ROWS = 8192
BLOCK_PRODUCTS = 2**22

# The vectors of documents in rows start to stop, in the dtype of the product.
Rows = Callable[[int, int], Tensor]


def maxsim(query: Float[Tensor, "q c"], documents: Ragged) -> Float[Tensor, " d"]:
    """The score of each document: the sum over query vectors of the largest product with its own.

    Products and sums are in float32 or wider, also for vectors stored in half precision. A document
    without vectors scores -inf. Memory beside the vectors does not grow with the documents.

    >>> documents = Ragged.from_list([torch.eye(2), torch.tensor([[0.6, 0.8]])])
    >>> maxsim(torch.eye(2), documents)
    tensor([2.0000, 1.4000])
    """
    _check(query, documents.values)
    with torch.no_grad():
        queries = Ragged(query, Lengths.of([query.shape[0]], query.device))
        return _scores(queries, documents.lengths, _rows_of(documents))[0]


def maxsim_scores(queries: Ragged, documents: Ragged) -> Float[Tensor, "b d"]:
    """The score of every query with every document, with gradients for both.

    All products are never in memory at once: the backward pass needs, for each query vector and
    document, only the row of the maximum.
    """
    _check(queries.values, documents.values)
    if torch.is_grad_enabled() and (queries.values.requires_grad or documents.values.requires_grad):
        scores: Tensor = _MaxSim.apply(  # type: ignore[no-untyped-call]
            queries.values, documents.values, queries.lengths, documents.lengths
        )
        return scores
    return _scores(queries, documents.lengths, _rows_of(documents))


def score_rows(query: Float[Tensor, "q c"], lengths: Lengths, rows: Rows) -> Float[Tensor, " d"]:
    """`maxsim` of documents whose vectors are made block by block, as from codes."""
    with torch.no_grad():
        queries = Ragged(query, Lengths.of([query.shape[0]], query.device))
        return _scores(queries, lengths, rows)[0]


def _check(queries: Tensor, documents: Tensor) -> None:
    if queries.dim() != 2 or documents.dim() != 2 or queries.shape[1] != documents.shape[1]:
        raise InputError(
            f"queries have shape {tuple(queries.shape)} and documents {tuple(documents.shape)}",
            "give both one vector per token, of the same size",
        )


def _rows_of(documents: Ragged) -> Rows:
    return lambda start, stop: documents.values[start:stop]


def _scores(queries: Ragged, lengths: Lengths, rows: Rows) -> Float[Tensor, "b d"]:
    values = queries.values.to(_wide(queries.values.dtype))
    maxima = values.new_full((len(lengths), values.shape[0]), -torch.inf)
    with torch.autocast(values.device.type, enabled=False):
        for some, start, stop in _blocks(lengths, values.shape[0]):
            owner = lengths.sequence_of_token[start:stop] - some.start
            products = rows(start, stop).to(values) @ values.T
            _take_maxima(maxima[some.start : some.stop], owner, products)
    return _sum_by_query(maxima, queries.lengths)


def _take_maxima(
    maxima: Float[Tensor, "d q"], owner: Int[Tensor, " r"], products: Float[Tensor, "r q"]
) -> None:
    """Raise the maxima of documents to the products of their rows."""
    maxima.scatter_reduce_(0, owner.unsqueeze(1).expand_as(products), products, "amax")


def _sum_by_query(maxima: Float[Tensor, "d q"], lengths: Lengths) -> Float[Tensor, "b d"]:
    if lengths.count == 1:
        return maxima.sum(1).unsqueeze(0)
    summed = maxima.new_zeros(maxima.shape[0], lengths.count)
    return summed.index_add_(1, lengths.sequence_of_token, maxima).T


def _blocks(lengths: Lengths, queries: int) -> Iterator[tuple[range, int, int]]:
    """Documents in blocks of few rows, with their first row and the one behind their last.

    A block has at least one document.
    """
    most = min(BLOCK_ROWS, BLOCK_PRODUCTS // max(queries, 1))
    first = start = stop = 0
    for index, length in enumerate(lengths.each):
        if stop + length - start > most and index > first:
            yield range(first, index), start, stop
            first, start = index, stop
        stop += length
    if first < len(lengths):
        yield range(first, len(lengths)), start, stop


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.promote_types(dtype, torch.float32)


class _MaxSim(torch.autograd.Function):
    """Scores, and for the backward pass the row of each maximum."""

    @staticmethod
    def forward(
        ctx: Any,
        queries: Float[Tensor, "q c"],
        documents: Float[Tensor, "n c"],
        query_lengths: Lengths,
        document_lengths: Lengths,
    ) -> Float[Tensor, "b d"]:
        wide = _wide(torch.promote_types(queries.dtype, documents.dtype))
        values = queries.to(wide)
        maxima = values.new_full((len(document_lengths), values.shape[0]), -torch.inf)
        none = documents.shape[0]
        best = torch.full_like(maxima, none, dtype=torch.long)
        with torch.autocast(values.device.type, enabled=False):
            for some, start, stop in _blocks(document_lengths, values.shape[0]):
                owner = document_lengths.sequence_of_token[start:stop] - some.start
                products = documents[start:stop].to(wide) @ values.T
                here = maxima[some.start : some.stop]
                _take_maxima(here, owner, products)
                row = torch.arange(start, stop, device=values.device).unsqueeze(1)
                # The first of equal rows.
                row = torch.where(products == here[owner], row, none)
                best[some.start : some.stop].scatter_reduce_(
                    0, owner.unsqueeze(1).expand_as(row), row, "amin"
                )
        ctx.save_for_backward(queries, documents, best)
        ctx.lengths = query_lengths, document_lengths
        return _sum_by_query(maxima, query_lengths)

    @staticmethod
    @once_differentiable  # type: ignore[untyped-decorator, unused-ignore]
    def backward(ctx: Any, gradient: Float[Tensor, "b d"]) -> tuple[Tensor | None, ...]:
        queries, documents, best = ctx.saved_tensors
        query_lengths, document_lengths = ctx.lengths
        wide = gradient.dtype
        values = queries.to(wide)
        by_query, by_document = torch.zeros_like(values), torch.zeros_like(documents, dtype=wide)
        with torch.autocast(values.device.type, enabled=False):
            for some, start, stop in _blocks(document_lengths, values.shape[0]):
                if stop == start:
                    continue
                share = gradient.T[some.start : some.stop][:, query_lengths.sequence_of_token]
                row = best[some.start : some.stop]
                empty = row == documents.shape[0]
                row, share = (row - start).masked_fill(empty, 0), share.masked_fill(empty, 0.0)
                weights = values.new_zeros(stop - start, values.shape[0])
                weights.scatter_add_(0, row, share)
                by_query += weights.T @ documents[start:stop].to(wide)
                by_document[start:stop] = weights @ values
        return by_query.to(queries.dtype), by_document.to(documents.dtype), None, None
