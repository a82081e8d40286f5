"""Learned grid positions at other resolutions, the class token kept apart."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import ViTConfig
from transformers.models.vit.modeling_vit import ViTEmbeddings

from manyheads.errors import ConfigError
from manyheads.parts.positions import LearnedGrid
from manyheads.parts.positions.absolute import GridTable, resample
from tests.messages import refuses


@pytest.mark.parametrize(("height", "width"), [(384, 384), (224, 224), (160, 320), (112, 384)])
def test_interpolation_is_that_of_vit(height: int, width: int) -> None:
    peer = ViTEmbeddings(ViTConfig(hidden_size=12, image_size=224, patch_size=16))
    ours = GridTable(LearnedGrid(rows=14, columns=14), 12)
    with torch.no_grad():
        ours.class_token.copy_(peer.position_embeddings[0, 0])
        ours.patches.copy_(peer.position_embeddings[0, 1:].reshape(14, 14, 12))
    rows, columns = height // 16, width // 16
    patches = torch.zeros(1, 1 + rows * columns, 12)
    expected = peer.interpolate_pos_encoding(patches, height, width)
    torch.testing.assert_close(ours(rows, columns), expected[0])


@given(rows=st.integers(1, 6), columns=st.integers(1, 6))
def test_its_own_resolution_is_exact(rows: int, columns: int) -> None:
    table = GridTable(LearnedGrid(rows=rows, columns=columns), 3)
    assert torch.equal(table(rows, columns)[1:], table.patches.reshape(-1, 3))


@given(rows=st.integers(1, 9), columns=st.integers(1, 9))
def test_the_class_token_is_never_resampled(rows: int, columns: int) -> None:
    table = GridTable(LearnedGrid(rows=4, columns=5), 3)
    vectors = table(rows, columns)
    assert vectors.shape == (1 + rows * columns, 3)
    assert torch.equal(vectors[0], table.class_token)


def test_from_224_to_384_and_back_keeps_a_smooth_grid() -> None:
    x = torch.linspace(0, 3, 14)
    grid = torch.stack((x.sin()[:, None] + x.cos()[None, :], x[:, None] * x[None, :]), -1)
    back = resample(resample(grid, 24, 24), 14, 14)
    torch.testing.assert_close(back, grid, rtol=0, atol=0.02)


def test_rows_and_columns_are_not_confused() -> None:
    grid = torch.arange(4.0)[:, None, None].expand(4, 6, 1)
    resized = resample(grid, 8, 3)
    assert resized.shape == (8, 3, 1)
    torch.testing.assert_close(resized[:, 0], resized[:, 2])
    assert (resized.diff(dim=0) > 0).all()


def test_gradients_reach_the_table_through_another_resolution() -> None:
    table = GridTable(LearnedGrid(rows=3, columns=3), 2)
    table(5, 4).sum().backward()
    assert table.patches.grad is not None
    assert table.patches.grad.all()
    assert torch.equal(table.class_token.grad, torch.ones(2))


def test_an_empty_grid_is_refused() -> None:
    with refuses(ConfigError, "rows must be at least 1, got 0"):
        LearnedGrid(rows=0, columns=14)
