"""Models with mixers equal those of `transformers`, also packed, where theirs leaks."""

from pathlib import Path
from typing import Any

import pytest
from transformers import FalconMambaConfig, Mamba2Config, MambaConfig, Qwen3NextConfig

from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family

MAMBA: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "state_size": 5,
}


@pytest.mark.parametrize(
    ("config", "changes"),
    [
        (MambaConfig, {"time_step_rank": 3, "conv_kernel": 3}),
        (MambaConfig, {"use_bias": True, "expand": 3, "tie_word_embeddings": False}),
        (FalconMambaConfig, {"mixer_rms_eps": 1e-4}),
    ],
)
def test_mamba(config: Any, changes: dict[str, Any], tmp_path: Path) -> None:
    check_family(config(**MAMBA | changes), tmp_path)


MAMBA2: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_heads": 4,
    "head_dim": 8,
    "state_size": 6,
    "n_groups": 2,
    "chunk_size": 8,
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"use_bias": True, "use_conv_bias": False, "n_groups": 1, "tie_word_embeddings": True},
        {"time_step_limit": [0.3, 0.8], "conv_kernel": 3},
    ],
)
def test_mamba2(changes: dict[str, Any], tmp_path: Path) -> None:
    # Their steps forget the limits of dt, and go wrong without a bias of the convolution.
    generates = not {"time_step_limit", "use_conv_bias"} & changes.keys()
    check_family(Mamba2Config(**MAMBA2 | changes), tmp_path, generates=generates)


QWEN3_NEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "partial_rotary_factor": 0.5,
    "num_experts": 0,
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
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {**EXPERTS, "layer_types": ["linear_attention", "full_attention"] * 2},
        {"linear_num_key_heads": 4, "linear_conv_kernel_dim": 2, "tie_word_embeddings": True},
    ],
)
def test_qwen3_next(changes: dict[str, Any], tmp_path: Path) -> None:
    check_family(Qwen3NextConfig(**QWEN3_NEXT | changes), tmp_path)
