"""T5 folders, of version 1.0 and 1.1."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import T5Config, T5EncoderModel, T5ForConditionalGeneration

from manyheads import Encoder, Ragged, lens, load, save
from manyheads.checkpoints.families.t5 import T5
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import assert_equal, check_seq2seq, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "d_kv": 10,
    "d_ff": 40,
    "num_layers": 2,
    "num_heads": 3,
    "relative_attention_num_buckets": 12,
    "relative_attention_max_distance": 30,
}
UNTIED = {"tie_word_embeddings": False}
CONFIGS: dict[str, dict[str, Any]] = {
    "1.0": {},
    "1.0, one head, deeper decoder": {"num_heads": 1, "num_layers": 1, "num_decoder_layers": 3},
    "1.1": {"feed_forward_proj": "gated-gelu", **UNTIED},
    "1.1, silu": {"feed_forward_proj": "gated-silu", "dropout_rate": 0.0, **UNTIED},
    "gelu, coarse norm": {"feed_forward_proj": "gelu", "layer_norm_epsilon": 1e-2, **UNTIED},
}
# Longer than the buckets' reach, so that the last of them is met too.
SOURCES, TARGETS = (7, 1, 50, 12), (3, 9, 1, 45)
WEIGHTS = "model.safetensors"


def peer_model(**changes: Any) -> Any:
    model = T5ForConditionalGeneration(T5Config(**(SMALL | changes)))
    if changes.get("tie_word_embeddings") is False:
        # Fresh weights are tied even so; checkpoints of 1.1 bring a head of their own.
        model.lm_head.weight = nn.Parameter(torch.empty(VOCABULARY, model.config.d_model))
    return randomized(model)


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, tmp_path: Path) -> None:
    def opener(place: Path) -> Any:
        return T5ForConditionalGeneration.from_pretrained(place)

    both = texts(SOURCES), texts(TARGETS, seed=1)
    check_seq2seq(peer_model(**CONFIGS[name]), opener, both, tmp_path)


@pytest.mark.parametrize("name", CONFIGS)
def test_an_encoder_alone_reads_the_same_here_and_back(name: str, tmp_path: Path) -> None:
    model = randomized(T5EncoderModel(T5Config(**(SMALL | CONFIGS[name]))))
    model.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    assert isinstance(ours, Encoder)
    ours.source_config = None  # our own words must do
    assert save(ours, tmp_path / "ours").family == "t5"
    same_files(tmp_path / "theirs", tmp_path / "ours")
    assert_equal(load(tmp_path / "ours"), ours)
    again, sources = T5EncoderModel.from_pretrained(tmp_path / "ours").eval(), texts(SOURCES)
    with torch.no_grad():
        expected = [model(each[None]).last_hidden_state[0] for each in sources]
        assert_same(ours(Ragged.from_list(sources)).hidden, expected)
        states = [again(each[None]).last_hidden_state[0] for each in sources]
        assert_same(Ragged.from_list(states), expected)
    seen = lens.statistics(ours, [each.tolist() for each in sources], progress=False)
    assert len(seen.addresses) == model.config.num_heads * model.config.num_layers


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_copies_of_the_shared_table_and_unread_biases_are_left(
    version: str, tmp_path: Path
) -> None:
    peer_model(**CONFIGS[version]).save_pretrained(tmp_path)
    expected = load(tmp_path)
    old = load_file(tmp_path / WEIGHTS)
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    for name in copies + ["lm_head.weight"] * (version == "1.0"):
        old[name] = old["shared.weight"].clone()
    cross = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    old[cross] = torch.zeros(12, 3)
    save_file(old, tmp_path / WEIGHTS)
    assert_equal(load(tmp_path), expected)


def test_the_older_config_that_is_only_untied_is_read_as_1_1(tmp_path: Path) -> None:
    peer_model(**CONFIGS["1.1"]).save_pretrained(tmp_path)
    expected = load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    del config["scale_decoder_outputs"]
    config["tie_word_embeddings"] = False
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert_equal(load(tmp_path), expected)


def test_one_table_of_distances_a_side_is_stored(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    tables = [name for name in load_file(tmp_path / "ours" / WEIGHTS) if "relative" in name]
    assert sorted(tables) == [
        f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        for side in ("decoder", "encoder")
    ]


@pytest.mark.parametrize("kind", ["gated-relu", "tanh"])
def test_an_unknown_feedforward_is_refused(kind: str) -> None:
    with pytest.raises(ConfigError, match=f"feed_forward_proj='{kind}' is not supported"):
        T5.read_config({"model_type": "t5", **SMALL, "feed_forward_proj": kind})


def test_what_we_describe_is_what_we_read() -> None:
    kinds: tuple[dict[str, Any], ...] = ({}, {"architectures": ["T5EncoderModel"]})
    for changes, kind in product(CONFIGS.values(), kinds):
        config = T5.read_config({"model_type": "t5", **SMALL, **changes, **kind})
        described = T5.write_config(config)
        assert described is not None
        assert T5.read_config(described) == config
