"""Gated Qwen folders of arXiv 2505.06708, judged by its formula, and plain Qwen3 beside them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from manyheads import Ragged, build, load, save
from manyheads.checkpoints.families.decoders.qwen import QWEN_GATED, with_attention
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import get_config
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Window
from manyheads.parts.norms import NoNorm
from manyheads.parts.positions import Rotary
from manyheads.parts.positions.rotary import LinearScaling, YarnScaling
from tests.checkpoints.families.gated_study import SMALL, logits, random_tensors, write
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized, same_files
from tests.parity.comparing import assert_same, texts

HEADWISE = {"headwise_attn_output_gate": True}
ELEMENTWISE = {"elementwise_attn_output_gate": True}
SEVEN = {"hidden_size": 56, "num_attention_heads": 7, "num_key_value_heads": 1}
CONFIGS: dict[str, dict[str, Any]] = {
    "headwise": HEADWISE,
    "elementwise": ELEMENTWISE,
    "headwise, 7 to 1": HEADWISE | SEVEN,
    "elementwise, 7 to 1": ELEMENTWISE | SEVEN,
    "headwise, 9 heads for 3": HEADWISE | {"num_attention_heads": 9, "num_key_value_heads": 3},
    "elementwise, 5 heads for 5": ELEMENTWISE
    | {"num_attention_heads": 5, "num_key_value_heads": 5},
    "headwise, tied, biases": HEADWISE | {"tie_word_embeddings": True, "qkv_bias": True},
    "elementwise, tied, biases": ELEMENTWISE | {"tie_word_embeddings": True, "qkv_bias": True},
    "elementwise, biases, 7 to 1": ELEMENTWISE | SEVEN | {"qkv_bias": True},
    "elementwise, wide heads": ELEMENTWISE | {"head_dim": 20},
    "headwise, heads not normed": HEADWISE | {"use_qk_norm": False},
    "no gate": {},
}
TINY: dict[str, Any] = {
    "layers": 2,
    "width": 16,
    "heads": 4,
    "kv_heads": 2,
    "head_size": 8,
    "hidden": 24,
    "vocabulary": 9,
}


@pytest.mark.parametrize("name", CONFIGS)
def test_logits_are_those_of_the_formula_and_files_come_back(name: str, tmp_path: Path) -> None:
    config = SMALL | CONFIGS[name]
    tensors = random_tensors(config)
    model: Any = load(write(tmp_path / "theirs", config, tensors))
    sequences = texts()
    expected = [logits(config, tensors, sequence) for sequence in sequences]
    with torch.no_grad():
        result = model(Ragged.from_list(sequences)).logits
    assert_same(result, expected)
    for one, other in zip(result.to_list(), expected, strict=True):
        assert torch.equal(one.argmax(-1), other.argmax(-1))
    assert save(model, tmp_path / "ours").family == "qwen3"
    same_files(tmp_path / "theirs", tmp_path / "ours")
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    assert described == config | {"dtype": "float32"}
    assert_equal(load(tmp_path / "ours"), model)


@pytest.mark.parametrize("name", [name for name in CONFIGS if name != "no gate"])
def test_our_own_words_describe_it_as_well(name: str, tmp_path: Path) -> None:
    config = SMALL | CONFIGS[name]
    model: Any = load(write(tmp_path / "theirs", config, random_tensors(config)))
    model.source_config = None
    assert save(model, tmp_path / "ours").family == "qwen3"
    same_files(tmp_path / "theirs", tmp_path / "ours")
    described = json.loads((tmp_path / "ours" / "config.json").read_text())
    read = set(config) - {"max_position_embeddings"}
    assert {key: described[key] for key in read} == {key: config[key] for key in read}
    assert_equal(load(tmp_path / "ours"), model)


@pytest.mark.parametrize("biased", [True, False])
def test_without_a_gate_it_is_the_qwen3_of_transformers(biased: bool, tmp_path: Path) -> None:
    config = SMALL | {"qkv_bias": biased, "attention_bias": biased}
    peer = randomized(
        AutoModelForCausalLM.from_config(
            Qwen3Config(**{key: config[key] for key in config if key != "model_type"}),
            attn_implementation="eager",
        )
    )
    peer.save_pretrained(tmp_path / "theirs")
    described = json.loads((tmp_path / "theirs" / "config.json").read_text())
    assert described["headwise_attn_output_gate"] is False
    plain = {key: each for key, each in described.items() if key not in SMALL or "gate" not in key}
    assert QWEN_GATED.read_config(described) == QWEN_GATED.read_config(plain)

    def opener(place: Path) -> Any:
        return AutoModelForCausalLM.from_pretrained(place, attn_implementation="eager")

    check_decoder(peer, opener, tmp_path)


def test_half_precision_comes_back_bit_by_bit(tmp_path: Path) -> None:
    config = SMALL | ELEMENTWISE | {"qkv_bias": True}
    tensors = {name: each.bfloat16() for name, each in random_tensors(config).items()}
    save(load(write(tmp_path / "theirs", config, tensors)), tmp_path / "ours")
    same_files(tmp_path / "theirs", tmp_path / "ours")


def test_gates_lie_behind_the_queries_of_their_group(tmp_path: Path) -> None:
    """Six heads of size 8 in two groups: 24 rows of queries, 3 of gates, and once more."""
    config = SMALL | HEADWISE | {"num_hidden_layers": 1}
    tensors = random_tensors(config)
    name = "model.layers.0.self_attn.q_proj.weight"
    tensors[name] = torch.arange(54.0)[:, None].expand(54, 48).contiguous()
    model: Any = load(write(tmp_path / "theirs", config, tensors))
    rows = {
        part: each[:, 0] for part, each in model.stack.layers[0].attention.projections().items()
    }
    queries = torch.cat((torch.arange(24.0), torch.arange(27.0, 51.0)))
    assert torch.equal(rows["query"], queries)
    assert torch.equal(rows["gate_output"], torch.tensor([24.0, 25.0, 26.0, 51.0, 52.0, 53.0]))


@pytest.mark.parametrize(("gate", "key"), [("head", "headwise"), ("channel", "elementwise")])
def test_a_gated_decoder_built_here_is_saved_as_the_studys(
    gate: str, key: str, tmp_path: Path
) -> None:
    model: Any = build("gated-1.7b", seed=0, gate=gate, **TINY)
    saved = save(model, tmp_path)
    assert str(saved).endswith("as qwen3, which the gated-attention study's own code can open")
    described = json.loads((tmp_path / "config.json").read_text())
    assert described[f"{key}_attn_output_gate"] is True
    assert (described["rope_theta"], described["rope_scaling"]) == (1e6, None)
    assert_equal(load(tmp_path), model)


GATED = get_config("gated-1.7b", **TINY)
FOREIGN = {
    "a gate elsewhere": with_attention(GATED, gates=(Gate(at="value", per="channel"),)),
    "two gates": with_attention(GATED, gates=(Gate(at="output"), Gate(at="value"))),
    "a shared gate": with_attention(GATED, gates=(Gate(at="output", heads="shared"),)),
    "another activation": with_attention(GATED, gates=(Gate(at="output", activation="silu"),)),
    "a gate that adds": with_attention(GATED, gates=(Gate(at="output", operation="add"),)),
    "biases on the way in only": with_attention(GATED, bias="inputs"),
    "windows": with_attention(GATED, mask=Window(3)),
    "half a head turned": with_attention(GATED, position=Rotary(theta=1e6, fraction=0.5)),
    "one norm of two": with_attention(GATED, key_norm=NoNorm()),
    "experts": get_config("moe-15b-a2.5b", **TINY, experts=4, top_k=2),
    "a gate in one layer of two": replace(
        GATED,
        stack=replace(
            GATED.stack,
            layers=(GATED.stack.layers[0], with_attention(GATED, gates=()).stack.layers[1]),
        ),
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
def test_what_the_study_cannot_say_is_saved_as_our_own(name: str, tmp_path: Path) -> None:
    model = build(FOREIGN[name], seed=0)
    assert save(model, tmp_path).family == "manyheads"
    assert_equal(load(tmp_path), model)


@pytest.mark.parametrize(
    "scaling", [LinearScaling(factor=2.0), YarnScaling(factor=4.0, original_length=64)]
)
def test_scaled_rotary_is_spelled_as_their_older_code_reads_it(scaling: Any) -> None:
    config = with_attention(GATED, position=Rotary(theta=1e6, scaling=scaling))
    described = QWEN_GATED.write_config(config)
    assert described is not None
    assert "rope_parameters" not in described
    assert described["rope_scaling"]["factor"] == scaling.factor
    assert QWEN_GATED.read_config(described) == replace(
        config, init=QWEN_GATED.read_config(described).init
    )


def test_both_gates_at_once_are_refused(tmp_path: Path) -> None:
    config = SMALL | HEADWISE | ELEMENTWISE
    with pytest.raises(ConfigError, match="headwise_attn_output_gate and elementwise_attn_output"):
        QWEN_GATED.read_config(config)
    folder = write(tmp_path / "theirs", config, {})
    with pytest.raises(InputError, match=r"config.json: .* are both set: set one"):
        load(folder)


def test_all_that_does_not_fit_is_listed_with_the_shape_it_should_have(tmp_path: Path) -> None:
    tensors = random_tensors(SMALL | HEADWISE | {"qkv_bias": True})
    del tensors["model.layers.1.self_attn.k_proj.bias"]
    folder = write(tmp_path / "theirs", SMALL | ELEMENTWISE | {"qkv_bias": True}, tensors)
    with pytest.raises(InputError) as caught:
        load(folder)
    for fault in (
        "layers.0.self_attn.q_proj.weight has shape (54, 48), expected (96, 48)",
        "layers.1.self_attn.q_proj.bias has shape (54,), expected (96,)",
        "layers.1.self_attn.k_proj.bias (16,) is missing",
    ):
        assert fault in str(caught.value)


def test_a_plain_qwen3_whose_config_forgets_the_gate_is_refused(tmp_path: Path) -> None:
    folder = write(tmp_path / "theirs", SMALL, random_tensors(SMALL | HEADWISE))
    with pytest.raises(InputError, match=r"q_proj.weight has shape \(54, 48\), expected"):
        load(folder)


def test_biases_that_qwen3_lacks_are_not_promised() -> None:
    """Their feed-forward has none, whatever the config says."""
    config = QWEN_GATED.read_config(SMALL | {"mlp_bias": True})
    assert all(layer.feedforward.inner.bias is False for layer in config.stack.layers)
    feedforward = SwiGLU(width=48, hidden=40, bias=True)
    layers = tuple(
        replace(layer, feedforward=replace(layer.feedforward, inner=feedforward))
        for layer in cast(Any, QWEN_GATED.read_config(SMALL | HEADWISE)).stack.layers
    )
    biased = replace(config, stack=replace(config.stack, layers=layers))
    described = QWEN_GATED.write_config(biased)
    assert described is not None
    assert QWEN_GATED.read_config(described) != biased
