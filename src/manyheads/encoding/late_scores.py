"""MaxSim: the score of late interaction, exact and over ragged documents (arXiv 2004.12832)."""

from collections.abc import Callable, Iterator

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.argument_checks import checked
from manyheads.errors import InputError
from manyheads.ragged import Lengths, Ragged

# Rows of documents per block: their products with a query are still in the cache when the maximum
# is taken. Products per block, which bounds memory when there are many queries.
BLOCK_ROWS = 8192
BLOCK_PRODUCTS = 2**22

# Products of tokens that training forms at a time.
TRAINING_PRODUCTS = 2**26

# The vectors of documents in some rows.
Rows = Callable[[slice], Tensor]


@checked
def maxsim(query: Float[Tensor, "q c"], documents: Ragged) -> Float[Tensor, " d"]:
    """The score of each document: the sum over query vectors of the largest product with its own.

    Products and sums are in float32 or wider, also for vectors stored in half precision. A document
    without vectors scores -inf. Products are formed and reduced block by block, so that memory
    beside the vectors stays small.

    >>> documents = Ragged.from_list([torch.eye(2), torch.tensor([[0.6, 0.8]])])
    >>> maxsim(torch.eye(2), documents)
    tensor([2.0000, 1.4000])
    """
    _check(query, documents.values)
    return score_rows(query, documents.lengths, documents.values.__getitem__)


@checked
def maxsim_matrix(queries: Ragged, documents: Ragged) -> Float[Tensor, "b d"]:
    """The score of every query with every document, as `maxsim` gives it, without gradients."""
    _check(queries.values, documents.values)
    return _scores(queries, documents.lengths, documents.values.__getitem__)


def score_rows(query: Float[Tensor, "q c"], lengths: Lengths, rows: Rows) -> Float[Tensor, " d"]:
    """`maxsim` of documents whose vectors are made block by block, as from codes."""
    return _scores(Ragged(query, Lengths.of([query.shape[0]], query.device)), lengths, rows)[0]


def maxsim_with_gradients(
    queries: Ragged, documents: Ragged, *, products: int = TRAINING_PRODUCTS
) -> Float[Tensor, "b d"]:
    """`maxsim_matrix` for training: of every block only the places of the maxima are kept.

    A document without vectors scores 0 here, which gives a finite loss. Documents of a block are
    padded to the longest, since a reduction over ragged rows would keep all products.
    """
    _check(queries.values, documents.values)
    tokens = max(queries.values.shape[0], 1)
    lengths = documents.lengths.each
    scores = [queries.values.new_zeros(len(queries), 0)]
    first = 0
    while first < len(documents):
        last, longest = first + 1, lengths[first]
        while last < len(documents):
            longest = max(longest, lengths[last])
            if tokens * longest * (last + 1 - first) > products:
                break
            last += 1
        scores.append(_padded_scores(queries, documents, range(first, last)))
        first = last
    return torch.cat(scores, dim=1)


def _padded_scores(queries: Ragged, documents: Ragged, block: range) -> Float[Tensor, "b d"]:
    """The scores of a block of documents, whose vectors are padded to the longest."""
    sizes, starts = documents.lengths.each[block.start : block.stop], documents.lengths.starts
    values = documents.values[starts[block.start] : starts[block.stop - 1] + sizes[-1]]
    lengths = Lengths.of(sizes, documents.device)
    longest = max(lengths.longest, 1)
    places = lengths.sequence_of_token * longest + lengths.positions
    shape = (len(block) * longest, values.shape[1])
    padded = values.new_zeros(shape).index_copy(0, places, values)
    real = torch.zeros(shape[0], dtype=torch.bool, device=values.device).index_fill(0, places, 1)
    products = (queries.values @ padded.T).masked_fill(~real, -torch.inf)
    best = products.view(-1, len(block), longest).max(2).values
    best = best.masked_fill(~real.view(len(block), longest).any(1), 0.0)
    return _sum_by_query(best.T, queries.lengths).T


def _check(queries: Tensor, documents: Tensor) -> None:
    if queries.dim() != 2 or documents.dim() != 2 or queries.shape[1] != documents.shape[1]:
        raise InputError(
            f"queries have shape {tuple(queries.shape)} and documents {tuple(documents.shape)}",
            "give both one vector per token, of the same size",
        )


@torch.no_grad()
def _scores(queries: Ragged, lengths: Lengths, rows: Rows) -> Float[Tensor, "b d"]:
    values = queries.values.to(torch.promote_types(queries.values.dtype, torch.float32))
    scores = values.new_zeros(len(lengths), len(queries))
    with torch.autocast(values.device.type, enabled=False):
        for block, start, stop in _blocks(lengths, values.shape[0]):
            owner = (lengths.sequence_of_token[start:stop] - block.start).unsqueeze(1)
            products = rows(slice(start, stop)).to(values) @ values.T
            maxima = values.new_full((len(block), values.shape[0]), -torch.inf)
            maxima.scatter_reduce_(0, owner.expand_as(products), products, "amax")
            scores[block.start : block.stop] = _sum_by_query(maxima, queries.lengths)
    return scores.T


def _sum_by_query(maxima: Float[Tensor, "d q"], lengths: Lengths) -> Float[Tensor, "d b"]:
    if lengths.count == 1:
        return maxima.sum(1, keepdim=True)
    summed = maxima.new_zeros(maxima.shape[0], lengths.count)
    return summed.index_add_(1, lengths.sequence_of_token, maxima)


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
