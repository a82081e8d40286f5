"""Folders of Gemma 2 and of the text models of Gemma 3."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Gemma2Config, Gemma3TextConfig

from manyheads import Ragged, load
from manyheads.checkpoints.families.decoders.gemma import GEMMA
from manyheads.errors import ConfigError
from manyheads.parts.masks import Causal, Window
from manyheads.parts.positions.rotary import LinearScaling
from tests.parity.comparing import VOCABULARY, each_alone, texts
from tests.parity.families import check_family, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 40,
    "query_pre_attn_scalar": 24,
    "sliding_window": 4,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
CONFIGS = {
    "gemma 2": Gemma2Config(
        **SMALL, attn_logit_softcapping=3.0, final_logit_softcapping=2.0, attention_bias=True
    ),
    "gemma 2, untied, no caps": Gemma2Config(
        **SMALL,
        attn_logit_softcapping=None,
        final_logit_softcapping=None,
        tie_word_embeddings=False,
        layer_types=["full_attention"] * 3,
    ),
    "gemma 3": Gemma3TextConfig(
        **SMALL, layer_types=["sliding_attention", "full_attention", "sliding_attention"]
    ),
    "gemma 3, long texts": Gemma3TextConfig(
        **SMALL,
        sliding_window_pattern=2,
        final_logit_softcapping=4.0,
        rope_parameters={
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e2},
        },
    ),
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    check_family(CONFIGS[name], tmp_path)


def test_keys_of_the_hub_are_read() -> None:
    old = SMALL | {
        "model_type": "gemma3_text",
        "sliding_window_pattern": 3,
        "rope_theta": 1e6,
        "rope_local_base_freq": 1e4,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "rms_norm_eps": 1e-6,
    }
    layers = [layer.attention.inner for layer in GEMMA.read_config(old).stack.layers]
    assert [layer.mask for layer in layers] == [Window(3), Window(3), Causal()]
    assert [layer.position.theta for layer in layers] == [1e4, 1e4, 1e6]
    assert layers[2].position.scaling == LinearScaling(factor=8.0)


def test_the_scale_of_the_embedding_is_rounded_as_in_transformers(tmp_path: Path) -> None:
    peer = their_decoder(CONFIGS["gemma 2"]).bfloat16()
    peer.save_pretrained(tmp_path)
    ours: Any = load(tmp_path, dtype=torch.bfloat16)
    text = texts((7,))[0]
    result = ours.embedding(Ragged.from_list([text]), torch.arange(7)).values
    assert torch.equal(result, peer.model.embed_tokens(text))
    with torch.no_grad():
        logits = ours(Ragged.from_list([text])).logits.values
    torch.testing.assert_close(logits, each_alone(peer, [text])[0], atol=0.1, rtol=0)


def test_a_bidirectional_gemma_is_refused() -> None:
    keys = {"model_type": "gemma3_text", "use_bidirectional_attention": True}
    with pytest.raises(ConfigError, match="use_bidirectional_attention=true"):
        GEMMA.read_config(SMALL | keys)
