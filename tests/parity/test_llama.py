"""Llama and its kin give the logits of `transformers`."""

from dataclasses import replace
from typing import Any, cast

import pytest
import torch
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from manyheads.models.build import build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import Branch
from manyheads.models.recipes import llama
from manyheads.parts.masks import Window
from manyheads.parts.norms import PreNorm, RMSNorm
from manyheads.parts.positions import Rotary
from manyheads.parts.positions.rotary import LinearScaling, Llama3Scaling, Scaling, YarnScaling
from manyheads.ragged import Ragged
from tests.parity import copying
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts

THEIRS: dict[str, Any] = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 80,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "attn_implementation": "eager",
}
OURS: dict[str, Any] = {
    "width": 48,
    "heads": 6,
    "kv_heads": 2,
    "head_size": 8,
    "hidden": 80,
    "layers": 3,
    "vocabulary": VOCABULARY,
    "theta": 10_000.0,
    "tied": False,
}


def plain(theta: float = 10_000.0, **scaling: Any) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": theta} | scaling}


def with_attention(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The same model with other attention in all of its layers."""
    layers = []
    for layer in config.stack.layers:
        assert layer.attention is not None
        inner = replace(layer.attention.inner, **changes)
        layers.append(replace(layer, attention=Branch(inner, layer.attention.norm)))
    return replace(config, stack=replace(config.stack, layers=tuple(layers)))


def agree(peer: Any, config: DecoderConfig, lengths: tuple[int, ...] = (7, 1, 23, 12)) -> None:
    peer = peer.eval()
    copying.scramble(peer)
    ours = build(config)
    copying.llama(peer, ours)
    with torch.no_grad():
        result = ours(Ragged.from_list(texts(lengths))).logits
        assert_same(result, each_alone(peer, texts(lengths), use_cache=False))


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 6), (6, 2), (7, 1), (14, 2)])
def test_llama_with_shared_keys(heads: int, kv_heads: int) -> None:
    width = 8 * heads
    shape = {"hidden_size": width, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    peer = LlamaForCausalLM(LlamaConfig(**THEIRS | shape, **plain()))
    agree(peer, llama(**OURS | {"width": width, "heads": heads, "kv_heads": kv_heads}))


def test_llama_with_a_tied_head() -> None:
    peer = LlamaForCausalLM(LlamaConfig(**THEIRS, **plain(), tie_word_embeddings=True))
    agree(peer, llama(**OURS | {"tied": True}))


SCALINGS: dict[str, tuple[Scaling, dict[str, Any]]] = {
    "linear": (LinearScaling(factor=4.0), {"factor": 4.0}),
    "yarn": (
        YarnScaling(factor=4.0, original_length=64),
        {"factor": 4.0, "original_max_position_embeddings": 64},
    ),
    "yarn with its own ramp": (
        YarnScaling(factor=8.0, original_length=40, fast=16.0, slow=2.0),
        {
            "rope_type": "yarn",
            "factor": 8.0,
            "original_max_position_embeddings": 40,
            "beta_fast": 16.0,
            "beta_slow": 2.0,
        },
    ),
    "llama3": (
        Llama3Scaling(factor=8.0, original_length=64, fast=4.0, slow=1.0),
        {
            "factor": 8.0,
            "original_max_position_embeddings": 64,
            "high_freq_factor": 4.0,
            "low_freq_factor": 1.0,
        },
    ),
}


@pytest.mark.parametrize("name", SCALINGS)
def test_llama_stretched_to_longer_texts(name: str) -> None:
    ours, peer = SCALINGS[name]
    config = LlamaConfig(**THEIRS | {"head_dim": 16}, **plain(**{"rope_type": name} | peer))
    changed = llama(**OURS | {"head_size": 16})
    changed = with_attention(changed, position=Rotary(theta=10_000.0, scaling=ours))
    agree(LlamaForCausalLM(config), changed, lengths=(5, 1, 130))


def test_qwen2_with_bias_on_query_key_and_value() -> None:
    peer = Qwen2ForCausalLM(Qwen2Config(**THEIRS, **plain()))
    agree(peer, with_attention(llama(**OURS), bias="inputs"))


@pytest.mark.parametrize("head_size", [6, 8, 20])
def test_qwen3_with_heads_of_their_own_size(head_size: int) -> None:
    peer = Qwen3ForCausalLM(Qwen3Config(**THEIRS | {"head_dim": head_size}, **plain(1e6)))
    agree(peer, llama(**OURS | {"head_size": head_size, "theta": 1e6}, norm_heads=True))


@pytest.mark.parametrize("window", [1, 4, 9, 64])
def test_mistral_sees_a_window(window: int) -> None:
    peer = MistralForCausalLM(MistralConfig(**THEIRS, **plain(), sliding_window=window))
    agree(peer, with_attention(llama(**OURS), mask=Window(window - 1)), lengths=(7, 1, 40))


def test_gated_attention_of_qwen3_next() -> None:
    """Output gates inside the query projection, norms of 1 + weight, a quarter of a head turned."""
    peer = Qwen3NextForCausalLM(
        Qwen3NextConfig(
            **THEIRS,
            **plain(partial_rotary_factor=0.25),
            layer_types=["full_attention"] * 3,
            mlp_only_layers=[0, 1, 2],
        )
    )
    norm = RMSNorm(eps=1e-5, centered=True)
    config = with_attention(
        llama(**OURS, norm_heads=True, gate="channel"),
        position=Rotary(theta=10_000.0, fraction=0.25),
        query_norm=norm,
        key_norm=norm,
    )
    layers = tuple(
        replace(
            layer,
            attention=replace(layer.attention, norm=PreNorm(norm)),
            feedforward=replace(layer.feedforward, norm=PreNorm(norm)),
        )
        for layer in cast(Any, config).stack.layers
    )
    stack = replace(config.stack, layers=layers, final_norm=norm)
    agree(peer, replace(config, stack=stack))
