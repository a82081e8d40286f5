"""GPT-2 folders."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPT2Config, GPT2LMHeadModel

from manyheads import build, load, save
from manyheads.errors import InputError
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY


def peer_model(**changes: object) -> GPT2LMHeadModel:
    small = {"vocab_size": VOCABULARY, "n_embd": 24, "n_layer": 2, "n_head": 3, "n_positions": 40}
    return randomized(GPT2LMHeadModel(GPT2Config(**(small | changes))))


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"n_head": 1, "n_inner": 50},
        {"n_layer": 1, "layer_norm_epsilon": 1e-3},
        {"activation_function": "relu", "tie_word_embeddings": False},
        {"scale_attn_by_inverse_layer_idx": True, "reorder_and_upcast_attn": True},
        {"scale_attn_weights": False, "activation_function": "silu"},
        {"activation_function": "quick_gelu"},
    ],
)
def test_same_logits_here_and_back(changes: dict[str, object], tmp_path: Path) -> None:
    check_decoder(peer_model(**changes), GPT2LMHeadModel.from_pretrained, tmp_path)


def test_older_files_without_prefix_and_with_masks_load_the_same(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path)
    expected = load(tmp_path).state_dict()
    old = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(tmp_path / "model.safetensors").items()
    }
    old["h.0.attn.bias"] = torch.ones(1, 1, 40, 40)
    old["lm_head.weight"] = old["wte.weight"].clone()
    save_file(old, tmp_path / "model.safetensors")
    result = load(tmp_path).state_dict()
    assert all(torch.equal(result[name], tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    "changes",
    [
        {"activation_function": "mish"},
        {"add_cross_attention": True},
    ],
)
def test_what_would_load_and_be_wrong_is_refused(
    changes: dict[str, object], tmp_path: Path
) -> None:
    peer_model(**changes).save_pretrained(tmp_path)
    with pytest.raises(InputError, match=f"{next(iter(changes))}=.* is not supported"):
        load(tmp_path)


def test_a_misshapen_tensor_is_named_with_what_the_config_asks_for(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["transformer.h.1.attn.c_attn.weight"] = torch.zeros(24, 70)
    save_file(tensors, tmp_path / "model.safetensors")
    reason = r"h\.1\.attn\.c_attn\.weight has shape \(24, 70\), expected \(24, 72\)"
    with pytest.raises(InputError, match=reason):
        load(tmp_path)


def test_each_dropout_is_read_and_written_apart(tmp_path: Path) -> None:
    model = build("gpt2", layers=1, width=8, heads=2, vocabulary=9, dropout=0.1, seed=0)
    save(model, tmp_path / "one")
    file = tmp_path / "one/config.json"
    said = {**json.loads(file.read_text()), "attn_pdrop": 0.0, "embd_pdrop": 0.2}
    file.write_text(json.dumps(said))
    model = load(tmp_path / "one")
    attention = model.config.stack.layers[0].attention
    result = (attention.inner.dropout, attention.dropout, model.config.embedding.dropout)
    assert result == (0.0, 0.1, 0.2)
    assert save(model, tmp_path / "other").family == "gpt2"
    again = json.loads((tmp_path / "other/config.json").read_text())
    assert [again[f"{name}_pdrop"] for name in ("attn", "resid", "embd")] == [0.0, 0.1, 0.2]
