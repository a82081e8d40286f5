"""Groups of tokens give the same states as a loop over tokens."""

import pytest
import torch

from manyheads.mixers.recurrent.diagonal_scan import diagonal_scan, naive_diagonal_scan
from manyheads.ragged import Lengths


@pytest.mark.parametrize("each", [[1], [16], [3, 0, 17, 300, 1]])
def test_groups_equal_the_loop_over_tokens(each: list[int]) -> None:
    lengths = Lengths.of(each)
    decay, added = torch.rand(lengths.total, 3, 2), torch.randn(lengths.total, 3, 2)
    state = torch.randn(len(each), 3, 2)
    for start in (state, None):
        h0 = torch.zeros_like(state) if start is None else start
        result = diagonal_scan(decay, added, lengths, start)
        expected = naive_diagonal_scan(decay, added, lengths, h0)
        for way, loop in zip(result, expected, strict=True):
            torch.testing.assert_close(way, loop, atol=1e-5, rtol=1e-5)
