"""The CPU step gives the logits of the layers without calling them."""

from typing import Any

import pytest
import torch

from manyheads import DynamicCache, Ragged, StaticCache, build
from manyheads.decoding.steps.cached import CachedSteps
from manyheads.decoding.steps.cpu_step import cannot
from tests.decoding.steps.test_ordinary import ORDINARY
from tests.models import zoo

CACHES = (
    DynamicCache(initial_size=4),
    DynamicCache(initial_size=4, ring_buffers=False),
    StaticCache(size=30),
)


@pytest.mark.parametrize("name", zoo.DECODERS)
def test_it_computes_the_steps_of_ordinary_decoders(name: str) -> None:
    assert (cannot(zoo.small(zoo.DECODERS[name])) is None) == (name in ORDINARY)


@pytest.mark.parametrize("name", sorted(ORDINARY))
@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", [(6,), (1, 9, 3)])
def test_logits_are_those_of_the_layers(
    name: str, cache: DynamicCache | StaticCache, lengths: tuple[int, ...]
) -> None:
    model = zoo.small(zoo.DECODERS[name])
    steps, layers = CachedSteps(model, cache), model.new_cache(cache)
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
    steps, layers = CachedSteps(model, DynamicCache()), model.new_cache()
    with torch.inference_mode():
        steps.start(zoo.ids((6,)))
        model(zoo.ids((6,)), cache=layers)
        expected = model(torch.tensor([[3]]), cache=layers).logits[0]
    torch.testing.assert_close(steps.next(torch.tensor([3])), expected, atol=0.05, rtol=0.05)


def test_sequences_that_leave_the_batch_do_not_change_the_last_one() -> None:
    model = zoo.small(zoo.DECODERS["windows and whole"])
    steps = CachedSteps(model, DynamicCache(initial_size=4))
    tokens = zoo.ids((9, 3, 14)).to_list()
    steps.start(Ragged.from_list(tokens))
    steps.next(torch.tensor([1, 2, 3]))
    steps.select([2])
    result = steps.next(torch.tensor([4]))
    with torch.no_grad():
        whole = model(torch.cat([tokens[2], torch.tensor([3, 4])])[None]).logits[0, -1:]
    torch.testing.assert_close(result, whole, atol=1e-4, rtol=1e-4)


def test_one_sequence_may_become_several_beams_and_one_again() -> None:
    model = zoo.small(zoo.DECODERS["windows and whole"])
    steps, tokens = CachedSteps(model, DynamicCache(initial_size=4)), zoo.ids((3,)).values
    steps.start(Ragged.from_list([tokens]))
    texts = [tokens.tolist()]
    for number in range(20):
        # Beams part after some steps, and in the end one of them is left.
        if number in (3, 14):
            chosen = [0, 0, 0] if number == 3 else [1]
            steps.select(chosen)
            texts = [list(texts[place]) for place in chosen]
        new = [7 * number % 11 + place for place in range(len(texts))]
        result = steps.next(torch.tensor(new))
        for text, token in zip(texts, new, strict=True):
            text.append(token)
        with torch.no_grad():
            whole = model(torch.tensor(texts)).logits[:, -1]
        torch.testing.assert_close(result, whole, atol=1e-4, rtol=1e-4)


def test_hooks_are_called_at_every_step() -> None:
    hooked: Any = build(zoo.DECODERS["gpt2"], seed=0)
    called = []
    hooked.stack.layers[1].register_forward_hook(lambda *_: called.append(1))
    steps = CachedSteps(hooked, DynamicCache())
    steps.start(zoo.ids((4,)))
    steps.next(torch.tensor([1]))
    assert len(called) == 2


def test_a_model_on_another_device_is_refused() -> None:
    model = build(zoo.DECODERS["llama"], seed=0).to("meta")
    assert "on meta" in str(cannot(model))
