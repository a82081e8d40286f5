"""What a cache keeps for mixers that see every earlier token: it grows with the text."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.ragged import Lengths, Ragged


def continue_texts(
    new: tuple[Float[Tensor, "n h d"], ...], lengths: Lengths, before: tuple[Tensor, ...]
) -> tuple[tuple[Float[Tensor, "m h d"], ...], Lengths]:
    """The tokens that a cache keeps, and behind them the new ones of each text."""
    if not before:
        return new, lengths
    *stored, counts = before
    olds = counts.tolist()
    total = Lengths.of([old + length for old, length in zip(olds, lengths.each, strict=True)])
    joined = []
    for old, more in zip(stored, new, strict=True):
        parts = zip(old, olds, more.split(lengths.each), strict=True)
        joined.append(torch.cat([x for row, count, y in parts for x in (row[:count], y)]))
    return tuple(joined), total.to(new[0].device)


def padded_texts(parts: tuple[Float[Tensor, "n h d"], ...], lengths: Lengths) -> tuple[Tensor, ...]:
    """What a cache keeps of these tokens: padded to the longest text, then the lengths."""
    counts = torch.tensor(lengths.each, device=parts[0].device)
    return *(Ragged(part, lengths).to_padded() for part in parts), counts
