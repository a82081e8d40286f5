"""MaxSim with gradients: every text of a batch with every candidate (arXiv 2004.12832)."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import ShapeError
from manyheads.ragged import Lengths, Ragged

# Similarities of tokens that are computed at a time.
BLOCK = 2**26


def maxsim_scores(
    queries: Ragged, documents: Ragged, *, block: int = BLOCK
) -> Float[Tensor, "q d"]:
    """The sum over a query's tokens of the largest dot product with a token of the document.

    Documents are compared in blocks, and of a block only the places of the maxima are kept for the
    backward pass. A document without tokens gets 0.
    """
    if queries.values.shape[1:] != documents.values.shape[1:]:
        raise ShapeError(
            f"query vectors have shape {tuple(queries.values.shape[1:])}, document vectors "
            f"{tuple(documents.values.shape[1:])}",
            "encode both with the same model",
        )
    tokens = max(queries.values.shape[0], 1)
    found = [queries.values.new_zeros(len(queries), 0)]
    first = 0
    while first < len(documents):
        last, longest = first, 0
        while last < len(documents):
            longest = max(longest, documents.lengths.each[last])
            if last > first and tokens * longest * (last + 1 - first) > block:
                break
            last += 1
        found.append(_block_scores(queries, documents, first, last))
        first = last
    return torch.cat(found, dim=1)


def _block_scores(
    queries: Ragged, documents: Ragged, first: int, last: int
) -> Float[Tensor, "q d"]:
    values, lengths = _block(documents, first, last)
    longest = max(lengths.longest, 1)
    places = lengths.sequence_of_token * longest + lengths.positions
    each, width = last - first, values.shape[1]
    padded = values.new_zeros(each * longest, width).index_copy(0, places, values)
    real = torch.zeros(each * longest, dtype=torch.bool, device=values.device)
    real[places] = True
    similar = (queries.values @ padded.T).masked_fill(~real, -torch.inf)
    best = similar.view(-1, each, longest).max(2).values
    best = best.masked_fill(~real.view(each, longest).any(1), 0.0)
    owner = queries.lengths.sequence_of_token
    return best.new_zeros(len(queries), each).index_add(0, owner, best)


def _block(documents: Ragged, first: int, last: int) -> tuple[Tensor, Lengths]:
    each, starts = documents.lengths.each[first:last], documents.lengths.starts
    end = starts[last - 1] + each[-1]
    return documents.values[starts[first] : end], Lengths.of(each, documents.device)
