"""Qwen3.5 folders: the text model alone, with experts, and within a model that sees images."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    Qwen3_5Config,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3NextConfig,
)

from manyheads import Ragged, load, save
from manyheads.errors import InputError
from tests.checkpoints.peer_models import assert_equal, randomized, same_files
from tests.parity.comparing import VOCABULARY, assert_same, each_alone, texts
from tests.parity.families import check_generation, check_padding, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_value_head_dim": 8,
    "linear_key_head_dim": 6,
}
EXPERTS: dict[str, Any] = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "shared_expert_intermediate_size": 16,
    "layer_types": ["linear_attention", "full_attention"],
    "num_hidden_layers": 2,
}
SPARSE = {key: each for key, each in SMALL.items() if key != "intermediate_size"} | EXPERTS
CONFIGS = {
    "dense": Qwen3_5TextConfig(**SMALL),
    "tied, three axes": Qwen3_5TextConfig(
        **SMALL | {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2},
        tie_word_embeddings=True,
        attention_bias=True,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 1e6,
            "partial_rotary_factor": 0.5,
            "mrope_section": [1, 1, 0],
            "mrope_interleaved": True,
        },
    ),
    "experts": Qwen3_5MoeTextConfig(**SPARSE),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_qwen3_5(name: str, tmp_path: Path) -> None:
    peer = their_decoder(CONFIGS[name])
    peer.save_pretrained(tmp_path / "theirs")
    expected = each_alone(peer, texts())
    ours: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        assert_same(ours(Ragged.from_list(texts())).logits, expected, tolerance=2e-4)
    check_padding(peer, ours)
    check_generation(peer, ours)
    # Our own words must do: those of the file describe another model.
    ours.source_config = {**ours.source_config, "vocab_size": 7}
    saved = save(ours, tmp_path / "ours")
    assert saved.family == peer.config.model_type
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "ours").eval()
    assert type(again) is type(peer)
    assert_same(Ragged.from_list(each_alone(again, texts())), expected)
    assert_equal(load(tmp_path / "ours"), ours)


def test_the_text_model_is_read_out_of_one_that_sees_images(tmp_path: Path) -> None:
    vision = {"depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2}
    vision |= {"out_hidden_size": 16, "num_position_embeddings": 16}
    config = Qwen3_5Config(text_config=SMALL, vision_config=vision, tie_word_embeddings=True)
    peer = randomized(AutoModelForImageTextToText.from_config(config, attn_implementation="eager"))
    peer.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    expected = each_alone(peer, texts())
    with torch.no_grad():
        assert_same(ours(Ragged.from_list(texts())).logits, expected)
    assert save(ours, tmp_path / "ours").family == "qwen3_5_text"
    again = AutoModelForCausalLM.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    ).eval()
    assert type(again).__name__ == "Qwen3_5ForCausalLM"
    assert_same(Ragged.from_list(each_alone(again, texts())), expected)


def test_a_classifier_keeps_its_head(tmp_path: Path) -> None:
    config = Qwen3_5TextConfig(**SMALL, num_labels=3, pad_token_id=0)
    peer = randomized(
        AutoModelForSequenceClassification.from_config(config, attn_implementation="eager")
    )
    peer.save_pretrained(tmp_path / "theirs")
    ours: Any = load(tmp_path / "theirs")
    sequences = [text.clamp(min=1) for text in texts()]
    expected = each_alone(peer, sequences)
    with torch.no_grad():
        result = ours(Ragged.from_list(sequences)).logits
    torch.testing.assert_close(result, torch.stack(expected), atol=1e-4, rtol=0)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == "qwen3_5_text"
    same_files(tmp_path / "theirs", tmp_path / "ours")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_num_key_heads": 3}, "key_heads must divide heads=4"),
        ({"layer_types": ["mamba"] * 4}, "full_attention or linear_attention"),
        ({"hidden_act": "gelu"}, "use silu"),
        ({"linear_key_head_dim": "six"}, "key_size"),
    ],
)
def test_a_config_that_cannot_be_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    their_decoder(CONFIGS["dense"]).save_pretrained(tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(InputError, match=message):
        load(tmp_path)


@pytest.mark.parametrize(
    "config",
    [Qwen3NextConfig(**SMALL, num_experts=0), CONFIGS["dense"]],
    ids=["qwen3_next", "qwen3_5"],
)
def test_packed_texts_leak_in_transformers_and_not_in_ours(config: Any, tmp_path: Path) -> None:
    peer = their_decoder(config)
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    first, second = texts((9, 7))
    other = (first + 1) % VOCABULARY
    places = torch.cat([torch.arange(9), torch.arange(7)])[None]

    def packed(text: torch.Tensor) -> torch.Tensor:
        """Their logits of the second text, packed as their data collators do."""
        with torch.no_grad():
            logits: torch.Tensor = peer(torch.cat([text, second])[None], position_ids=places)[0]
        return logits[0, 9:]

    with torch.no_grad():
        mine = [ours(Ragged.from_list([text, second])).logits.of(1) for text in (first, other)]
    assert (packed(first) - packed(other)).abs().max() > 0.01
    assert torch.equal(*mine)
    assert_same(Ragged.from_list(mine[:1]), each_alone(peer, [second]))
