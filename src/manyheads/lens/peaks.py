"""The largest value of the residual stream: found on the device, read when all layers are past."""

from importlib.util import find_spec

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.ragged import Ragged

__all__ = ["median_of", "peak_of"]

# The whole numbers that order the floats of a size, where none is negative.
BITS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def peak_of(value: Ragged, ids: Ragged | None) -> Float[Tensor, "6"]:
    """Largest value, median of its text, sequence, position, channel and token, -1 for none.

    >>> value = Ragged.from_list([torch.tensor([[1.0, -2.0], [0.5, 0.0]]), torch.ones(1, 2)])
    >>> peak_of(value, None).tolist()
    [2.0, 0.5, 0.0, 0.0, 1.0, -1.0]
    """
    sizes, lengths = value.values.abs(), value.lengths
    largest, channel = sizes.max(-1)
    # Indexed by tensors: a plain number would make the device wait for its reader.
    token = largest.argmax(0, keepdim=True)
    sequence = lengths.sequence_of_token[token]
    parts = (
        largest[token],
        median_of(sizes, lengths.sequence_of_token == sequence).unsqueeze(0),
        sequence,
        lengths.positions[token],
        channel[token],
        torch.full_like(token, -1) if ids is None else ids.values[token],
    )
    return torch.cat([part.double() for part in parts])


def median_of(sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """The lower median of values that are not negative, over the rows that count.

    On CUDA torch selects with one multiprocessor: counting how many lie below a value, once for
    each bit of it, is many times faster there.

    >>> median_of(torch.tensor([[3.0, 1.0], [2.0, 4.0], [9.0, 9.0]]), torch.tensor([1, 1, 0]) > 0)
    tensor(2.)
    """
    if sizes.device.type == "cpu":
        return sizes[rows].float().median()
    return _counted_median(sizes, rows)


def _counted_median(sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"]) -> Float[Tensor, ""]:
    """The largest value that at most half of all lie below."""
    whole = BITS[sizes.element_size()]
    rank = (rows.sum() * sizes.shape[1] - 1) // 2
    found = torch.zeros((), dtype=whole, device=sizes.device)
    for bit in reversed(range(8 * sizes.element_size() - 1)):
        tried = found | 2**bit
        below = _below(sizes, rows, tried.view(sizes.dtype))
        found = torch.where(below <= rank, tried, found)
    return found.view(sizes.dtype).float()


def _below(
    sizes: Float[Tensor, "n c"], rows: Bool[Tensor, " n"], limit: Float[Tensor, ""]
) -> Int[Tensor, ""]:
    if sizes.device.type != "cuda" or find_spec("triton") is None:
        return torch.where(rows, (sizes < limit).sum(-1), 0).sum()
    from manyheads.lens.counted import below

    # Triton runs on the current device, whichever the tensors are on.
    with torch.cuda.device_of(sizes):
        return below(sizes, rows, limit)
