"""Learned biases by distance: T5's buckets and Shaw's vectors."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from transformers.models.t5.modeling_t5 import T5Attention

from manyheads.errors import ConfigError
from manyheads.parts.positions import Shaw, T5Buckets
from manyheads.parts.positions.relative import BucketTable, ShawTable
from tests.messages import refuses


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize(("buckets", "reach"), [(32, 128), (8, 20), (64, 1000)])
def test_every_distance_falls_into_t5s_bucket(
    buckets: int, reach: int, bidirectional: bool
) -> None:
    distance = torch.arange(-2 * reach, 2 * reach + 1)
    ours = T5Buckets(buckets=buckets, reach=reach, bidirectional=bidirectional).bucket(distance)
    peer = T5Attention._relative_position_bucket(distance, bidirectional, buckets, reach)
    assert torch.equal(ours, peer)


@given(buckets=st.integers(2, 40), reach=st.integers(1, 200), bidirectional=st.booleans())
def test_buckets_never_leave_the_table(buckets: int, reach: int, bidirectional: bool) -> None:
    side = buckets // 2 if bidirectional else buckets
    assume(side >= 2 and reach > side // 2)
    config = T5Buckets(buckets=buckets, reach=reach, bidirectional=bidirectional)
    result = config.bucket(torch.arange(-300, 301))
    assert int(result.min()) >= 0
    assert int(result.max()) < buckets


def test_a_bucket_table_gives_each_head_its_own_score() -> None:
    table = BucketTable(T5Buckets(buckets=8, reach=16), heads=3)
    head = torch.arange(3)[:, None, None]
    query, key = torch.arange(5)[:, None], torch.arange(6)[None, :]
    result = table.bias().score(head, query, query, key)
    buckets = T5Attention._relative_position_bucket(key - query, True, 8, 16)
    assert torch.equal(result, table.table[buckets].permute(2, 0, 1))
    assert table.bias().requires_grad


def test_buckets_that_do_not_fit_their_reach_are_refused() -> None:
    remedy = "use at least 4 buckets and a reach above"
    with refuses(ConfigError, f"buckets=2 do not fit reach=128: {remedy}"):
        T5Buckets(buckets=2)
    with refuses(ConfigError, f"buckets=32 do not fit reach=8: {remedy}"):
        T5Buckets(reach=8)


@given(queries=st.integers(1, 5), older=st.integers(0, 6), reach=st.integers(1, 4))
def test_shaws_scores_are_the_querys_product_with_a_vector_by_distance(
    queries: int, older: int, reach: int
) -> None:
    keys = queries + older
    table = ShawTable(Shaw(reach=reach), size=4)
    query = torch.randn(queries, 2, 4)
    bias = table.bias(query, scale=0.5)
    row = torch.arange(queries)[:, None]
    result = bias.score(torch.arange(2)[:, None, None], row, row + older, torch.arange(keys))
    for head in range(2):
        for i in range(queries):
            for j in range(keys):
                vector = table.keys[max(-reach, min(reach, j - (i + older))) + reach]
                torch.testing.assert_close(result[head, i, j], 0.5 * query[i, head] @ vector)


def test_shaw_has_values_only_if_they_are_set() -> None:
    query = torch.randn(3, 2, 4)
    plain, full = ShawTable(Shaw(reach=2), 4), ShawTable(Shaw(reach=2, values=True), 4)
    assert plain.bias(query, 1.0).values is None
    values = full.bias(query, 1.0).values
    assert values is not None
    assert values.shape == (5, 4)
    assert sum(p.numel() for p in plain.parameters()) == 20
    assert sum(p.numel() for p in full.parameters()) == 40


def test_shaw_without_a_reach_is_refused() -> None:
    with refuses(ConfigError, "reach must be at least 1, got 0"):
        Shaw(reach=0)
