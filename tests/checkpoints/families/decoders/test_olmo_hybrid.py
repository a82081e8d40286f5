"""OLMo-hybrid folders: gated delta nets and attention, there and here."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import OlmoHybridConfig

from manyheads import Ragged, load, save
from manyheads.errors import InputError
from manyheads.parts.positions import NoPosition
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts
from tests.parity.families import check_family, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "linear_key_head_dim": 6,
    # As many channels of queries as of values: then their files are as ours.
    "linear_value_head_dim": 6,
    "pad_token_id": None,
    "eos_token_id": None,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "no positions": {"rope_parameters": {"rope_type": "default", "rope_theta": None}},
    "biased, tied": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "linear_allow_neg_eigval": False,
        "linear_conv_kernel_dim": 3,
        "layer_types": ["full_attention", "linear_attention", "full_attention"],
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_olmo_hybrid(name: str, tmp_path: Path) -> None:
    ours = check_family(OlmoHybridConfig(**SMALL | CONFIGS[name]), tmp_path)
    attention = ours.config.stack.attention(2)
    assert isinstance(attention.position, NoPosition) == (name == "no positions")


def test_any_cut_of_the_convolution_is_read(tmp_path: Path) -> None:
    # Their files cut 80 channels into 27, 27 and 26, ours into queries, keys and values.
    sizes = {"linear_num_key_heads": 2, "linear_value_head_dim": 14}
    peer = their_decoder(OlmoHybridConfig(**SMALL | sizes))
    peer.save_pretrained(tmp_path / "theirs")
    expected = each_alone(peer, texts())
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    for place, rows in (("theirs", 27), ("ours", 12)):
        tensors = load_file(tmp_path / place / "model.safetensors")
        assert len(tensors["model.layers.0.linear_attn.q_conv1d.weight"]) == rows
        with torch.no_grad():
            result: Any = load(tmp_path / place)
            assert_same(result(Ragged.from_list(texts())).logits, expected)
    again = type(peer).from_pretrained(tmp_path / "ours").eval()
    assert_same(Ragged.from_list(each_alone(again, texts())), expected)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"layer_types": ["linear_attention"] * 3}, "use both full_attention and linear_attention"),
        ({"linear_num_value_heads": 6}, "key_heads must divide heads=6"),
        ({"hidden_act": "gelu"}, "use silu"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    their_decoder(OlmoHybridConfig(**SMALL)).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load(tmp_path)
