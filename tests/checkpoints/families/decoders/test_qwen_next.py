"""Qwen3-Next folders whose layers are all full attention."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, Qwen3NextConfig

from manyheads import Ragged, build, load, save
from manyheads.checkpoints.families.decoders.qwen import with_attention
from manyheads.checkpoints.families.decoders.qwen_hybrid import QWEN_NEXT
from manyheads.errors import ConfigError, InputError
from manyheads.parts.experts import Experts
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Window
from manyheads.parts.norms import RMSNorm
from tests.checkpoints.peer_models import assert_equal, check_decoder, same_files
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts
from tests.parity.copying import scramble

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "layer_types": ["full_attention"] * 2,
    "num_experts": 0,
}
SEVEN = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
MIXED: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
    "shared_expert_intermediate_size": 20,
}


def turning(share: float, **more: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": share} | more
    return {"rope_parameters": rope}


YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}
CONFIGS: dict[str, dict[str, Any]] = {
    "dense": {},
    "7 to 1": SEVEN,
    "9 heads for 3": {"num_attention_heads": 9, "num_key_value_heads": 3},
    "5 heads for 5, tied": {
        "num_attention_heads": 5,
        "num_key_value_heads": 5,
        "tie_word_embeddings": True,
    },
    "biases": {"attention_bias": True},
    "biases, tied, 7 to 1": SEVEN | {"attention_bias": True, "tie_word_embeddings": True},
    "half a head turned": turning(0.5),
    "whole heads turned": turning(1.0),
    "an eighth turned, far": turning(0.125, rope_theta=1e7),
    "yarn on a half": turning(0.5, **YARN),
    "experts": MIXED,
    "experts, not renormalized": MIXED | {"norm_topk_prob": False},
    "experts above a dense layer": MIXED | {"mlp_only_layers": [0]},
    "experts at every second layer": MIXED | {"decoder_sparse_step": 2},
    "one expert of many, biases": MIXED | {"num_experts_per_tok": 1, "attention_bias": True},
    "every expert": MIXED | SEVEN | {"num_experts": 3, "num_experts_per_tok": 3},
}


def peer_model(name: str) -> Any:
    config = Qwen3NextConfig(**SMALL | CONFIGS[name])
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager").eval()
    scramble(model, std=0.2)
    return model


def opener(place: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, tmp_path: Path) -> None:
    check_decoder(peer_model(name), opener, tmp_path)


@pytest.mark.parametrize("name", ["7 to 1", "experts"])
def test_the_same_words_are_most_likely(name: str, tmp_path: Path) -> None:
    model = peer_model(name)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        result = load(tmp_path)(Ragged.from_list(texts())).logits
    for one, other in zip(result.to_list(), each_alone(model, texts()), strict=True):
        assert torch.equal(one.argmax(-1), other.argmax(-1))


def test_a_loaded_model_keeps_its_description(tmp_path: Path) -> None:
    peer_model("experts above a dense layer").save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    one, other = (
        json.loads((tmp_path / who / "config.json").read_text()) for who in ("theirs", "ours")
    )
    assert one == other
    assert one["router_aux_loss_coef"] == 0.001
    same_files(tmp_path / "theirs", tmp_path / "ours")


def test_experts_in_one_tensor_are_read_too(tmp_path: Path) -> None:
    model = peer_model("experts above a dense layer")
    model.save_pretrained(tmp_path / "each")
    model.save_pretrained(tmp_path / "joined", save_original_format=False)
    names = load_file(tmp_path / "joined" / "model.safetensors").keys()
    assert "model.layers.1.mlp.experts.gate_up_proj" in names
    assert_equal(load(tmp_path / "joined"), load(tmp_path / "each"))
    save(load(tmp_path / "joined"), tmp_path / "ours")
    same_files(tmp_path / "each", tmp_path / "ours")


def test_half_precision_comes_back_bit_by_bit(tmp_path: Path) -> None:
    model = peer_model("experts").bfloat16()
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    save(ours, tmp_path / "ours")
    same_files(tmp_path / "theirs", tmp_path / "ours")
    assert ours.stack.final_norm.weight.dtype == torch.bfloat16


def test_norm_weights_are_kept_as_they_are_in_the_file(tmp_path: Path) -> None:
    model = peer_model("dense")
    model.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    assert torch.equal(ours.stack.final_norm.weight, model.model.norm.weight)
    assert ours.config.stack.final_norm == RMSNorm(eps=1e-6, centered=True)


def test_files_that_foretell_more_words_lose_only_that(tmp_path: Path) -> None:
    peer_model("dense").save_pretrained(tmp_path)
    plain = load(tmp_path)
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), "mtp.norm.weight": torch.ones(48)}, file, {"format": "pt"})
    assert_equal(load(tmp_path), plain)


def test_other_kinds_of_layers_are_refused() -> None:
    said = {"model_type": "qwen3_next", **SMALL, "layer_types": ["mamba", "full_attention"]}
    with pytest.raises(ConfigError, match="full_attention or linear_attention"):
        QWEN_NEXT.read_config(said)


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, [0, 1, 2, 4]),
        ({"layer_types": None, "full_attention_interval": 2}, [0, 2, 4]),
        ({"full_attention_interval": 1}, []),
    ],
)
def test_layers_are_linear_where_the_config_leaves_it_open(
    changes: dict[str, Any], layers: list[int]
) -> None:
    said = {key: each for key, each in SMALL.items() if key != "layer_types"}
    said |= {"model_type": "qwen3_next", "num_hidden_layers": 5} | changes
    config: Any = QWEN_NEXT.read_config(said)
    mixed = [index for index, layer in enumerate(config.stack.layers) if layer.mixer is not None]
    assert mixed == layers


def test_what_a_config_leaves_out_is_what_their_class_assumes() -> None:
    said = {key: each for key, each in SMALL.items() if key not in ("head_dim", "num_experts")}
    config = QWEN_NEXT.read_config({"model_type": "qwen3_next", "rope_theta": 1e7, **said})
    assumed = Qwen3NextConfig(**said, rope_theta=1e7)
    first = config.stack.layers[0]
    position = first.attention.inner.position
    assert first.attention.inner.size == assumed.head_dim == 256
    assert position.fraction == assumed.rope_parameters["partial_rotary_factor"] == 0.25
    assert position.theta == assumed.rope_parameters["rope_theta"] == 1e7
    assert config.stack.final_norm.eps == assumed.rms_norm_eps
    assert first.feedforward.inner == Experts(
        width=48,
        hidden=assumed.moe_intermediate_size,
        count=assumed.num_experts,
        top_k=assumed.num_experts_per_tok,
        shared=assumed.shared_expert_intermediate_size,
        shared_gate="sigmoid",
        renormalize=assumed.norm_topk_prob,
    )


def test_all_that_does_not_fit_is_listed_with_the_shape_it_should_have(tmp_path: Path) -> None:
    peer_model("experts").save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    attention, mlp = "model.layers.0.self_attn", "model.layers.1.mlp"
    tensors[f"{attention}.q_proj.weight"] = torch.zeros(96, 48)
    tensors[f"{mlp}.experts.3.up_proj.weight"] = torch.zeros(24, 40)
    tensors[f"{mlp}.experts.6.up_proj.weight"] = torch.zeros(24, 48)
    del tensors[f"{mlp}.experts.5.down_proj.weight"]
    del tensors[f"{mlp}.shared_expert_gate.weight"]
    save_file(tensors, file, {"format": "pt"})
    with pytest.raises(InputError) as caught:
        load(tmp_path)
    for fault in (
        f"{attention}.q_proj.weight has shape (96, 48), expected (192, 48)",
        f"{mlp}.experts.3.up_proj.weight has shape (24, 40), expected (24, 48)",
        f"{mlp}.experts.5.down_proj.weight (48, 24) is missing",
        f"{mlp}.experts.6.up_proj.weight is not part of the model",
        f"{mlp}.shared_expert_gate.weight (1, 48) is missing",
    ):
        assert fault in str(caught.value)


NEXT: Any = QWEN_NEXT.read_config(
    {"model_type": "qwen3_next", **SMALL, **MIXED, "mlp_only_layers": [0]}
)


def with_experts(**changes: Any) -> Any:
    first, last = NEXT.stack.layers
    inner = replace(last.feedforward.inner, **changes)
    last = replace(last, feedforward=replace(last.feedforward, inner=inner))
    return replace(NEXT, stack=replace(NEXT.stack, layers=(first, last)))


FOREIGN = {
    "a gate a head": with_attention(NEXT, gates=(Gate(at="output", per="head"),)),
    "no gate": with_attention(NEXT, gates=()),
    "windows": with_attention(NEXT, mask=Window(3)),
    "heads normed plainly": with_attention(NEXT, query_norm=RMSNorm(), key_norm=RMSNorm()),
    "biases on the way in only": with_attention(NEXT, bias="inputs"),
    "a plain final norm": replace(NEXT, stack=replace(NEXT.stack, final_norm=RMSNorm())),
    "experts without a shared one": with_experts(shared=0, shared_gate="none"),
    "a shared expert without a gate": with_experts(shared_gate="none"),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_they_cannot_say_is_saved_as_our_own(name: str, tmp_path: Path) -> None:
    model = build(FOREIGN[name], seed=0)
    assert save(model, tmp_path).family == "manyheads"
    assert_equal(load(tmp_path), model)


def test_what_they_can_say_is_described() -> None:
    for config in (NEXT, with_experts(renormalize=False), with_attention(NEXT, bias="all")):
        described = QWEN_NEXT.write_config(config)
        assert described is not None
        assert QWEN_NEXT.read_config(described) == config


def test_a_trained_model_opens_in_transformers(tmp_path: Path) -> None:
    model: Any = build(NEXT, seed=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    model.train()
    model(Ragged.from_list(texts())).logits.values.square().mean().backward()
    assert all(each.grad is not None and each.grad.any() for each in model.parameters())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.sub_(1e-3 * parameter.grad)
        assert save(model.eval(), tmp_path).family == "qwen3_next"
        result = model(Ragged.from_list(texts())).logits
    assert_same(result, each_alone(opener(tmp_path).eval(), texts()))
