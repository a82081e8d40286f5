"""Folders of gpt-oss."""

from pathlib import Path
from typing import Any

import pytest
from transformers import GptOssConfig

from manyheads.checkpoints.families.decoders.gpt_oss import GPT_OSS
from manyheads.errors import ConfigError
from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "swiglu_limit": 1.5,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "truncate": False,
    "original_max_position_embeddings": 16,
}
CONFIGS = {
    "yarn": GptOssConfig(**SMALL, rope_parameters=YARN),
    "no bias, tied": GptOssConfig(
        **SMALL,
        rope_parameters={"rope_type": "default", "rope_theta": 100.0},
        attention_bias=False,
        tie_word_embeddings=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"],
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    check_family(CONFIGS[name], tmp_path)


def test_quantized_weights_are_refused_by_name() -> None:
    quantized = {"model_type": "gpt_oss", "quantization_config": {"quant_method": "mxfp4"}}
    with pytest.raises(ConfigError, match=r"mxfp4.*dequantize=True"):
        GPT_OSS.read_config(SMALL | quantized)
