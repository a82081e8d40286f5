"""Folders of OLMo 2 and OLMo 3."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Olmo2Config, Olmo3Config

from manyheads.checkpoints.families.decoders.olmo import OLMO
from manyheads.errors import ConfigError
from manyheads.parts.positions.rotary import NoScaling, YarnScaling
from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "attention_factor": 1.2,
}
CONFIGS = {
    "olmo 2": Olmo2Config(**SMALL),
    "olmo 2, biases, tied": Olmo2Config(
        **SMALL | {"num_key_value_heads": 4}, attention_bias=True, tie_word_embeddings=True
    ),
    "olmo 3": Olmo3Config(
        **SMALL,
        sliding_window=4,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        rope_parameters={
            "full_attention": YARN,
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0},
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    check_family(CONFIGS[name], tmp_path)


def test_an_older_scaling_belongs_to_layers_without_a_window() -> None:
    old = SMALL | {"model_type": "olmo3", "num_hidden_layers": 4, "rope_scaling": YARN}
    layers = [layer.attention.inner for layer in OLMO.read_config(old).stack.layers]
    assert [type(layer.position.scaling) for layer in layers] == [NoScaling] * 3 + [YarnScaling]


def test_a_window_without_a_width_is_refused() -> None:
    with pytest.raises(ConfigError, match="sliding_window"):
        OLMO.read_config(SMALL | {"model_type": "olmo3", "sliding_window": None})
