"""Mixtures of experts give the logits, and share the work, as in `transformers`."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import (
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from manyheads.checkpoints.families.decoders.qwen_hybrid import QWEN_NEXT
from manyheads.models.build import build
from manyheads.models.recipes import llama
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts

THEIRS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "vocab_size": VOCABULARY,
    "num_experts_per_tok": 2,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
OURS: dict[str, Any] = {
    "width": 48,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 12,
    "hidden": 40,
    "layers": 2,
    "vocabulary": VOCABULARY,
    "theta": 10_000.0,
    "tied": False,
    "experts": 6,
    "top_k": 2,
}


def mixtral() -> MixtralForCausalLM:
    peer = MixtralForCausalLM(MixtralConfig(**THEIRS, intermediate_size=40, num_local_experts=6))
    copying.scramble(peer)
    return peer.eval()


def test_mixtral_gives_the_same_logits() -> None:
    peer, ours = mixtral(), build(llama(**OURS))
    copying.llama(peer, ours)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts())).logits
    assert_same(result, each_alone(peer, texts()))


def test_the_balance_loss_equals_transformers_for_one_choice_per_token() -> None:
    peer, ours = mixtral(), build(llama(**OURS))
    copying.llama(peer, ours)
    text = texts((23,))[0]
    with torch.no_grad():
        logits = peer(text[None], output_router_logits=True).router_logits
        losses = ours(text[None]).router
    assert len(losses) == len(logits) == 2
    for loss, layer in zip(losses, logits, strict=True):
        expected = load_balancing_loss_func((layer,), num_experts=6, top_k=2)
        torch.testing.assert_close(loss.balance, expected / 2, atol=1e-5, rtol=0)


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_with_experts_gives_the_same_logits(renormalize: bool) -> None:
    peer = Qwen3MoeForCausalLM(
        Qwen3MoeConfig(
            **THEIRS, moe_intermediate_size=40, num_experts=6, norm_topk_prob=renormalize
        )
    ).eval()
    copying.scramble(peer)
    config = llama(**OURS, norm_heads=True)
    layers = tuple(
        replace(
            layer,
            feedforward=replace(
                layer.feedforward, inner=replace(layer.feedforward.inner, renormalize=renormalize)
            ),
        )
        for layer in cast(Any, config).stack.layers
    )
    ours = build(replace(config, stack=replace(config.stack, layers=layers)))
    copying.llama(peer, ours)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts())).logits
    assert_same(result, each_alone(peer, texts()))


@pytest.mark.parametrize("renormalize", [True, False])
def test_qwen3_next_gates_the_expert_that_all_tokens_share(renormalize: bool) -> None:
    described = Qwen3NextConfig(
        **THEIRS,
        moe_intermediate_size=40,
        shared_expert_intermediate_size=28,
        num_experts=6,
        norm_topk_prob=renormalize,
        layer_types=["full_attention"] * 2,
        partial_rotary_factor=0.5,
    )
    peer = Qwen3NextForCausalLM(described).eval()
    copying.scramble(peer)
    ours = build(QWEN_NEXT.read_config(described.to_dict()))
    copying.llama(peer, ours)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts())).logits
    assert_same(result, each_alone(peer, texts(), use_cache=False))
