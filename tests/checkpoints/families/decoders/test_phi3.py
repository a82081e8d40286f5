"""Phi-3 folders."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Phi3Config

from manyheads.checkpoints.families.decoders.phi3 import PHI3
from manyheads.errors import ConfigError
from manyheads.parts.positions.rotary import LongRopeScaling
from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
LONG = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.5,
    "short_factor": [1.0, 1.1, 1.3, 1.6],
    "long_factor": [1.5, 2.0, 3.0, 5.0],
}
CONFIGS = {
    "window": Phi3Config(
        **SMALL,
        sliding_window=4,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": 100.0,
            "partial_rotary_factor": 0.5,
        },
    ),
    "longrope": Phi3Config(**SMALL, rope_parameters=LONG, original_max_position_embeddings=10),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    check_family(CONFIGS[name], tmp_path)


def test_older_names_of_longrope_are_read() -> None:
    rope = {key: each for key, each in LONG.items() if key.endswith("_factor")}
    old = SMALL | {
        "model_type": "phi3",
        "original_max_position_embeddings": 16,
        "rope_scaling": {"type": "su", **rope},
    }
    scaling = PHI3.read_config(old).stack.layers[0].attention.inner.position.scaling
    assert isinstance(scaling, LongRopeScaling)
    assert scaling.original_length == 16
    assert scaling.temperature == pytest.approx((1 + 0.5) ** 0.5)


def test_another_scaling_is_refused() -> None:
    keys = {"model_type": "phi3", "rope_parameters": {"rope_type": "linear", "factor": 2.0}}
    with pytest.raises(ConfigError, match=r"rope_type='linear'.*longrope"):
        PHI3.read_config(SMALL | keys)
