"""Texts of different lengths in one batch: padded, unpadded, and packed to one size."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.data.packing import pack
from manyheads.models import Decoder
from manyheads.ragged import Lengths, Ragged
from studies.byte_texts import read_bytes

SHORTEST, IGNORED, WARM = 8, -100, 4


def lines_of(source: str, count: int, length: int, limit: int | None) -> list[bytes]:
    """The lines of a text as documents of at most `length` + 1 bytes."""
    lines = read_bytes(source, limit).split(b"\n")
    return [line[: length + 1] for line in lines if len(line) > SHORTEST][:count]


@dataclass(frozen=True, slots=True)
class ByteBatch:
    """Inputs end to end, what follows each of them, and how many of these are no padding."""

    ids: Ragged
    targets: Tensor
    counted: int

    @classmethod
    def of(cls, texts: Sequence[bytes], device: str, padded_to: int | None = None) -> "ByteBatch":
        ids, targets = [], []
        for text in texts:
            size = padded_to or len(text) - 1
            row = torch.tensor(list(text))
            ids.append(F.pad(row[:-1], (0, size - len(row) + 1)))
            targets.append(F.pad(row[1:], (0, size - len(row) + 1), value=IGNORED))
        lengths = Lengths.of([len(row) for row in ids], device)
        flat = Ragged(torch.cat(ids).to(device), lengths)
        return cls(flat, torch.cat(targets).to(device), sum(len(text) - 1 for text in texts))

    def loss(self, model: Decoder) -> Tensor:
        with torch.autocast(self.ids.device.type, torch.bfloat16, enabled=self.ids.values.is_cuda):
            embedded = model.embedding.embed(self.ids, self.ids.lengths.positions)
            hidden, _ = model.stack(embedded)
            assert model.readout is not None
            logits = model.readout(hidden, model.table).values
        return F.cross_entropy(logits.float(), self.targets, ignore_index=IGNORED)


def packed(texts: Sequence[bytes], budget: int) -> list[list[bytes]]:
    """Batches that are filled up to a number of bytes."""
    sizes = [(index, len(text) - 1) for index, text in enumerate(texts)]
    return [[texts[index] for index in batch] for batch in pack(sizes, budget)]


def bytes_per_second(model: Decoder, batches: Sequence[ByteBatch]) -> float:
    """Of forward and backward, padding not counted."""
    for batch in [*batches[:WARM], *batches]:
        if batch is batches[0]:
            start = _time(batch.targets)
        batch.loss(model).backward()
        model.zero_grad(set_to_none=True)
    return sum(batch.counted for batch in batches) / (_time(batches[0].targets) - start)


def _time(tensor: Tensor) -> float:
    if tensor.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter()
