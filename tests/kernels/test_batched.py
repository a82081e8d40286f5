"""Sequences of similar length are computed together, whatever a request asks for."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from manyheads.attention import Attention, AttentionConfig
from manyheads.kernels import batched, reference
from manyheads.kernels.contract import Request
from manyheads.parts.masks import Causal, Full
from manyheads.parts.positions import Shaw, T5Buckets
from manyheads.parts.positions.relative import BucketBias
from manyheads.ragged import Lengths, Ragged


class Products(TorchDispatchMode):
    """How many batched matrix products run."""

    count = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> object:
        del types
        self.count += func is torch.ops.aten.bmm.default
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("position", [T5Buckets(), Shaw(reach=4), Shaw(reach=4, values=True)])
def test_a_learned_bias_costs_no_call_per_sequence(position: T5Buckets | Shaw) -> None:
    layer = Attention(AttentionConfig(width=16, heads=2, position=position))
    batch = Ragged.from_list([torch.randn(1 + index, 16) for index in range(24)])
    with Products() as products:
        layer(batch).values.sum().backward()
    # Two products forwards and four backwards of one block, and Shaw's vectors.
    assert products.count <= 10


@given(
    each=st.lists(st.tuples(st.integers(0, 40), st.integers(0, 40)), max_size=12),
    causal=st.booleans(),
)
def test_blocks_hold_every_sequence_once_with_little_padding(
    each: list[tuple[int, int]], causal: bool
) -> None:
    queries, keys = (Lengths.of([pair[side] for pair in each]) for side in (0, 1))
    mask = Causal() if causal else Full()
    request = Request(queries=queries, keys=keys, mask=mask, scale=1.0)
    blocks = batched._layout(request, heads=16, kv_heads=16, size=512).blocks
    held = [sequence for block in blocks for sequence in block.sequences]
    assert sorted(held) == list(range(len(each)))
    for block in blocks:
        pairs = [each[sequence] for sequence in block.sequences]
        assert (block.queries, block.keys) == tuple(map(max, zip(*pairs, strict=True)))
        if causal:
            assert {s - t for t, s in pairs} == {block.shift}
        padding = len(pairs) * block.queries * block.keys - sum(t * s for t, s in pairs)
        assert padding * 16 * 512 <= batched.PADDING_PER_BLOCK


@given(lengths=st.lists(st.integers(1, 3000), min_size=1, max_size=40))
def test_several_chunks_at_once_make_fewer_blocks_that_fit(lengths: list[int]) -> None:
    heads, most_padding = 8, 10**9
    few, many = (
        batched._blocks(lengths, lengths, False, most_padding, heads, chunks) for chunks in (16, 1)
    )
    assert len(few) <= len(many)
    for chunks, blocks in ((16, few), (1, many)):
        for block in blocks:
            scores = len(block.sequences) * heads * block.queries * block.keys
            alone = len(block.sequences) == 1
            assert alone or scores <= chunks * reference.LARGEST_CHUNK


def test_dropout_scales_what_it_keeps() -> None:
    lengths = Lengths.of([3, 2] * 2_000)
    q = torch.zeros(lengths.total, 1, 4)
    request = Request(queries=lengths, keys=lengths, mask=Full(), scale=1.0, dropout=0.5)
    torch.manual_seed(0)
    drawn = batched.attend(q, q, q + 1, request).output.view(2_000, 5, 1, 4)
    assert drawn.std() > 0.3
    torch.testing.assert_close(drawn.mean(0), torch.ones(5, 1, 4), rtol=0.1, atol=0.0)


def test_long_sequences_are_recomputed_and_short_ones_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, config = Lengths.of([9, 30]), T5Buckets(buckets=8, reach=9)
    torch.manual_seed(0)
    q = torch.randn(39, 2, 4, requires_grad=True)
    table = torch.randn(8, 2, requires_grad=True)
    request = Request(
        queries=lengths,
        keys=lengths,
        mask=Full(),
        scale=0.5,
        bias=BucketBias(config, table),
    )

    def gradients(kernel: Any) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(
            kernel.attend(q, q, q, request).output.square().sum(), (q, table)
        )

    expected = gradients(reference)
    for kept in (0, 10, 256):
        monkeypatch.setattr(batched, "KEPT_KEYS", kept)
        monkeypatch.setattr(batched, "PADDING_PER_BLOCK", kept)
        for one, other in zip(gradients(batched), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)


@given(
    first=st.integers(0, 12),
    rows=st.integers(1, 9),
    keys=st.integers(1, 12),
    reach=st.integers(0, 6),
)
def test_diagonals_give_what_a_look_up_by_distance_gives(
    first: int, rows: int, keys: int, reach: int
) -> None:
    """As CUDA computes them, with both gradients."""
    torch.manual_seed(0)
    scores = torch.randn(2, 3, rows, 2 * reach + 1, requires_grad=True)
    weights = torch.randn(2, 3, rows, keys, requires_grad=True)
    distance = torch.arange(keys) - torch.arange(first, first + rows)[:, None]
    index = (distance.clamp(-reach, reach) + reach).expand_as(weights)
    diagonal_pairs = batched._Pairs.apply(scores, keys, first, reach)
    diagonal_mass = batched._Mass.apply(weights, first, reach)
    pairs, mass = scores.gather(-1, index), torch.zeros_like(scores).scatter_add(-1, index, weights)
    torch.testing.assert_close(diagonal_pairs, pairs)
    torch.testing.assert_close(diagonal_mass, mass)
    for actual, expected, leaf in ((diagonal_pairs, pairs, scores), (diagonal_mass, mass, weights)):
        torch.testing.assert_close(
            *(torch.autograd.grad(result.square().sum(), leaf)[0] for result in (actual, expected))
        )
