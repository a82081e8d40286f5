"""The largest activation and the median beside it, as plain torch finds them."""

import pytest
import torch
from torch import Tensor

from manyheads import build
from manyheads.kernels import reference
from manyheads.lens.measure import watcher
from manyheads.lens.measure.row_sums import RowSums, RowSumSpec, sum_rows
from manyheads.lens.measure.score_tiles import TiledScores
from manyheads.lens.measure.statistics import statistics
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


@pytest.mark.parametrize("mixes", [True, False])
def test_the_pass_that_sums_may_give_the_output_or_not(
    mixes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build("llama-1b-shape", seed=0, layers=2, width=32, heads=8, vocabulary=50, hidden=64)
    texts = [[5, 6, 7, 5, 6], [8, 9, 8]]
    expected = statistics(model, texts, progress=False)
    calls = []

    def sum_and_mix(tiled: TiledScores, spec: RowSumSpec, value: Tensor) -> tuple[RowSums, Tensor]:
        calls.append(value)
        output = reference.attend(tiled.query, tiled.key, value, tiled.request).output
        return sum_rows(tiled, spec), output

    monkeypatch.setattr(watcher, "cannot", lambda *_: None)
    monkeypatch.setattr(watcher, "cannot_mix", lambda *_: None if mixes else "not this one")
    monkeypatch.setattr(watcher, "stream_rows_and_output", sum_and_mix)
    result = statistics(model, texts, progress=False)
    assert len(calls) == (2 if mixes else 0)
    assert result.names == expected.names
    for name in expected.names:
        one, other = torch.from_numpy(result.means[name]), torch.from_numpy(expected.means[name])
        assert torch.allclose(one, other, rtol=1e-4, atol=1e-6, equal_nan=True), name
