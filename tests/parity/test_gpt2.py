"""GPT-2 gives the logits, the gradients and the cached steps of `transformers`."""

from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel

from manyheads.models.build import build
from manyheads.models.decoder import Decoder
from manyheads.models.recipes import gpt2
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import LENGTHS, VOCABULARY, assert_same, each_alone, texts


@pytest.fixture(scope="module")
def pair() -> tuple[GPT2LMHeadModel, Decoder]:
    peer = GPT2LMHeadModel(
        GPT2Config(
            n_embd=48,
            n_layer=3,
            n_head=4,
            n_positions=32,
            vocab_size=VOCABULARY,
            bos_token_id=0,
            eos_token_id=0,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    ours = build(gpt2(width=48, heads=4, layers=3, vocabulary=VOCABULARY, positions=32))
    copying.gpt2(peer, ours)
    return peer, ours


def test_logits_are_those_of_transformers(pair: tuple[GPT2LMHeadModel, Decoder]) -> None:
    peer, ours = pair
    batch = Ragged.from_list(texts())
    with torch.no_grad():
        assert_same(ours(batch).logits, each_alone(peer, texts()))


def test_gradients_are_those_of_transformers(pair: tuple[GPT2LMHeadModel, Decoder]) -> None:
    peer, ours = pair
    for model in pair:
        model.zero_grad()
    for text in texts():
        peer(text[None]).logits.square().sum().backward()
    ours(Ragged.from_list(texts())).logits.values.square().sum().backward()
    result: Any = ours.embedding.tokens.weight.grad
    expected = peer.transformer.wte.weight.grad
    torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
    joined = peer.transformer.h[1].attn.c_attn.weight.grad.T
    result = ours.stack.layers[1].attention.project.weight.grad
    torch.testing.assert_close(result, joined, rtol=1e-4, atol=1e-4 * float(joined.abs().max()))


def test_steps_with_a_cache_give_the_logits_of_transformers(
    pair: tuple[GPT2LMHeadModel, Decoder],
) -> None:
    peer, ours = pair
    prompts, more = texts(), texts((4,) * len(LENGTHS), seed=1)
    cache, result = ours.new_cache(), []
    with torch.no_grad():
        ours(Ragged.from_list(prompts), cache=cache)
        for step in range(4):
            token = Ragged.from_list([text[step : step + 1] for text in more])
            result.append(ours(token, cache=cache).logits.values)
    whole = [torch.cat(both) for both in zip(prompts, more, strict=True)]
    expected = [logits[-4:] for logits in each_alone(peer, whole)]
    assert_same(torch.stack(result, dim=1), expected)
