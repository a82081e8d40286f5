"""Sines and cosines, by the paper's formula and in Marian's layout."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.models.marian.modeling_marian import MarianSinusoidalPositionalEmbedding

from manyheads.errors import ConfigError
from manyheads.parts.positions import Sinusoidal
from tests.messages import refuses


@given(
    positions=st.lists(st.integers(0, 9000), min_size=1, max_size=5),
    half=st.integers(1, 20),
    theta=st.sampled_from([100.0, 10_000.0]),
)
def test_every_channel_is_the_papers_formula(positions: list[int], half: int, theta: float) -> None:
    vectors = Sinusoidal(theta=theta).vectors(torch.tensor(positions), 2 * half)
    for row, position in enumerate(positions):
        for pair in range(half):
            angle = position / theta ** (2 * pair / (2 * half))
            assert vectors[row, 2 * pair] == pytest.approx(math.sin(angle), abs=1e-6)
            assert vectors[row, 2 * pair + 1] == pytest.approx(math.cos(angle), abs=1e-6)


def test_halves_are_marians_layout() -> None:
    peer = MarianSinusoidalPositionalEmbedding(50, 16).create_weight()
    ours = Sinusoidal(layout="halves").vectors(torch.arange(50), 16)
    torch.testing.assert_close(ours, peer)


def test_both_layouts_hold_the_same_numbers() -> None:
    positions = torch.arange(9)
    interleaved = Sinusoidal().vectors(positions, 8)
    halves = Sinusoidal(layout="halves").vectors(positions, 8)
    assert torch.equal(torch.cat((interleaved[:, 0::2], interleaved[:, 1::2]), 1), halves)


def test_the_product_of_two_vectors_depends_only_on_their_distance() -> None:
    vectors = Sinusoidal().vectors(torch.arange(200), 32).double()
    products = vectors @ vectors.T
    for distance in (0, 1, 17):
        diagonal = products.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal), rtol=0, atol=1e-4)


def test_an_odd_width_is_refused() -> None:
    with refuses(ConfigError, "width must be even", "got 7"):
        Sinusoidal().vectors(torch.arange(3), 7)
