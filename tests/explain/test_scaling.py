"""The measurement of 1/sqrt(d) measures what it says."""

import pytest
import torch
from torch import Tensor

from manyheads.errors import InputError
from manyheads.explain.scaling import SIZES, ScalingRow, mean_gradient, measure


@pytest.fixture(scope="module", params=[0, 1])
def measured(request: pytest.FixtureRequest) -> tuple[ScalingRow, ...]:
    return measure(seed=request.param)


def test_every_size_is_measured(measured: tuple[ScalingRow, ...]) -> None:
    assert [row.size for row in measured] == list(SIZES) == [8, 16, 32, 64, 128, 256, 512]


def test_the_variance_is_d_without_scaling_and_one_with(measured: tuple[ScalingRow, ...]) -> None:
    for row in measured:
        assert row.plain.variance == pytest.approx(row.size, rel=0.1)
        assert row.scaled.variance == pytest.approx(1.0, rel=0.1)


def test_without_scaling_softmax_saturates_as_heads_grow(measured: tuple[ScalingRow, ...]) -> None:
    largest = [row.plain.largest_weight for row in measured]
    slopes = [row.plain.gradient for row in measured]
    assert largest == sorted(largest)
    assert slopes == sorted(slopes, reverse=True)
    assert largest[-1] > 0.9
    assert slopes[-1] < slopes[0] / 5


def test_with_scaling_the_size_of_a_head_makes_no_difference(
    measured: tuple[ScalingRow, ...],
) -> None:
    for row in measured:
        assert row.scaled.largest_weight == pytest.approx(
            measured[0].scaled.largest_weight, rel=0.1
        )
        assert row.scaled.gradient == pytest.approx(measured[0].scaled.gradient, rel=0.02)


def test_the_slope_is_the_mean_size_of_softmaxs_derivative() -> None:
    scores = torch.randn(5, 9, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def softmax(row: Tensor) -> Tensor:
        return row.softmax(-1)

    for row in scores:
        jacobian = torch.func.jacrev(softmax)(row)
        expected = float(jacobian.abs().mean())
        assert float(mean_gradient(softmax(row)[None])) == pytest.approx(expected, rel=1e-9)


def test_the_same_seed_measures_the_same_and_leaves_the_global_one_alone() -> None:
    before = torch.random.get_rng_state()
    assert measure([8, 16], seed=4) == measure([8, 16], seed=4) != measure([8, 16], seed=5)
    assert torch.equal(before, torch.random.get_rng_state())


def test_a_head_without_channels_is_refused() -> None:
    with pytest.raises(InputError, match=r"sizes must be at least 1, got \(8, 0\)"):
        measure([8, 0])
