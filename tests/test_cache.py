"""A step with a cache gives what the full forward gives, whatever store keeps the keys."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from manyheads.attention import Attention, AttentionConfig
from manyheads.cache import (
    Cache,
    CacheSlot,
    DynamicCache,
    FullLayerCache,
    KeyValues,
    RingLayerCache,
    StaticCache,
)
from manyheads.errors import ConfigError, InputError
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Mask, Prefix, Window
from manyheads.parts.positions import (
    Alibi,
    AttentionPosition,
    NoPosition,
    Rotary,
    Shaw,
    T5Buckets,
)
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Record, Site, Tap, WatchContext

WIDTH, HEADS, SIZE = 8, 4, 4

MASKS: dict[str, Mask] = {
    "causal": Causal(),
    "window": Window(3),
    "window of one": Window(0),
    "causal and window": Causal() & Window(4, 4),
    "prefix and causal": Prefix(3) & Causal(),
    "window and blocks": Window(4) & Blocks(3, before=1, after=0),
    "window with a global token": Causal() & (Window(2) | GlobalTokens((0,))),
}
RINGS = ("window", "window of one", "causal and window")

POSITIONS: dict[str, AttentionPosition] = {
    "nowhere": NoPosition(),
    "rotary": Rotary(),
    "alibi": Alibi(),
    "t5": T5Buckets(buckets=8, reach=10, bidirectional=False),
    "shaw": Shaw(reach=2),
}

CONFIGS: dict[str, DynamicCache | StaticCache] = {
    "growing": DynamicCache(initial_size=2),
    "growing without rings": DynamicCache(initial_size=1, ring_buffers=False),
    "fixed": StaticCache(size=30),
}


def made(**choices: Any) -> Attention:
    layer = Attention(AttentionConfig(width=WIDTH, heads=HEADS, head_size=SIZE, **choices))
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return layer.eval()


def drawn(each: list[int]) -> Ragged:
    return Ragged(torch.randn(sum(each), WIDTH), Lengths.of(each))


def step(
    layer: Attention, cache: Cache, new: Ragged, context: WatchContext | None = None
) -> Ragged:
    plan = cache.plan(new.lengths)
    store = cache.stores[0]
    assert store is not None
    output = layer(new, cache=CacheSlot(store, plan), context=context)
    cache.finish(plan)
    return output


def decoded(layer: Attention, cache: Cache, batch: Ragged, steps: list[list[int]]) -> list[Tensor]:
    """The outputs of each sequence, fed so many tokens of it at each step."""
    count = len(batch)
    fed, outputs = [0] * count, [[torch.zeros(0, WIDTH)] for _ in range(count)]
    for counts in steps:
        new = [batch.of(i)[fed[i] : fed[i] + counts[i]] for i in range(count)]
        output = step(layer, cache, Ragged.from_list(new))
        for index in range(count):
            outputs[index].append(output.of(index))
            fed[index] += counts[index]
    assert cache.seen == tuple(fed) == batch.lengths.each
    return [torch.cat(each) for each in outputs]


def totals(steps: list[list[int]]) -> list[int]:
    return [sum(counts) for counts in zip(*steps, strict=True)]


def agrees(layer: Attention, config: DynamicCache | StaticCache, steps: list[list[int]]) -> Cache:
    cache = Cache([layer.config.mask], config)
    batch = drawn(totals(steps))
    with torch.no_grad():
        full = layer(batch).to_list()
        result = decoded(layer, cache, batch, steps)
    for one, other in zip(result, full, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    return cache


chunks = st.integers(1, 3).flatmap(
    lambda batch: st.lists(
        st.lists(st.integers(0, 1) | st.integers(0, 5), min_size=batch, max_size=batch),
        min_size=1,
        max_size=5,
    )
)

PROMPT_AND_STEPS = [[5, 0, 2], [1, 1, 1], [0, 3, 1], [4, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize("position", POSITIONS)
@pytest.mark.parametrize("mask", MASKS)
def test_a_step_equals_the_full_forward(mask: str, position: str, kv_heads: int) -> None:
    layer = made(mask=MASKS[mask], position=POSITIONS[position], kv_heads=kv_heads)
    agrees(layer, CONFIGS["growing"], PROMPT_AND_STEPS)


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("mask", MASKS)
def test_every_kind_of_room_serves_every_mask(mask: str, config: str) -> None:
    layer = made(mask=MASKS[mask], position=Alibi(), kv_heads=2)
    agrees(layer, CONFIGS[config], PROMPT_AND_STEPS)


@given(
    steps=chunks,
    mask=st.sampled_from(list(MASKS)),
    position=st.sampled_from(list(POSITIONS)),
    kv_heads=st.sampled_from([4, 2, 1]),
    config=st.sampled_from(list(CONFIGS)),
)
def test_tokens_may_come_in_any_chunks(
    steps: list[list[int]], mask: str, position: str, kv_heads: int, config: str
) -> None:
    layer = made(mask=MASKS[mask], position=POSITIONS[position], kv_heads=kv_heads)
    agrees(layer, CONFIGS[config], steps)


def test_one_token_at_a_time_goes_round_the_ring_many_times() -> None:
    layer = made(mask=Window(2), position=Rotary(), kv_heads=2)
    cache = agrees(layer, DynamicCache(), [[1, 1]] * 11)
    assert isinstance(cache.stores[0], RingLayerCache)


def test_a_prompt_longer_than_the_ring_leaves_its_last_tokens() -> None:
    layer = made(mask=Window(2), position=Alibi())
    agrees(layer, DynamicCache(), [[9, 3], [1, 1], [7, 1], [1, 6]])


def test_a_prefix_fed_whole_is_a_prefix() -> None:
    layer = made(mask=Prefix(3), position=Rotary())
    agrees(layer, DynamicCache(initial_size=2), [[3, 5], [1, 1], [2, 1]])


def test_gates_norms_and_sinks_decode_as_they_train() -> None:
    layer = made(
        mask=Window(3),
        position=Rotary(),
        kv_heads=2,
        sink="learned",
        head_scale="learned",
        gates=(Gate(at="output", per="channel"), Gate(at="key"), Gate(at="value")),
    )
    agrees(layer, DynamicCache(initial_size=2), PROMPT_AND_STEPS)


def test_a_watched_step_shows_all_keys_it_sees() -> None:
    layer = made(mask=Causal(), position=Alibi())
    cache = Cache([Causal()], DynamicCache(initial_size=2))
    batch = drawn([6, 4])
    site = Site(0, Tap.PATTERN)
    with torch.no_grad():
        whole = Record([site])
        layer(batch, context=WatchContext(whole, layer=0))
        step(layer, cache, Ragged.from_list([batch.of(0)[:5], batch.of(1)[:3]]))
        last = Record([site])
        new = Ragged.from_list([batch.of(0)[5:], batch.of(1)[3:]])
        step(layer, cache, new, WatchContext(last, layer=0))
    for index in range(2):
        torch.testing.assert_close(last[site].of(index), whole[site].of(index)[:, -1:])


@pytest.mark.parametrize("mask", MASKS)
def test_only_a_causal_window_is_kept_in_a_ring(mask: str) -> None:
    (store,) = Cache([MASKS[mask]], DynamicCache()).stores
    assert isinstance(store, RingLayerCache if mask in RINGS else FullLayerCache)
    (store,) = Cache([MASKS[mask]], DynamicCache(ring_buffers=False)).stores
    assert isinstance(store, FullLayerCache)


def test_masks_that_look_ahead_are_kept_in_slots() -> None:
    masks: list[Mask | None] = [Full(), Window(3, 3), Blocks(4), Prefix(2), None]
    kinds = [type(store) for store in Cache(masks, DynamicCache()).stores]
    assert kinds == [FullLayerCache, FullLayerCache, FullLayerCache, FullLayerCache, type(None)]


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
@pytest.mark.parametrize(
    ("mask", "config", "capacity"),
    [
        (Causal(), DynamicCache(initial_size=2), 16),
        (Causal(), DynamicCache(initial_size=3), 12),
        (Causal(), DynamicCache(), 64),
        (Causal(), StaticCache(size=20), 20),
        (Window(3), DynamicCache(initial_size=2), 4),
        (Window(3), StaticCache(size=20), 4),
        (Window(3), StaticCache(size=20, ring_buffers=False), 20),
    ],
    ids=str,
)
def test_bytes_are_those_of_the_arithmetic(
    mask: Mask, config: DynamicCache | StaticCache, capacity: int, kv_heads: int
) -> None:
    layer = made(mask=mask, kv_heads=kv_heads)
    assert Cache([mask], config).nbytes == 0
    cache = agrees(layer, config, [[5, 2], [1, 1], [6, 1]])
    assert cache.nbytes == 2 * 2 * capacity * kv_heads * SIZE * 4


@pytest.mark.parametrize("mask", ["causal", "window", "window and blocks"])
@pytest.mark.parametrize("position", ["rotary", "t5"])
@pytest.mark.parametrize("chosen", [[0], [1], [2, 0], [1, 1, 0, 2, 2]], ids=str)
def test_selected_sequences_go_on_in_their_new_order(
    mask: str, position: str, chosen: list[int]
) -> None:
    layer = made(mask=MASKS[mask], position=POSITIONS[position], kv_heads=2)
    cache = Cache([MASKS[mask]], DynamicCache(initial_size=2))
    prompts = drawn([6, 1, 3])
    more = drawn([2] * len(chosen))
    whole = Ragged.from_list(
        [torch.cat((prompts.of(old), more.of(new))) for new, old in enumerate(chosen)]
    )
    with torch.no_grad():
        step(layer, cache, prompts)
        cache.select(chosen)
        assert cache.seen == tuple((6, 1, 3)[old] for old in chosen)
        result = step(layer, cache, more)
        expected = layer(whole)
    for index in range(len(chosen)):
        torch.testing.assert_close(result.of(index), expected.of(index)[-2:], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("mask", ["causal", "window"])
def test_branches_grow_apart_and_leave_the_trunk(mask: str) -> None:
    layer = made(mask=MASKS[mask], kv_heads=2)
    trunk = Cache([MASKS[mask]], DynamicCache(initial_size=2))
    prompt, first, second = drawn([6]), drawn([2, 3]), drawn([4])
    with torch.no_grad():
        step(layer, trunk, prompt)
        step(layer, trunk.branch([0, 0]), first)
        result = step(layer, trunk.branch([0]), second)
        expected = layer(Ragged.from_list([torch.cat((prompt.of(0), second.of(0)))]))
    assert trunk.seen == (6,)
    torch.testing.assert_close(result.of(0), expected.of(0)[-4:], rtol=1e-4, atol=1e-5)


def test_select_takes_the_memory_along() -> None:
    layer = made(keys_from="memory", kv_heads=2)
    cache = Cache([Causal()], DynamicCache())
    memory = drawn([4, 0, 2])
    with torch.no_grad():
        cache.finish(cache.plan(Lengths.of([1, 1, 1])))
        cache.memory[0] = layer.remember(memory)
        cache.select([2, 0, 2])
        expected = layer.remember(memory.select([2, 0, 2]))
    kept = cache.memory[0]
    assert isinstance(kept, KeyValues)
    assert kept.lengths.each == (2, 4, 2)
    assert torch.equal(kept.k, expected.k)
    assert torch.equal(kept.v, expected.v)


def test_a_plan_counts_on_from_what_was_seen() -> None:
    cache = Cache([Causal()], DynamicCache())
    with torch.no_grad():
        cache.finish(cache.plan(Lengths.of([3, 0])))
        plan = cache.plan(Lengths.of([2, 1]))
    assert plan.positions.tolist() == [3, 4, 0]
    assert plan.after == (5, 1)
    assert plan.slots(8).tolist() == [3, 4, 8]


def test_a_plan_not_finished_changes_nothing() -> None:
    layer = made(mask=Causal(), position=Rotary())
    cache = Cache([Causal()], DynamicCache(initial_size=2))
    batch = drawn([5])
    with torch.no_grad():
        step(layer, cache, Ragged.from_list([batch.of(0)[:3]]))
        store = cache.stores[0]
        assert store is not None
        other = drawn([2])
        layer(other, cache=CacheSlot(store, cache.plan(other.lengths)))
        result = step(layer, cache, Ragged.from_list([batch.of(0)[3:]]))
        torch.testing.assert_close(result.values, layer(batch).values[3:], rtol=1e-4, atol=1e-5)


def test_decoding_works_in_inference_mode() -> None:
    layer = made(mask=Window(2), position=Rotary())
    with torch.inference_mode():
        agrees(layer, DynamicCache(initial_size=1), [[3, 1], [1, 1], [1, 2]])


def test_a_full_cache_is_refused_with_a_size_that_holds_the_tokens() -> None:
    layer = made(mask=Causal())
    cache = Cache([Causal()], StaticCache(size=4))
    with torch.no_grad():
        step(layer, cache, drawn([3, 4]))
        remedy = r"use StaticCache\(size=5\) or more, or DynamicCache\(\)"
        with pytest.raises(InputError, match=f"a cache of 4 tokens cannot hold 5: {remedy}"):
            step(layer, cache, drawn([1, 1]))


def test_a_ring_is_never_full() -> None:
    agrees(made(mask=Window(1)), StaticCache(size=2), [[3], [4], [1]])


def test_impossible_uses_are_refused() -> None:
    cache = Cache([Causal()], DynamicCache())
    with pytest.raises(InputError, match=r"gradients.*: decode under torch\.no_grad\(\)"):
        cache.plan(Lengths.of([1]))
    with pytest.raises(ConfigError, match="size must be at least 1, got 0"):
        StaticCache(size=0)
    with pytest.raises(ConfigError, match="initial_size must be at least 1, got 0"):
        DynamicCache(initial_size=0)
    with torch.no_grad():
        cache.finish(cache.plan(Lengths.of([1, 2])))
        with pytest.raises(InputError, match=r"2 sequences, .* has 3: make a new cache, or select"):
            cache.plan(Lengths.of([1, 1, 1]))
    with pytest.raises(InputError, match=r"sequences \[0, 2\] .*: use indices from 0 to 1"):
        cache.select([0, 2])


def test_rows_are_allocated_ahead_and_the_first_share_their_memory() -> None:
    cache = Cache([Causal()], StaticCache(size=8, rows=5))
    store = cache.stores[0]
    assert store is not None
    with torch.no_grad():
        plan = cache.plan(Lengths.of([3, 2]))
        store.append(torch.ones(5, 1, 4), torch.ones(5, 1, 4), plan, ordered=False)
        cache.finish(plan)
    assert store.k.shape == (5, 8, 1, 4)
    first = cache.first(1).stores[0]
    assert first is not None
    assert first.k.shape == (1, 8, 1, 4)
    assert first.k.data_ptr() == store.k.data_ptr()
    assert cache.first(1).seen == (3,)
    # A batch that has shrunk keeps no room for those that left.
    cache.select([1])
    with torch.no_grad():
        plan = cache.plan(Lengths.of([1]))
        store.append(torch.ones(1, 1, 4), torch.ones(1, 1, 4), plan, ordered=False)
    assert store.k.shape == (1, 8, 1, 4)
