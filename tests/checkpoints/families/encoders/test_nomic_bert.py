"""NomicBERT folders, with the names of the model's own code and those of `transformers`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    AutoModelForMaskedLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    NomicBertConfig,
    NomicBertModel,
)

from manyheads import Ragged, load, save
from manyheads.checkpoints.families.encoders.nomic_bert import NOMIC_BERT
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import assert_equal, check_decoder, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, texts

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "num_labels": 5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "large heads, gelu": {
        "head_dim": 16,
        "hidden_act": "gelu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0},
    },
}
HEADS = {
    "words": AutoModelForMaskedLM,
    "classes": AutoModelForSequenceClassification,
    "tokens": AutoModelForTokenClassification,
}
# The config of the model's own code.
OLDER: dict[str, Any] = {
    "model_type": "nomic_bert",
    "architectures": ["NomicBertModel"],
    "activation_function": "swiglu",
    "n_embd": 24,
    "n_layer": 2,
    "n_head": 3,
    "n_inner": 40,
    "n_positions": 8192,
    "layer_norm_epsilon": 1e-12,
    "vocab_size": VOCABULARY,
    "type_vocab_size": 2,
    "qkv_proj_bias": False,
    "rotary_emb_base": 1000,
    "rotary_emb_fraction": 1.0,
    "rotary_scaling_factor": None,
}


def peer_model(head: str, name: str = "plain") -> Any:
    config = NomicBertConfig(**SMALL | CONFIGS[name])
    return randomized(HEADS[head].from_config(config))


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, head: str, tmp_path: Path) -> None:
    check_decoder(peer_model(head, name), HEADS[head].from_pretrained, tmp_path)


def test_padded_and_typed_texts_give_the_logits_of_transformers(tmp_path: Path) -> None:
    model = peer_model("words")
    model.save_pretrained(tmp_path)
    batch = Ragged.from_list(texts())
    ids, mask = batch.to_padded(), batch.with_values(batch.values >= 0).to_padded()
    kinds = (ids > 20).long()
    ours: Any = load(tmp_path)
    with torch.no_grad():
        result = ours(ids, mask, types=kinds).logits
        expected = model(ids, attention_mask=mask.long(), token_type_ids=kinds).logits
    torch.testing.assert_close(result[mask], expected[mask], atol=1e-4, rtol=0)


def test_a_bare_model_loads_by_either_names_and_config(tmp_path: Path) -> None:
    model = randomized(NomicBertModel(NomicBertConfig(**SMALL)))
    model.save_pretrained(tmp_path)
    stored, ours = load_file(tmp_path / "model.safetensors"), load(tmp_path)
    assert "encoder.layers.0.attn.Wqkv.weight" in stored
    with torch.no_grad():
        states = [model(text[None]).last_hidden_state[0] for text in texts()]
        assert_same(ours(Ragged.from_list(texts())).hidden, states)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == "nomic_bert"
    same_files(tmp_path, tmp_path / "ours")
    # The names of the modules, with queries, keys and values apart.
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), ours)
    prefixed = {f"bert.{name}": tensor for name, tensor in stored.items()}
    save_file(prefixed, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(OLDER))
    assert_equal(load(tmp_path), ours)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        (SMALL | {"hidden_act": "selu"}, "hidden_act='selu'"),
        (SMALL | {"rope_parameters": {"rope_type": "yarn"}}, "rope_type='yarn'"),
        (SMALL | {"architectures": ["NomicBertForMultipleChoice"]}, "use one of NomicBertModel"),
        (OLDER | {"use_rms_norm": True}, "use_rms_norm=True"),
        (OLDER | {"activation_function": "gelu"}, "use swiglu or geglu"),
    ],
)
def test_what_is_not_supported_is_refused(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        NOMIC_BERT.read_config(config)
