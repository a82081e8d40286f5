"""Bloom folders."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import BloomConfig, BloomForTokenClassification

from manyheads import Ragged, load
from manyheads.checkpoints.families.decoders.bloom import BLOOM
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import check_decoder, randomized
from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "n_layer": 2,
    "n_head": 3,
    "bos_token_id": None,
    "eos_token_id": None,
}


@pytest.mark.parametrize("changes", [{}, {"n_head": 8, "tie_word_embeddings": False}])
def test_same_numbers_here_and_back(changes: dict[str, Any], tmp_path: Path) -> None:
    check_family(BloomConfig(**SMALL | changes), tmp_path)


def test_tokens_are_classified_as_by_transformers(tmp_path: Path) -> None:
    peer = randomized(BloomForTokenClassification(BloomConfig(**SMALL, num_labels=5)))
    check_decoder(peer, BloomForTokenClassification.from_pretrained, tmp_path)


def test_the_keys_of_published_files_are_read(tmp_path: Path) -> None:
    their_decoder(BloomConfig(**SMALL)).save_pretrained(tmp_path)
    expected = load(tmp_path)
    file = tmp_path / "config.json"
    stored = json.loads(file.read_text())
    for new, old in (
        ("hidden_size", "n_embed"),
        ("n_head", "num_attention_heads"),
        ("n_layer", "num_hidden_layers"),
    ):
        stored[old] = stored.pop(new)
    file.write_text(json.dumps(stored))
    model = load(tmp_path)
    assert model.config == expected.config
    batch = Ragged.from_list([torch.arange(5)])
    assert torch.equal(model(batch).hidden.values, expected(batch).hidden.values)


def test_the_other_residual_is_refused() -> None:
    with pytest.raises(ConfigError, match="apply_residual_connection_post_layernorm=True"):
        BLOOM.read_config(SMALL | {"apply_residual_connection_post_layernorm": True})
