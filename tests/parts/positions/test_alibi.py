"""ALiBi: the published slopes, and a penalty that grows with distance."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.bloom.modeling_bloom import build_alibi_tensor

from manyheads.parts.positions import Alibi


def test_eight_heads_have_the_published_slopes() -> None:
    assert Alibi().slopes(8) == (1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256)


def test_sixteen_heads_have_the_published_slopes() -> None:
    assert Alibi().slopes(16) == pytest.approx([2 ** (-(head + 1) / 2) for head in range(16)])


def test_twelve_heads_have_those_of_eight_and_every_other_of_sixteen() -> None:
    assert Alibi().slopes(12) == pytest.approx(
        (*Alibi().slopes(8), *(Alibi().slopes(16)[head] for head in (0, 2, 4, 6)))
    )


@given(heads=st.integers(1, 80))
def test_any_number_of_heads_has_the_slopes_of_bloom(heads: int) -> None:
    # Bloom adds slope * key, which differs from -slope * distance by a constant of the row.
    peer = build_alibi_tensor(torch.ones(1, 2), heads, torch.float32)[:, 0, 1]
    torch.testing.assert_close(torch.tensor(Alibi().slopes(heads)), peer)


@given(heads=st.integers(1, 80))
def test_kernels_read_the_same_slopes_to_the_last_digit(heads: int) -> None:
    result = Alibi().bias(heads, torch.device("cpu")).slopes
    torch.testing.assert_close(result, torch.tensor(Alibi().slopes(heads)), rtol=0, atol=0)


@given(heads=st.integers(1, 9), query=st.integers(0, 50), key=st.integers(0, 50))
def test_the_penalty_is_slope_times_distance_on_both_sides(
    heads: int, query: int, key: int
) -> None:
    bias = Alibi().bias(heads, torch.device("cpu"))
    head, zero = torch.arange(heads), torch.zeros(1, dtype=torch.long)
    result = bias.score(head, zero, torch.tensor([query]), torch.tensor([key]))
    expected = [-slope * abs(query - key) for slope in Alibi().slopes(heads)]
    torch.testing.assert_close(result, torch.tensor(expected))
    assert not bias.requires_grad
