"""Batches filled by tokens: texts of like length side by side, no padding."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from manyheads.encoding.reading import Ids
from manyheads.ragged import Lengths, Ragged

__all__ = ["fill", "on_device", "sent"]


def fill(lengths: Sequence[int], most: int) -> Iterator[list[int]]:
    """Places of texts, longest first, as many a batch as `most` tokens hold, but at least one.

    Texts without a token are left out.

    >>> list(fill([2, 5, 0, 3, 9], most=8))
    [[4], [1, 3], [0]]
    """
    batch: list[int] = []
    tokens = 0
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        if batch and (tokens + lengths[place] > most or not lengths[place]):
            yield batch
            batch, tokens = [], 0
        if not lengths[place]:
            return
        batch.append(place)
        tokens += lengths[place]
    if batch:
        yield batch


def on_device(sequences: Sequence[Ids], device: torch.device) -> Ragged:
    """One ragged batch, copied so that the device need not be waited for."""
    lengths = Lengths.of([len(each) for each in sequences])
    lengths = replace(
        lengths,
        offsets=sent(lengths.offsets, device),
        positions=sent(lengths.positions, device),
        sequence_of_token=sent(lengths.sequence_of_token, device),
    )
    return Ragged(sent(torch.from_numpy(np.concatenate(sequences)), device), lengths)


def sent(tensor: Tensor, device: torch.device) -> Tensor:
    """A copy on the device, from memory that it can read by itself."""
    if device.type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)
