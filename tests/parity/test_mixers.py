"""Models with mixers equal those of `transformers`, also packed, where theirs leaks."""

from pathlib import Path
from typing import Any

import pytest
from transformers import Mamba2Config

from tests.parity.comparing import VOCABULARY
from tests.parity.families import check_family

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
    config = Mamba2Config(**MAMBA2 | changes)
    # Their steps forget the limits of dt.
    check_family(config, tmp_path, generates="time_step_limit" not in changes)
