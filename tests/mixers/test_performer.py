"""Random features estimate the softmax: without bias, better the more there are, and finite."""

import pytest
import torch

from manyheads import Ragged
from manyheads.errors import ConfigError
from manyheads.mixers.head_weights import DecayWeights
from manyheads.mixers.performer import (
    Performer,
    PerformerLayer,
    featurized,
    naive_performer,
    orthogonal_features,
    softmax_error,
)
from manyheads.ragged import Lengths

SIZE = 8


def test_the_error_falls_as_features_grow() -> None:
    q, k = 0.5 * torch.randn(2, 40, 2, SIZE)
    for causal in (True, False):
        errors = [
            float(softmax_error(q, k, orthogonal_features(2, count, SIZE), causal=causal).mean())
            for count in (8, 64, 512)
        ]
        assert errors[0] > 1.5 * errors[1] > 2.25 * errors[2]
        assert errors[2] < 0.05


def test_the_estimate_is_unbiased_and_its_directions_orthogonal() -> None:
    q, k = 0.2 * torch.randn(2, SIZE)
    w = orthogonal_features(4000, SIZE, SIZE)
    f = [(w @ x - x.square().sum() / 2).exp() for x in (q, k)]
    assert float((f[0] * f[1]).mean()) == pytest.approx(float((q @ k).exp()), rel=0.02)
    products = w[0] @ w[0].T
    torch.testing.assert_close(products, products.diagonal().diag(), atol=1e-4, rtol=0)


def test_other_features_give_another_estimate() -> None:
    layer = PerformerLayer(Performer(width=16, heads=2, features=20))
    batch = Ragged.from_list([torch.randn(9, 16)])
    first, drawn = layer(batch).values, layer.features.clone()
    assert "features" in layer.state_dict()
    layer.features.copy_(orthogonal_features(2, 20, 8, torch.Generator().manual_seed(3)))
    assert not torch.allclose(layer(batch).values, first)
    layer.features.copy_(drawn)
    assert torch.equal(layer(batch).values, first)


@pytest.mark.parametrize("causal", [True, False])
def test_the_features_give_the_estimate_of_the_loop_over_tokens(causal: bool) -> None:
    lengths = Lengths.of((33, 0, 1, 70))
    q, k, v = torch.randn(3, lengths.total, 2, SIZE)
    features = orthogonal_features(2, 20, SIZE)
    f_query, f_key, decay, _ = featurized(q, k, features, lengths, causal=causal)
    patterns = DecayWeights(f_query, f_key, decay, lengths, causal=causal, normalized=True)
    parts = zip(patterns.each, lengths.slices(), strict=True)
    result = torch.cat([torch.einsum("hts,she->the", rows, v[at]) for rows, at in parts])
    expected = naive_performer(q, k, v, features, lengths, causal=causal)
    torch.testing.assert_close(result, expected, atol=2e-3, rtol=2e-3)


def test_large_scores_stay_finite() -> None:
    layer = PerformerLayer(Performer(width=16, heads=2, features=20))
    x = (1000 * torch.randn(70, 16)).requires_grad_()
    output = layer(Ragged.from_list([x])).values
    output.sum().backward()
    assert output.isfinite().all()
    assert x.grad is not None
    assert x.grad.isfinite().all()


def test_the_config_is_checked() -> None:
    with pytest.raises(ConfigError, match=r"heads must divide width=10.*3"):
        Performer(width=10, heads=3, features=4)
    with pytest.raises(ConfigError, match=r"features.*0"):
        Performer(width=8, heads=2, features=0)
