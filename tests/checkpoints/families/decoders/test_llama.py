"""Llama, Mistral, Qwen2 and Qwen3 folders."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from manyheads import build, load, save
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.decoders.qwen import with_attention
from manyheads.errors import ConfigError, InputError
from manyheads.models.layer import Branch
from manyheads.parts.masks import Causal, Window
from manyheads.parts.positions.rotary import Llama3Scaling
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized
from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_generation

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 16,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "llama": LlamaConfig(**SMALL),
    "llama, 7 to 1": LlamaConfig(
        **SMALL | {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
    ),
    "llama, tied, biases": LlamaConfig(
        **SMALL, tie_word_embeddings=True, attention_bias=True, mlp_bias=True
    ),
    "llama3 scaling": LlamaConfig(**SMALL, rope_parameters=LLAMA3),
    "yarn": LlamaConfig(**SMALL, rope_parameters=YARN),
    "yarn, own attention factor": LlamaConfig(
        **SMALL, rope_parameters=YARN | {"attention_factor": 1.7, "truncate": False}
    ),
    "yarn, mscale": LlamaConfig(
        **SMALL, rope_parameters=YARN | {"mscale": 0.7, "mscale_all_dim": 1.3}
    ),
    # Theirs goes on with the rotation of the longest text so far, until one is this short.
    "dynamic": LlamaConfig(
        **SMALL | {"max_position_embeddings": 13},
        rope_parameters={"rope_type": "dynamic", "rope_theta": 100.0, "factor": 2.0},
    ),
    "linear": LlamaConfig(
        **SMALL, rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 2.0}
    ),
    "mistral, short window": MistralConfig(**SMALL, sliding_window=4),
    "mistral, long window": MistralConfig(**SMALL, sliding_window=64),
    "qwen2": Qwen2Config(**SMALL),
    "qwen2, windows above": Qwen2Config(
        **SMALL, use_sliding_window=True, sliding_window=5, max_window_layers=1
    ),
    "qwen3, wide heads": Qwen3Config(**SMALL, head_dim=20, tie_word_embeddings=True),
}


def peer(config: Any) -> Any:
    return randomized(AutoModelForCausalLM.from_config(config, attn_implementation="eager"))


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, tmp_path: Path) -> None:
    def opener(place: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")

    check_decoder(peer(CONFIGS[name]), opener, tmp_path)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_any_number_of_heads_opens_in_transformers(family: str, tmp_path: Path) -> None:
    shape = {"layers": 2, "width": 32, "heads": 3, "kv_heads": 1, "head_size": 8, "hidden": 24}
    plain: Any = build("llama-1b-shape", **shape, vocabulary=VOCABULARY, seed=0)
    bias = "inputs" if family == "qwen2" else "none"
    model = build(with_attention(plain.config, bias=bias), seed=0)
    saved = save(model, tmp_path)
    assert (saved.family, saved.opened_by) == (
        "qwen2" if family == "qwen2" else "mistral",
        "transformers",
    )
    there = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    ids = torch.arange(VOCABULARY)[None, :20]
    with torch.no_grad():
        torch.testing.assert_close(model(ids).logits, there(ids).logits, atol=1e-5, rtol=0)
    assert load(tmp_path).config == model.config


def test_with_biases_a_llama_of_odd_heads_is_saved_as_our_own(tmp_path: Path) -> None:
    shape = {"layers": 1, "width": 32, "heads": 3, "kv_heads": 1, "head_size": 8, "hidden": 24}
    plain: Any = build("llama-1b-shape", **shape, vocabulary=VOCABULARY, seed=0)
    model = build(with_attention(plain.config, bias="all"), seed=0)
    assert save(model, tmp_path).family == "manyheads"
    assert load(tmp_path).config == model.config


def test_older_spelling_of_rotary_scaling_is_read() -> None:
    old = {
        "model_type": "llama",
        "rms_norm_eps": 1e-5,
        "rope_theta": 500.0,
        "rope_scaling": {key: value for key, value in LLAMA3.items() if key != "rope_theta"},
        **SMALL,
    }
    position = LLAMA.read_config(old).stack.layers[0].attention.inner.position
    assert position.theta == 500.0
    assert position.scaling == Llama3Scaling(factor=4.0, original_length=16, fast=4.0, slow=1.0)


def test_mistral_without_a_window_sees_all_that_came_before() -> None:
    peer = {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": None, **SMALL}
    masks = {layer.attention.inner.mask for layer in LLAMA.read_config(peer).stack.layers}
    assert masks == {Causal()}
    masks = {
        layer.attention.inner.mask
        for layer in LLAMA.read_config({**peer, "sliding_window": 8}).stack.layers
    }
    assert masks == {Window(7)}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"rope_parameters": {"rope_type": "spiral", "factor": 2.0}}, "rope_type='spiral'"),
        ({"hidden_act": "relu"}, "hidden_act='relu'"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        LLAMA.read_config({"model_type": "llama", "rms_norm_eps": 1e-5, **SMALL, **changes})


def test_a_config_that_contradicts_itself_is_refused(tmp_path: Path) -> None:
    peer(CONFIGS["llama"]).save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["num_key_value_heads"] = 4
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"kv_heads must divide heads=6 .*got 4"):
        load(tmp_path)


@pytest.mark.parametrize("family", ["mistral", "qwen2", "qwen3"])
def test_biases_that_only_llamas_class_reads_are_not_read_elsewhere(family: str) -> None:
    peer = {"model_type": family, "rms_norm_eps": 1e-5, **SMALL}
    said = LLAMA.read_config({**peer, "mlp_bias": True})
    assert said == LLAMA.read_config(peer)
    assert LLAMA.read_config({**peer, "model_type": "llama", "mlp_bias": True}) != said


def test_a_decoder_of_windows_with_biases_is_no_mistral(tmp_path: Path) -> None:
    peer = {"model_type": "mistral", "rms_norm_eps": 1e-5, "sliding_window": 8, **SMALL}
    layers = tuple(
        replace(
            layer,
            attention=Branch(replace(layer.attention.inner, bias="all"), layer.attention.norm),
        )
        for layer in LLAMA.read_config(peer).stack.layers
    )
    plain = LLAMA.read_config(peer)
    model = build(replace(plain, stack=replace(plain.stack, layers=layers)), seed=0)
    assert save(model, tmp_path).family == "manyheads"
    assert_equal(load(tmp_path), model)


def test_a_rotation_that_grows_with_the_text_generates_as_transformers(tmp_path: Path) -> None:
    model = peer(CONFIGS["dynamic"])
    model.save_pretrained(tmp_path)
    check_generation(model, load(tmp_path))
