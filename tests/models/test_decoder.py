"""Decoders: no token sees a later one, and a step with a cache is the full forward."""

from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from manyheads.cache import Cache, DynamicCache, RingLayerCache, StaticCache
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.parts.masks import (
    Blocks,
    Causal,
    Full,
    GlobalTokens,
    Mask,
    Prefix,
    RandomBlocks,
    Window,
)
from manyheads.parts.positions import Rotary
from manyheads.ragged import Ragged
from manyheads.taps import Record, Site, Tap
from tests.models.zoo import DECODERS, SIZE, VOCABULARY, decoder, ids, layer, own, small

# How many tokens of each sequence come at a time: prompts of any length, empty ones too,
# sequences that pause, chunks longer than a window.
STEPS = ((4, 1, 7, 0), (1, 1, 1, 1), (1, 1, 1, 1), (1, 0, 1, 2), (1, 1, 1, 1))
CHUNKS = ((2, 9, 0, 1), (6, 3, 5, 8), (0, 0, 0, 0), (3, 1, 6, 2), (1, 1, 1, 1))
CACHES = {
    "growing from one": DynamicCache(initial_size=1),
    "fixed": StaticCache(size=16),
    "growing without rings": DynamicCache(initial_size=3, ring_buffers=False),
    "fixed without rings": StaticCache(size=16, ring_buffers=False),
}


def pieces(
    texts: Sequence[Tensor], schedule: Sequence[tuple[int, ...]]
) -> Iterator[tuple[Ragged, list[int]]]:
    """The texts a piece at a time, with how much of each has come before."""
    done = [0] * len(texts)
    for counts in schedule:
        ends = [start + count for start, count in zip(done, counts, strict=True)]
        parts = [text[a:b] for text, a, b in zip(texts, done, ends, strict=True)]
        yield Ragged.from_list(parts), done
        done = ends


def totals(schedule: Sequence[tuple[int, ...]]) -> list[int]:
    return [sum(counts) for counts in zip(*schedule, strict=True)]


def assert_near(result: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4)


def assert_decodes(
    model: Decoder, config: DynamicCache | StaticCache, schedule: Sequence[tuple[int, ...]]
) -> Cache:
    """Piece by piece is the same as all at once."""
    texts = ids(totals(schedule))
    cache = model.new_cache(config)
    with torch.no_grad():
        whole = model(texts)
        for piece, done in pieces(texts.to_list(), schedule):
            output = model(piece, cache=cache)
            for sequence, start in enumerate(done):
                stop = start + piece.lengths.each[sequence]
                for result, expected in (
                    (output.hidden, whole.hidden),
                    (output.logits, whole.logits),
                ):
                    assert_near(result.of(sequence), expected.of(sequence)[start:stop])
    assert cache.seen == texts.lengths.each
    return cache


@pytest.mark.parametrize("cache", ["growing from one", "fixed"])
@pytest.mark.parametrize("name", DECODERS)
def test_step_by_step_is_the_full_forward(name: str, cache: str) -> None:
    assert_decodes(small(DECODERS[name]), CACHES[cache], STEPS)


@pytest.mark.parametrize("name", DECODERS)
def test_chunk_by_chunk_is_the_full_forward(name: str) -> None:
    assert_decodes(small(DECODERS[name]), DynamicCache(initial_size=2), CHUNKS)


WINDOWS = [name for name in DECODERS if "window" in name]


@pytest.mark.parametrize("schedule", [STEPS, CHUNKS], ids=["steps", "chunks"])
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_decodes_with_and_without_rings(
    name: str, cache: str, schedule: Sequence[tuple[int, ...]]
) -> None:
    made = assert_decodes(small(DECODERS[name]), CACHES[cache], schedule)
    rings = sum(isinstance(store, RingLayerCache) for store in made.stores)
    windows = sum(
        isinstance(each.attention.inner.mask, Window) for each in DECODERS[name].stack.layers
    )
    assert rings == (windows if CACHES[cache].ring_buffers else 0)


def test_a_ring_goes_round_many_times() -> None:
    assert_decodes(small(DECODERS["window"]), DynamicCache(), ((1, 2),) + ((1, 1),) * 13)


