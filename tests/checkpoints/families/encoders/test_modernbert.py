"""ModernBERT folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    ModernBertConfig,
)

from manyheads import Ragged, build, load, save
from manyheads.checkpoints.families.encoders.modernbert import MODERNBERT
from manyheads.errors import ConfigError
from manyheads.parts.masks import Full, Window
from tests.checkpoints.peer_models import check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 36,
    "local_attention": 6,
}
SPECIAL = dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
)
ROPES = {
    "full_attention": {"rope_type": "default", "rope_theta": 500.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
}
BIASES = ("attention_bias", "mlp_bias", "norm_bias", "classifier_bias")


def small(**changes: Any) -> ModernBertConfig:
    return ModernBertConfig(**SMALL | SPECIAL | changes)


CONFIGS = {
    "every third, short window": small(num_labels=5),
    "every second, long window": small(
        global_attn_every_n_layers=2, local_attention=128, classifier_pooling="mean", num_labels=3
    ),
    "all biases, one head": small(**dict.fromkeys(BIASES, True), num_attention_heads=1),
    "no bias at all": small(decoder_bias=False, norm_eps=1e-3, num_labels=7),
    "untied": small(tie_word_embeddings=False, classifier_pooling="mean"),
    "own layers and thetas": small(
        layer_types=["sliding_attention", "full_attention"] * 2,
        rope_parameters=ROPES,
        num_labels=4,
    ),
    "silu and relu": small(hidden_activation="silu", classifier_activation="relu"),
    "tanh gelu": small(hidden_activation="gelu_pytorch_tanh"),
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}


def made(auto: Any, config: Any) -> Any:
    return randomized(auto.from_config(config, attn_implementation="eager"))


def opened(auto: Any, place: Path) -> Any:
    return auto.from_pretrained(place, attn_implementation="eager")


def states(model: Any) -> list[Tensor]:
    with torch.no_grad():
        return [model(text[None]).last_hidden_state[0] for text in texts()]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    auto = HEADS[head]
    check_decoder(made(auto, CONFIGS[name]), lambda place: opened(auto, place), tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_states_of_a_bare_model_here_and_back(name: str, tmp_path: Path) -> None:
    peer = made(AutoModel, CONFIGS[name])
    peer.save_pretrained(tmp_path / "theirs")
    model: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        assert_same(model(Ragged.from_list(texts())).hidden, states(peer))
    model.source_config = None  # our own words must do
    assert save(model, tmp_path / "ours").family == "modernbert"
    assert_same(Ragged.from_list(states(opened(AutoModel, tmp_path / "ours").eval())), states(peer))
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = load(tmp_path / "ours").state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in model.state_dict().items())


@pytest.mark.parametrize("head", ["bare", "words"])
def test_names_load_with_and_without_the_prefix(head: str, tmp_path: Path) -> None:
    auto = AutoModel if head == "bare" else AutoModelForMaskedLM
    made(auto, CONFIGS["every third, short window"]).save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    old = load_file(tmp_path / "model.safetensors")
    if head == "bare":
        changed = {f"model.{name}": tensor for name, tensor in old.items()}
    else:
        changed = {name.removeprefix("model."): tensor for name, tensor in old.items()}
        changed["decoder.weight"] = expected["embedding.tokens.weight"].clone()
    assert changed.keys() != old.keys()
    save_file(changed, tmp_path / "model.safetensors")
    result = load(tmp_path).state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


def test_the_older_config_is_read_as_the_same_model(tmp_path: Path) -> None:
    config = small(
        global_attn_every_n_layers=2, global_rope_theta=500.0, local_rope_theta=50.0, num_labels=5
    )
    made(AutoModelForMaskedLM, config).save_pretrained(tmp_path)
    newer = json.loads((tmp_path / "config.json").read_text())
    older = {
        key: value
        for key, value in newer.items()
        if key not in ("layer_types", "rope_parameters", "global_attn_every_n_layers")
    }
    older |= {
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 500.0,
        "local_rope_theta": 50.0,
    }
    assert newer["layer_types"] == ["full_attention", "sliding_attention"] * 2
    assert MODERNBERT.read_config(older) == MODERNBERT.read_config(newer)
    layers = MODERNBERT.read_config(older).stack.layers
    assert [layer.attention.inner.mask for layer in layers] == [Full(), Window(3, 3)] * 2
    assert [layer.attention.inner.position.theta for layer in layers] == [500.0, 50.0] * 2


def test_a_local_theta_of_null_is_the_global_one() -> None:
    config = MODERNBERT.read_config({**SMALL, "global_rope_theta": 70.0, "local_rope_theta": None})
    assert {layer.attention.inner.position.theta for layer in config.stack.layers} == {70.0}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden_activation": "relu"}, "hidden_activation='relu'"),
        ({"classifier_activation": "selu"}, "classifier_activation='selu'"),
        ({"layer_types": ["chunked_attention"] * 4}, "layer_types has chunked_attention"),
        ({"layer_types": ["full_attention"]}, "1 entries, and num_hidden_layers=4"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_type='linear'"),
        ({"architectures": ["ModernBertForMultipleChoice"]}, "use one of ModernBertModel"),
        (
            {
                "architectures": ["ModernBertForSequenceClassification"],
                "classifier_pooling": "max",
            },
            "classifier_pooling='max'",
        ),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MODERNBERT.read_config({**SMALL, **changes})


def test_a_recipe_is_saved_as_the_family_it_is_of(tmp_path: Path) -> None:
    model = build("modernbert-base", width=16, heads=2, hidden=20, layers=3, vocabulary=30, seed=0)
    assert save(model, tmp_path).family == "modernbert"
    assert load(tmp_path).config == model.config
