"""The largest activation and the median beside it, as plain torch finds them."""

import pytest
import torch

from manyheads.lens.measure.watcher import _bisect_median, find_peak, masked_median
from manyheads.ragged import Ragged


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (8, 4), (5, 64)])
def test_counting_bit_by_bit_finds_the_median(shape: tuple[int, int], dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    sizes = torch.randn(shape, generator=draw).mul(100).abs().to(dtype)
    sizes[:, ::3] = 0
    rows = torch.arange(len(sizes)) % 3 < 2
    assert _bisect_median(sizes, rows) == sizes[rows].median()
    assert masked_median(sizes, rows) == sizes[rows].median()


def test_the_peak_is_where_it_was_put() -> None:
    draw = torch.Generator().manual_seed(1)
    texts = [torch.randn(length, 6, generator=draw) for length in (4, 3, 5)]
    texts[1][2, 5] = -300.0
    ids = Ragged.from_list([torch.arange(len(text)) + 10 for text in texts])
    median = float(texts[1].abs().median())
    assert find_peak(Ragged.from_list(texts), ids).tolist() == [300.0, median, 1, 2, 5, 12]
