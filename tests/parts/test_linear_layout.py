"""Weights laid out for products: while many tokens pass, with the same values, and put back."""

import pytest
import torch
from torch import nn

from manyheads.parts import linear_layout


@pytest.fixture(autouse=True)
def on_arm(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_layout.platform, "machine", lambda: "aarch64")


def test_weights_are_laid_out_anew_for_many_tokens_only_and_put_back() -> None:
    linear, table = nn.Linear(3, 5), nn.Embedding(7, 3)
    weights = (linear.weight, table.weight)
    places, values = [each.data_ptr() for each in weights], [each.clone() for each in weights]
    with linear_layout.column_major_weights(linear, linear_layout.MIN_TOKENS - 1, table.weight):
        assert all(each.is_contiguous() for each in weights)
    with linear_layout.column_major_weights(linear, linear_layout.MIN_TOKENS, table.weight):
        assert all(each.T.is_contiguous() for each in weights)
        assert all(torch.equal(*pair) for pair in zip(weights, values, strict=True))
    assert all(each.is_contiguous() for each in weights)
    assert [each.data_ptr() for each in weights] == places


def test_a_weight_that_is_shared_is_laid_out_once() -> None:
    linear, table = nn.Linear(3, 7, bias=False), nn.Embedding(7, 3)
    linear.weight = table.weight
    with linear_layout.column_major_weights(linear, linear_layout.MIN_TOKENS, table.weight):
        assert table.weight.T.is_contiguous()
    assert table.weight.is_contiguous()


def test_half_precision_and_large_models_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    half, large = nn.Linear(3, 5).bfloat16(), nn.Linear(3, 5)
    with linear_layout.column_major_weights(half, linear_layout.MIN_TOKENS):
        assert half.weight.is_contiguous()
    monkeypatch.setattr(linear_layout, "MAX_BYTES", 59)
    with linear_layout.column_major_weights(large, linear_layout.MIN_TOKENS):
        assert large.weight.is_contiguous()
