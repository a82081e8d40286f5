"""Layouts of chunks are remembered, and what is remembered suits every later use."""

import torch

from manyheads.mixers.recurrent import chunk_layout
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.ragged import Lengths


def test_a_layout_of_inference_serves_training_too() -> None:
    lengths = Lengths.of((5, 0, 3, 211))
    with torch.inference_mode():
        known = ChunkLayout.of(lengths, 4)
    assert ChunkLayout.of(Lengths.of((5, 0, 3, 211)), 4) is known
    assert ChunkLayout.of(lengths, 2) is not known
    x = torch.randn(lengths.total, 3, requires_grad=True)
    known.join(known.cut(x).square()).sum().backward()
    torch.testing.assert_close(x.grad, 2 * x.detach())


def test_few_layouts_are_remembered() -> None:
    for length in range(1, 2 * chunk_layout.REMEMBERED):
        ChunkLayout.of(Lengths.of((length,)), 4)
    assert len(chunk_layout._LAST) == chunk_layout.REMEMBERED