@pytest.mark.parametrize("cache", ["growing from one", "fixed"])
@pytest.mark.parametrize("name", ["llama", "windows and whole", "t5"])
def test_one_sequence_alone_decodes(name: str, cache: str) -> None:
    assert_decodes(small(DECODERS[name]), CACHES[cache], ((3,), (1,), (1,), (4,), (1,)))


def test_padded_pieces_pass_the_same_door() -> None:
    model, texts = small(DECODERS["llama"]), ids((6, 4))
    cache = model.new_cache()
    mask = torch.tensor([[1, 1, 1, 1, 1], [0, 0, 1, 1, 1]])
    padded = torch.zeros(2, 5, dtype=torch.long)
    padded[mask == 1] = torch.cat((texts.of(0)[:5], texts.of(1)[:3]))
    last = torch.stack((texts.of(0)[5:], texts.of(1)[3:]))
    with torch.no_grad():
        whole = model(texts).logits
        first = model(padded, mask=mask, cache=cache).logits
        second = model(last, cache=cache).logits
    assert not first[mask == 0].any()
    assert_near(first[0], whole.of(0)[:5])
    assert_near(first[1, 2:], whole.of(1)[:3])
    assert_near(second[:, 0], torch.stack((whole.of(0)[5], whole.of(1)[3])))


@pytest.mark.parametrize("config", [DynamicCache(initial_size=1), StaticCache(size=16)])
@pytest.mark.parametrize("name", ["llama", "windows and whole", "alibi in a window", "t5"])
def test_selected_sequences_go_on_where_they_were(
    name: str, config: DynamicCache | StaticCache
) -> None:
    model, prompts = small(DECODERS[name]), ids((5, 2, 9))
    cache, order = model.new_cache(config), [2, 0, 2]
    more = ids((4, 4, 4), seed=1)
    whole = [torch.cat((prompts.of(at), more.of(row))) for row, at in enumerate(order)]
    with torch.no_grad():
        model(prompts, cache=cache)
        cache.select(order)
        assert cache.seen == (9, 5, 9)
        result = [
            model(piece, cache=cache).logits.values
            for piece, _ in pieces(more.to_list(), [(1, 1, 1)] * 4)
        ]
        expected = model(Ragged.from_list(whole)).logits
    for row in range(3):
        assert_near(torch.stack(result)[:, row], expected.of(row)[-4:])


@pytest.mark.parametrize("name", DECODERS)
def test_no_token_sees_a_later_one(name: str) -> None:
    model, text = small(DECODERS[name]), ids((10,)).values
    other = text.clone()
    other[6:] = (text[6:] + 1) % VOCABULARY
    with torch.no_grad():
        before, after = model(text[None]).logits[0], model(other[None]).logits[0]
    assert_near(after[:6], before[:6])
    if name != "experts":  # whose experts compute groups of another size
        assert torch.equal(after[:6], before[:6])
    assert (after[6:] - before[6:]).abs().amax(1).min() > 1e-3


@pytest.mark.parametrize("mask", [Full(), Window(2, 1), Prefix(4), Blocks(3)], ids=str)
def test_a_model_that_sees_ahead_refuses_a_cache(mask: Mask) -> None:
    model = build(decoder(layer(own(mask=Causal())), layer(None), layer(own(mask=mask))))
    with pytest.raises(ConfigError) as caught:
        model.new_cache()
    assert f"layer 2, {mask}, sees later tokens" in caught.value.problem
    assert caught.value.remedy == (
        "use Causal() or a window without `after`, or run without a cache"
    )
    with torch.no_grad():
        assert model(ids()).logits.values.isfinite().all()


@pytest.mark.parametrize(
    "mask",
    [Causal() & RandomBlocks(2), Causal() & (Window(1) | GlobalTokens((0, -2)))],
    ids=["random blocks", "tokens counted from the end"],
)
def test_a_mask_that_moves_as_a_text_grows_refuses_a_cache(mask: Mask) -> None:
    model = build(decoder(layer(own(mask=mask))))
    with pytest.raises(ConfigError, match="layer 0"):
        model.new_cache()


