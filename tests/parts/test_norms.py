"""Norms are PyTorch's, with or without bias, the weight as it is or as its distance from one."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from manyheads.parts.norms import LayerNorm, NoNorm, Norm, RMSNorm, make_norm

CONFIGS: list[LayerNorm | RMSNorm] = [
    kind(bias=bias, centered=centered, eps=eps)
    for kind in (LayerNorm, RMSNorm)
    for bias in (True, False)
    for centered in (True, False)
    for eps in (1e-12, 1e-1)
]


def by_hand(config: LayerNorm | RMSNorm, x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    if isinstance(config, LayerNorm):
        x = x - x.mean(-1, keepdim=True)
    normed = x / (x.square().mean(-1, keepdim=True) + config.eps).sqrt()
    return normed * (1 + weight if config.centered else weight) + bias


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_every_norm_is_its_formula(config: LayerNorm | RMSNorm) -> None:
    norm = make_norm(config, 6)
    weight, bias = torch.randn(6), torch.randn(6) if config.bias else torch.zeros(6)
    with torch.no_grad():
        norm.weight.copy_(weight)
        if config.bias:
            norm.bias.copy_(bias)
    x = 3 * torch.randn(4, 5, 6) + 1
    torch.testing.assert_close(norm(x), by_hand(config, x, weight, bias))


@pytest.mark.parametrize(
    ("config", "peer"),
    [
        (LayerNorm(), nn.LayerNorm(6)),
        (LayerNorm(bias=False), nn.LayerNorm(6, bias=False)),
        (LayerNorm(eps=1e-12), nn.LayerNorm(6, eps=1e-12)),
        (RMSNorm(), nn.RMSNorm(6, eps=1e-6)),
    ],
)
def test_a_new_norm_is_pytorchs(config: Norm, peer: nn.Module) -> None:
    x = torch.randn(7, 6)
    ours = make_norm(config, 6)
    assert torch.equal(ours(x), peer(x))
    assert {name: p.shape for name, p in ours.named_parameters()} == {
        name: p.shape for name, p in peer.named_parameters()
    }


@pytest.mark.parametrize("config", CONFIGS, ids=str)
def test_a_new_norm_scales_by_one_and_shifts_by_nothing(config: LayerNorm | RMSNorm) -> None:
    norm = make_norm(config, 6)
    assert torch.equal(norm.weight, torch.zeros(6) if config.centered else torch.ones(6))
    assert (norm.bias is None) == (not config.bias)
    x = torch.randn(4, 6)
    plain = by_hand(config, x, norm.weight, torch.zeros(6))
    torch.testing.assert_close(norm(x), plain)


@given(factor=st.floats(0.1, 100))
def test_a_norm_forgets_the_size_of_its_input(factor: float) -> None:
    x = torch.randn(3, 8)
    for config in (LayerNorm(eps=1e-12), RMSNorm(eps=1e-12)):
        norm = make_norm(config, 8)
        torch.testing.assert_close(norm(factor * x), norm(x), rtol=1e-4, atol=1e-5)


def test_half_precision_is_normed_in_single() -> None:
    x = (100 * torch.randn(3, 512) + 1000).to(torch.bfloat16)
    norm = make_norm(LayerNorm(), 512).to(torch.bfloat16)
    expected = make_norm(LayerNorm(), 512)(x.float())
    torch.testing.assert_close(norm(x).float(), expected, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("config", [LayerNorm(centered=True), RMSNorm(centered=True)], ids=str)
def test_half_precision_keeps_a_small_distance_from_one(
    config: LayerNorm | RMSNorm, dtype: torch.dtype
) -> None:
    """One and a thousandth is one in bfloat16, and must scale by more than one all the same."""
    norm = make_norm(config, 512).to(dtype)
    with torch.no_grad():
        norm.weight.fill_(1e-3)
    x = (3 * torch.randn(64, 512)).to(dtype)
    exact = by_hand(config, x.float(), norm.weight.float(), torch.zeros(512))
    result = norm(x)
    assert result.dtype == dtype
    ratio = result.float().abs().sum() / exact.abs().sum()
    assert ratio.item() == pytest.approx(1.0, abs=2e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_centered_norm_teaches_its_weight_what_a_plain_one_learns(dtype: torch.dtype) -> None:
    x, pull = torch.randn(2, 9, 16).to(dtype)
    gradients = []
    for config, weight in ((RMSNorm(centered=True), 0.25), (RMSNorm(), 1.25)):
        norm = make_norm(config, 16).to(dtype)
        with torch.no_grad():
            norm.weight.fill_(weight)
        inputs = x.clone().requires_grad_()
        (norm(inputs) * pull).sum().backward()
        gradients.append((inputs.grad, norm.weight.grad))
    near = {"rtol": 1e-5, "atol": 1e-5} if dtype == torch.float32 else {"rtol": 0.02, "atol": 0.05}
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, **near)


def test_double_precision_stays_double() -> None:
    x = torch.randn(3, 6, dtype=torch.float64)
    for config in CONFIGS:
        norm = make_norm(config, 6).double()
        expected = by_hand(config, x, norm.weight, torch.zeros(6, dtype=torch.float64))
        torch.testing.assert_close(norm(x), expected, rtol=1e-12, atol=1e-12)


def test_no_norm_is_no_norm() -> None:
    x = torch.randn(3, 4)
    norm = make_norm(NoNorm(), 4)
    assert torch.equal(norm(x), x)
    assert not list(norm.parameters())
