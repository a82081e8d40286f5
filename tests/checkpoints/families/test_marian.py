"""Marian folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import MarianConfig, MarianMTModel

from manyheads import build, load, save
from manyheads.checkpoints.families.marian import MARIAN
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import assert_equal, check_seq2seq, randomized
from tests.parity.comparing import VOCABULARY, texts

SMALL = {
    "vocab_size": VOCABULARY,
    "d_model": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 3,
    "decoder_attention_heads": 3,
    "encoder_ffn_dim": 40,
    "decoder_ffn_dim": 40,
    "max_position_embeddings": 64,
    "scale_embedding": True,
    "activation_function": "swish",
    "pad_token_id": VOCABULARY - 1,
    "decoder_start_token_id": VOCABULARY - 1,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "sides that differ": {
        "encoder_layers": 1,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 1,
        "encoder_ffn_dim": 20,
        "decoder_ffn_dim": 28,
    },
    "unscaled, relu": {"scale_embedding": False, "activation_function": "relu"},
    "gelu, dropout": {
        "activation_function": "gelu",
        "dropout": 0.3,
        "attention_dropout": 0.2,
        "activation_dropout": 0.1,
    },
}
SOURCES, TARGETS = (7, 1, 23, 12), (3, 9, 1, 14)
WEIGHTS = "model.safetensors"


def peer_model(**changes: Any) -> Any:
    model = randomized(
        MarianMTModel(MarianConfig(**(SMALL | changes), attn_implementation="eager"))
    )
    # The sinusoids are parameters there, and made anew by whoever opens a file.
    for side in (model.model.encoder, model.model.decoder):
        side.embed_positions.weight.data.copy_(side.embed_positions.create_weight())
    model.final_logits_bias.normal_(generator=torch.Generator().manual_seed(2))
    return model


@pytest.mark.parametrize("name", CONFIGS)
def test_same_logits_here_and_back(name: str, tmp_path: Path) -> None:
    def opener(place: Path) -> Any:
        return MarianMTModel.from_pretrained(place, attn_implementation="eager")

    both = texts(SOURCES), texts(TARGETS, seed=1)
    check_seq2seq(peer_model(**CONFIGS[name]), opener, both, tmp_path)


def test_older_files_with_sinusoids_and_copies_load_the_same(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path)
    expected = load(tmp_path)
    old = load_file(tmp_path / WEIGHTS)
    shared = old["model.shared.weight"]
    old["lm_head.weight"] = shared.clone()
    for side in ("encoder", "decoder"):
        old[f"model.{side}.embed_tokens.weight"] = shared.clone()
        old[f"model.{side}.embed_positions.weight"] = torch.zeros(64, 24)
    save_file(old, tmp_path / WEIGHTS)
    assert_equal(load(tmp_path), expected)


def test_the_ids_are_those_of_the_published_translators(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path / "theirs")
    save(load(tmp_path / "theirs"), tmp_path / "ours")
    config = MarianConfig.from_pretrained(tmp_path / "ours")
    ids = (config.pad_token_id, config.decoder_start_token_id, config.eos_token_id)
    assert ids == (VOCABULARY - 1, VOCABULARY - 1, 0)


def test_the_transformer_of_2017_is_no_marian(tmp_path: Path) -> None:
    model = build("transformer-base", width=16, heads=2, hidden=8, layers=1, vocabulary=9, seed=0)
    assert save(model, tmp_path).family == "manyheads"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"share_encoder_decoder_embeddings": False}, "gives each side its own embedding"),
        ({"tie_word_embeddings": False}, "gives each side its own embedding"),
        ({"activation_function": "mish"}, "activation_function='mish' is not supported"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        MARIAN.read_config({"model_type": "marian", **SMALL, **changes})


def test_what_we_describe_is_what_we_read() -> None:
    for changes in CONFIGS.values():
        config = MARIAN.read_config({"model_type": "marian", **SMALL, **changes})
        described = MARIAN.write_config(config)
        assert described is not None
        assert MARIAN.read_config(described) == config
