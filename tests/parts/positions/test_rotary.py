"""Rotary positions: scores know distances alone, and longer contexts are those of the papers."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from manyheads.errors import ConfigError
from manyheads.parts.positions import Rotary
from manyheads.parts.positions.rotary import (
    LinearScaling,
    Llama3Scaling,
    NoScaling,
    NTKScaling,
    Scaling,
    YarnScaling,
)
from tests.messages import refuses

SCALINGS: list[Scaling] = [
    NoScaling(),
    LinearScaling(factor=4.0),
    NTKScaling(factor=2.5),
    YarnScaling(factor=4.0, original_length=64),
    Llama3Scaling(factor=8.0, original_length=64),
]


@given(
    scaling=st.sampled_from(SCALINGS),
    share=st.sampled_from([1.0, 0.5, 0.25]),
    shift=st.integers(0, 500),
    theta=st.sampled_from([10_000.0, 160_000.0]),
)
def test_score_depends_only_on_distance(
    scaling: Scaling, share: float, shift: int, theta: float
) -> None:
    rotary = Rotary(theta=theta, fraction=share, scaling=scaling)
    q, k = torch.randn(2, 12, 3, 16)
    here, there = (rotary.rotation(torch.arange(12) + moved, 16) for moved in (0, shift))
    scores = [torch.einsum("thd,shd->hts", turn(q), turn(k)) for turn in (here, there)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-3, atol=1e-3)


def test_score_does_depend_on_distance() -> None:
    turn = Rotary().rotation(torch.arange(12), 16)
    x = torch.randn(1, 1, 16).expand(12, 1, 16)
    scores = (turn(x) @ turn(x)[0, 0]).flatten()
    assert scores.unique().numel() == 12


def test_the_first_position_turns_nothing_and_no_length_changes() -> None:
    x = torch.randn(5, 2, 16)
    turned = Rotary().rotation(torch.arange(5), 16)(x)
    assert torch.equal(turned[0], x[0])
    torch.testing.assert_close(turned.norm(dim=-1), x.norm(dim=-1))


@pytest.mark.parametrize(("share", "channels"), [(1.0, 16), (0.5, 8), (0.25, 4)])
def test_channels_beyond_the_share_stay(share: float, channels: int) -> None:
    x = torch.randn(5, 2, 16)
    rotary = Rotary(fraction=share)
    turned = rotary.rotation(torch.arange(1, 6), 16)(x)
    assert torch.equal(turned[..., channels:], x[..., channels:])
    assert (turned[..., :channels] != x[..., :channels]).all()
    # The part that turns does so as a smaller head would.
    alone = Rotary().rotation(torch.arange(1, 6), channels)(x[..., :channels])
    assert torch.equal(turned[..., :channels], alone)


def test_the_layout_is_that_of_llama() -> None:
    config = LlamaConfig(hidden_size=32, num_attention_heads=2, head_dim=16)
    positions = torch.tensor([0, 3, 1, 700])
    x = torch.randn(4, 2, 16)
    cos, sin = LlamaRotaryEmbedding(config)(x, positions[None])
    peer, _ = apply_rotary_pos_emb(x.transpose(0, 1)[None], x.transpose(0, 1)[None], cos, sin)
    ours = Rotary(theta=10_000.0).rotation(positions, 16)(x)
    torch.testing.assert_close(ours, peer[0].transpose(0, 1))


def published(kind: str, length: int | None = None, **more: object) -> tuple[torch.Tensor, float]:
    """Frequencies and attention factor as `transformers` computes them."""
    config = LlamaConfig(
        hidden_size=128,
        num_attention_heads=2,
        head_dim=64,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": kind, "rope_theta": 10_000.0, **more},
    )
    return ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"), seq_len=length)


def test_linear_scaling_is_the_published() -> None:
    peer, _ = published("linear", factor=4.0)
    ours = Rotary(scaling=LinearScaling(factor=4.0)).frequencies(64)
    torch.testing.assert_close(ours.float(), peer)


@pytest.mark.parametrize("length", [4096, 5000, 16384])
@pytest.mark.parametrize("factor", [2.0, 8.0])
def test_ntk_is_the_dynamic_one_held_at_a_length(length: int, factor: float) -> None:
    peer, _ = published("dynamic", length=length, factor=factor)
    stretched = NTKScaling(factor=factor * length / 4096 - (factor - 1))
    torch.testing.assert_close(Rotary(scaling=stretched).frequencies(64).float(), peer)


def test_ntk_stretches_the_slowest_by_its_factor_and_the_fastest_not() -> None:
    plain, scaled = (
        Rotary(scaling=scaling).frequencies(64) for scaling in (NoScaling(), NTKScaling(factor=4.0))
    )
    assert scaled[0] == plain[0] == 1.0
    assert plain[-1] / scaled[-1] == pytest.approx(4.0)


@pytest.mark.parametrize(("fast", "slow"), [(32.0, 1.0), (16.0, 2.0)])
@pytest.mark.parametrize("factor", [2.0, 4.0, 16.0])
def test_yarn_is_the_published(factor: float, fast: float, slow: float) -> None:
    peer, temperature = published(
        "yarn",
        factor=factor,
        original_max_position_embeddings=2048,
        beta_fast=fast,
        beta_slow=slow,
    )
    scaling = YarnScaling(factor=factor, original_length=2048, fast=fast, slow=slow)
    torch.testing.assert_close(Rotary(scaling=scaling).frequencies(64).float(), peer)
    assert scaling.temperature == pytest.approx(temperature)


def test_yarn_multiplies_scores_by_the_square_of_its_temperature() -> None:
    scaling = YarnScaling(factor=4.0, original_length=64)
    x = torch.randn(5, 1, 16)
    turned = Rotary(scaling=scaling).rotation(torch.arange(5), 16)(x)
    expected = scaling.temperature**2 * x.square().sum(-1)
    torch.testing.assert_close(turned.square().sum(-1), expected)
    assert YarnScaling(factor=1.0, original_length=64).temperature == 1.0


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_the_published(factor: float) -> None:
    peer, _ = published(
        "llama3",
        factor=factor,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=1024,
    )
    scaling = Llama3Scaling(factor=factor, original_length=1024)
    torch.testing.assert_close(Rotary(scaling=scaling).frequencies(64).float(), peer)


@given(scaling=st.sampled_from([LinearScaling, NTKScaling]), size=st.sampled_from([2, 8, 64]))
def test_a_factor_of_one_changes_nothing(
    scaling: type[LinearScaling | NTKScaling], size: int
) -> None:
    torch.testing.assert_close(
        Rotary(scaling=scaling(factor=1.0)).frequencies(size), Rotary().frequencies(size)
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_stays_half(dtype: torch.dtype) -> None:
    assert Rotary().rotation(torch.arange(3), 8)(torch.randn(3, 1, 8, dtype=dtype)).dtype == dtype


@pytest.mark.parametrize("share", [1.0, 0.5])
def test_halves_turned_at_once_are_the_same_forth_and_back(share: float) -> None:
    turn = Rotary(fraction=share).rotation(torch.arange(5), 8)
    x = torch.randn(5, 3, 8, requires_grad=True)
    result, expected = turn.rotate_pairs(x), turn(x)
    torch.testing.assert_close(result, expected)
    pull = torch.randn(5, 3, 8)
    [one], [other] = (torch.autograd.grad((y * pull).sum(), x) for y in (result, expected))
    torch.testing.assert_close(one, other)


def test_impossible_rotations_are_refused() -> None:
    with refuses(
        ConfigError,
        "head size 7 x fraction 1 gives 7",
        "choose an even number",
    ):
        Rotary().rotated_channels(7)
    with refuses(
        ConfigError,
        "head size 12 x fraction 0.25 gives 3",
        "choose an even number",
    ):
        Rotary(fraction=0.25).rotated_channels(12)
    with refuses(ConfigError, "fraction must be in (0, 1], got 1.5"):
        Rotary(fraction=1.5)
    with refuses(ConfigError, "factor must be at least 1, got 0.5"):
        Rotary(scaling=LinearScaling(factor=0.5))