@pytest.mark.parametrize("mask", [Causal() & GlobalTokens((0, 2)), Causal() & Blocks(3)], ids=str)
def test_a_mask_of_fixed_places_decodes(mask: Mask) -> None:
    assert_decodes(small(decoder(layer(own(mask=mask)))), DynamicCache(initial_size=1), STEPS)


def test_a_full_cache_is_refused_with_the_size_it_needs_and_stays_as_it_was() -> None:
    model = small(DECODERS["llama"])
    cache = model.new_cache(StaticCache(size=6))
    with torch.no_grad():
        model(ids((6, 2)), cache=cache)
        with pytest.raises(
            InputError, match=r"a cache of 6 tokens cannot hold 7: use StaticCache\(size=7"
        ):
            model(ids((1, 1)), cache=cache)
        assert cache.seen == (6, 2)
        model(ids((0, 4)), cache=cache)
    assert cache.seen == (6, 6)


def test_gradients_are_refused_while_decoding() -> None:
    model = small(DECODERS["llama"])
    with pytest.raises(InputError, match=r"keeps no gradients.*: decode under"):
        model(ids(), cache=model.new_cache())


def test_another_number_of_sequences_is_refused() -> None:
    model = small(DECODERS["llama"])
    cache = model.new_cache()
    with torch.no_grad():
        model(ids((3, 2)), cache=cache)
        with pytest.raises(InputError, match=r"holds 2 sequences, .* 3: make a new"):
            model(ids((1, 1, 1)), cache=cache)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_a_cache_takes_the_memory_of_its_arithmetic(kv_heads: int, dtype: torch.dtype) -> None:
    config = decoder(
        *[layer(own(mask=Causal(), kv_heads=kv_heads, position=Rotary()))] * 2,
        layer(None),
        layer(own(mask=Window(99), kv_heads=kv_heads)),
    )
    model = build(config, seed=0, dtype=dtype)
    cache = model.new_cache(StaticCache(size=8192))
    with torch.no_grad():
        model(ids((3, 1)), cache=cache)
    tokens = 2 * 8192 + 100
    assert cache.nbytes == 2 * tokens * 2 * kv_heads * SIZE * dtype.itemsize


def test_a_growing_cache_doubles() -> None:
    model = small(DECODERS["llama"])
    cache, capacities = model.new_cache(DynamicCache(initial_size=2)), []
    with torch.no_grad():
        for count in (1, 1, 1, 1, 1, 12):
            model(ids((count,)), cache=cache)
            capacities.append(cache.stores[0].capacity)
    assert capacities == [2, 2, 4, 4, 8, 32]
    assert cache.nbytes == 2 * 2 * 32 * 2 * SIZE * 4


def test_keys_of_other_layers_are_not_worked_out_again(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(DECODERS["llama"])
    cache, projected = model.new_cache(), []
    forward = torch.nn.Linear.forward

    def counted(self: Any, x: Tensor) -> Tensor:
        projected.append(x.shape[0])
        return forward(self, x)

    with torch.no_grad():
        model(ids((7, 5)), cache=cache)
        monkeypatch.setattr(torch.nn.Linear, "forward", counted)
        model(ids((1, 1)), cache=cache)
    assert set(projected) == {2}


@pytest.mark.parametrize("name", ["llama", "t5", "window", "alibi in a window"])
def test_the_pattern_of_a_step_is_the_last_row_of_the_whole(name: str) -> None:
    model, texts = small(DECODERS[name]), ids((10, 3))
    site = Site(1, Tap.PATTERN)
    whole, step = Record([site]), Record([site])
    cache = model.new_cache()
    with torch.no_grad():
        model(texts, watch=whole)
        model(Ragged.from_list([text[:-1] for text in texts.to_list()]), cache=cache)
        model(Ragged.from_list([text[-1:] for text in texts.to_list()]), cache=cache, watch=step)
    for sequence in range(2):
        result = step[site].of(sequence)
        # A ring holds no more than the window sees.
        assert_near(result, whole[site].of(sequence)[:, -1:, -result.shape[-1] :])
        torch.testing.assert_close(result.sum(-1), torch.ones_like(result[..., 0]))
