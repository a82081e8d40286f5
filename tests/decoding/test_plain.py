"""Ordinary decoders on the CPU step without their layers being called, to the same numbers."""

from typing import Any

import pytest
import torch
from torch import nn

from manyheads import DynamicCache, Ragged, StaticCache, build
from manyheads.decoding.plain import cannot
from manyheads.decoding.steps import Cached
from tests.models import zoo

ORDINARY = {
    "gpt2",
    "sinusoidal",
    "llama",
    "one key head",
    "window",
    "windows and whole",
    "normed heads",
}
CACHES = (
    DynamicCache(initial_size=4),
    DynamicCache(initial_size=4, ring_buffers=False),
    StaticCache(size=30),
)


@pytest.mark.parametrize("name", zoo.DECODERS)
def test_it_serves_decoders_of_ordinary_parts(name: str) -> None:
    assert (cannot(zoo.small(zoo.DECODERS[name])) is None) == (name in ORDINARY)


@pytest.mark.parametrize("name", sorted(ORDINARY))
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", [(6,), (1, 9, 3)])
def test_scores_are_those_of_the_layers(
    name: str, cache: DynamicCache | StaticCache, lengths: tuple[int, ...]
) -> None:
    model = zoo.small(zoo.DECODERS[name])
    steps, layers = Cached(model, cache), model.new_cache(cache)
    steps.start(zoo.ids(lengths))
    more = zoo.ids((9,) * len(lengths), seed=1).values.view(len(lengths), 9)
    with torch.inference_mode():
        model(zoo.ids(lengths), cache=layers)
        for tokens in more.T:
            expected = model(tokens[:, None], cache=layers).logits[:, 0]
            torch.testing.assert_close(steps.next(tokens), expected, atol=1e-5, rtol=1e-5)
    assert steps.cache.seen == layers.seen == tuple(length + 9 for length in lengths)


@pytest.mark.parametrize("name", ["gpt2", "llama", "normed heads"])
def test_half_precision_agrees_too(name: str) -> None:
    model = build(zoo.DECODERS[name], seed=0, dtype=torch.bfloat16)
    steps, layers = Cached(model, DynamicCache()), model.new_cache()
    with torch.inference_mode():
        steps.start(zoo.ids((6,)))
        model(zoo.ids((6,)), cache=layers)
        expected = model(torch.tensor([[3]]), cache=layers).logits[0]
    torch.testing.assert_close(steps.next(torch.tensor([3])), expected, atol=0.05, rtol=0.05)


def test_texts_that_leave_until_one_is_alone_change_nothing_for_it() -> None:
    model = zoo.small(zoo.DECODERS["windows and whole"])
    steps = Cached(model, DynamicCache(initial_size=4))
    tokens = zoo.ids((9, 3, 14)).to_list()
    steps.start(Ragged.from_list(tokens))
    steps.next(torch.tensor([1, 2, 3]))
    steps.select([2])
    found = steps.next(torch.tensor([4]))
    with torch.no_grad():
        whole = model(torch.cat([tokens[2], torch.tensor([3, 4])])[None]).logits[0, -1:]
    torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_a_text_alone_may_become_several_and_one_again() -> None:
    model = zoo.small(zoo.DECODERS["windows and whole"])
    steps, tokens = Cached(model, DynamicCache(initial_size=4)), zoo.ids((3,)).values
    steps.start(Ragged.from_list([tokens]))
    texts = [tokens.tolist()]
    for number in range(20):
        # Beams part after some steps, and in the end one of them is left.
        if number in (3, 14):
            chosen = [0, 0, 0] if number == 3 else [1]
            steps.select(chosen)
            texts = [list(texts[place]) for place in chosen]
        new = [7 * number % 11 + place for place in range(len(texts))]
        found = steps.next(torch.tensor(new))
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        with torch.no_grad():
            whole = model(torch.tensor(texts)).logits[:, -1]
        torch.testing.assert_close(found, whole, atol=1e-4, rtol=1e-4)


def test_hooks_and_other_projections_are_not_passed_over() -> None:
    hooked: Any = build(zoo.DECODERS["gpt2"], seed=0)
    called = []
    hooked.stack.layers[1].register_forward_hook(lambda *_: called.append(1))
    steps = Cached(hooked, DynamicCache())
    steps.start(zoo.ids((4,)))
    steps.next(torch.tensor([1]))
    assert len(called) == 2

    class Doubled(nn.Linear):
        """More than its weight."""

    changed: Any = build(zoo.DECODERS["gpt2"], seed=0)
    changed.stack.layers[0].feedforward.expand = Doubled(zoo.WIDTH, 40)
    assert cannot(changed) == "a Doubled is more than its weight"
    changed.stack.layers[0].feedforward.expand = nn.Sequential(nn.Linear(zoo.WIDTH, 40))
    assert cannot(changed) == "a projection is more than its weight"
