"""Masks: what each rule allows, how far it reaches, and what it says of itself."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.errors import ConfigError
from manyheads.parts.masks import (
    Band,
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Mask,
    Prefix,
    RandomBlocks,
    Window,
)
from tests.messages import refuses

small = st.integers(0, 5)
lengths = st.integers(0, 14)
bands = st.one_of(
    st.builds(Full), st.builds(Causal), st.builds(Window, small, small), st.builds(Window, small)
)
single = st.one_of(
    bands,
    st.builds(Prefix, small),
    st.sampled_from([GlobalTokens(places) for places in ((), (0,), (2, -1), (-3, 1, 4))]),
    st.builds(Blocks, st.integers(1, 5), small, small),
    st.builds(RandomBlocks, st.integers(1, 5), st.integers(1, 4), st.integers(0, 9)),
)


def joined(rules: st.SearchStrategy[Mask]) -> st.SearchStrategy[Mask]:
    both = st.tuples(rules, rules)
    return both.map(lambda pair: pair[0] & pair[1]) | both.map(lambda pair: pair[0] | pair[1])


masks = st.recursive(single, joined, max_leaves=4)
joined_bands = st.recursive(bands, joined, max_leaves=4)


def table(mask: Mask, length: int) -> Tensor:
    """Who sees whom, queries down, keys across."""
    place = torch.arange(length)
    return mask.allows(place[:, None], place[None, :], torch.full((1, 1), length))


def by_hand(length: int, sees: Callable[[int, int], bool]) -> Tensor:
    rows = [[sees(i, j) for j in range(length)] for i in range(length)]
    return torch.tensor(rows, dtype=torch.bool).reshape(length, length)


@given(length=lengths, before=small, after=small)
def test_windows_causal_and_all_are_what_their_names_say(
    length: int, before: int, after: int
) -> None:
    assert table(Full(), length).all()
    assert torch.equal(table(Causal(), length), by_hand(length, lambda i, j: j <= i))
    window = by_hand(length, lambda i, j: i - before <= j <= i + after)
    assert torch.equal(table(Window(before, after), length), window)


def test_modernberts_window_holds_129_keys() -> None:
    assert table(Window(64, 64), 300)[150].sum() == 129


def test_all_lets_a_query_before_the_first_key_see_every_key() -> None:
    place = torch.arange(3)
    seen = Full().allows(place[:, None] - 2, place[None, :1], torch.ones(1, 1, dtype=torch.long))
    assert torch.equal(seen, torch.ones(3, 1, dtype=torch.bool))


@given(length=lengths, prefix=small)
def test_a_prefix_is_seen_by_all_and_the_rest_backwards(length: int, prefix: int) -> None:
    expected = by_hand(length, lambda i, j: j < prefix or j <= i)
    assert torch.equal(table(Prefix(prefix), length), expected)


@given(length=lengths, places=st.lists(st.integers(-4, 4), max_size=3))
def test_global_tokens_see_all_and_are_seen_by_all(length: int, places: list[int]) -> None:
    true = {range(length)[place] for place in places if -length <= place < length}
    expected = by_hand(length, lambda i, j: i in true or j in true)
    assert torch.equal(table(GlobalTokens(tuple(places)), length), expected)


@given(length=lengths, size=st.integers(1, 5), before=small, after=small)
def test_blocks_see_the_blocks_around_them(length: int, size: int, before: int, after: int) -> None:
    expected = by_hand(length, lambda i, j: -before <= j // size - i // size <= after)
    assert torch.equal(table(Blocks(size, before, after), length), expected)


@given(
    length=st.integers(1, 40),
    size=st.integers(1, 5),
    count=st.integers(1, 6),
    seed=st.integers(0, 1000),
)
def test_every_block_of_queries_draws_its_number_of_distinct_blocks(
    length: int, size: int, count: int, seed: int
) -> None:
    seen = table(RandomBlocks(size, count, seed), length)
    blocks = -(-length // size)
    for query in range(length):
        drawn = {key // size for key in seen[query].nonzero().flatten().tolist()}
        assert len(drawn) == min(count, blocks)
        # A block is seen whole, and all queries of a block draw the same.
        assert seen[query].sum() == sum(min(size, length - size * block) for block in drawn)
        assert torch.equal(seen[query], seen[query // size * size])


def test_random_blocks_are_drawn_from_the_seed() -> None:
    tables = [table(RandomBlocks(4, 3, seed), 128) for seed in (0, 1, 0)]
    assert torch.equal(tables[0], tables[2])
    assert not torch.equal(tables[0], tables[1])
    rows = table(RandomBlocks(1, 3), 200)
    assert len({tuple(row.tolist()) for row in rows}) > 190


def test_random_blocks_are_spread_over_the_whole_sequence() -> None:
    seen = torch.stack([table(RandomBlocks(1, 2, seed), 16).float() for seed in range(200)])
    share = seen.mean((0, 1))
    torch.testing.assert_close(share, torch.full((16,), 2 / 16), rtol=0.25, atol=0)


@given(mask=masks, length=st.integers(1, 12), other=st.integers(1, 12))
def test_a_rule_is_elementwise(mask: Mask, length: int, other: int) -> None:
    """Pairs of two sequences asked together are answered as if asked alone."""
    pairs = [(i, j, n) for n in (length, other) for i in range(n) for j in range(n)]
    query, key, total = torch.tensor(pairs).unbind(1)
    together = mask.allows(query, key, total)
    alone = torch.cat([table(mask, n).flatten() for n in (length, other)])
    assert torch.equal(together, alone)


@given(first=masks, second=masks, length=lengths)
def test_and_is_both_or_is_either(first: Mask, second: Mask, length: int) -> None:
    a, b = table(first, length), table(second, length)
    assert torch.equal(table(first & second, length), a & b)
    assert torch.equal(table(first | second, length), a | b)


@given(mask=masks, length=lengths)
def test_the_answer_has_the_shape_of_all_three_together(mask: Mask, length: int) -> None:
    place = torch.arange(length)
    answer = mask.allows(place[:, None, None], place[None, :, None], torch.tensor([3, 9]))
    assert answer.shape == (length, length, 2)
    assert answer.dtype == torch.bool


@given(mask=masks, length=lengths)
def test_nothing_is_seen_outside_the_reach(mask: Mask, length: int) -> None:
    reach = mask.reach
    outside = by_hand(length, lambda i, j: i - j > reach.before or j - i > reach.after)
    assert not (table(mask, length) & outside).any()


@pytest.mark.parametrize(
    ("mask", "reach"),
    [
        (Full(), Band(math.inf, math.inf)),
        (Causal(), Band(math.inf, 0)),
        (Window(5, 2), Band(5, 2)),
        (Prefix(4), Band(math.inf, 3)),
        (Prefix(0), Band(math.inf, 0)),
        (Blocks(4, before=2, after=0), Band(11, 3)),
        (Causal() & Window(3, 3), Band(3, 0)),
        (Window(3) | Window(0, 2), Band(3, 2)),
        (Window(3) & GlobalTokens(), Band(3, 0)),
        (Window(3) | GlobalTokens(), Band(math.inf, math.inf)),
    ],
)
def test_the_reach_is_no_wider_than_it_must_be(mask: Mask, reach: Band) -> None:
    assert mask.reach == reach
    seen = table(mask, 40)
    offsets = {int(j - i) for i, j in seen.nonzero()}
    assert -min(offsets) == min(reach.before, 39)
    assert max(offsets) == min(reach.after, 39)


@given(mask=masks, length=lengths)
def test_a_mask_that_fills_its_reach_is_a_band_at_every_length(mask: Mask, length: int) -> None:
    reach = mask.reach
    band = by_hand(length, lambda i, j: i - j <= reach.before and j - i <= reach.after)
    assert not mask.fills_reach or torch.equal(table(mask, length), band)


@given(mask=joined_bands)
def test_bands_joined_in_any_way_are_bands_and_know_it(mask: Mask) -> None:
    assert mask.fills_reach


@pytest.mark.parametrize(
    "mask",
    [
        Prefix(4),
        GlobalTokens((0,)),
        Blocks(4),
        RandomBlocks(4),
        Window(9, 9) & Blocks(4),
        Window(2, 2) | GlobalTokens((0,)),
        Window(2, 2) | Blocks(8, 0, 0),
    ],
)
def test_a_mask_with_holes_in_its_reach_is_known_as_such(mask: Mask) -> None:
    assert not mask.fills_reach
    reach = mask.reach
    band = by_hand(40, lambda i, j: i - j <= reach.before and j - i <= reach.after)
    assert not torch.equal(table(mask, 40), band)


def test_masks_are_values() -> None:
    assert Window(3) | GlobalTokens() == Window(3, 0) | GlobalTokens((0,))
    assert len({Causal() & Window(3), Causal() & Window(3), Window(3) & Causal()}) == 2


def test_impossible_masks_are_refused() -> None:
    with refuses(ConfigError, "before must be at least 0, got -1"):
        Window(-1)
    with refuses(ConfigError, "after must be at least 0, got -3"):
        Window(2, -3)
    with refuses(ConfigError, "length must be at least 0, got -2"):
        Prefix(-2)
    with refuses(ConfigError, "size must be at least 1, got 0"):
        Blocks(0)
    with refuses(ConfigError, "count must be at least 1, got 0"):
        RandomBlocks(4, count=0)
