"""GPT-NeoX and Pythia folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTNeoXConfig, GPTNeoXForSequenceClassification

from manyheads import Ragged, load
from manyheads.checkpoints.families.decoders.gpt_neox import GPT_NEOX
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import randomized
from tests.parity.comparing import VOCABULARY, texts
from tests.parity.families import check_family, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "max_position_embeddings": 64,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "parallel": {},
    "serial, tied, relu": {
        "use_parallel_residual": False,
        "tie_word_embeddings": True,
        "hidden_act": "relu",
    },
    "no bias, whole heads, linear": {
        "attention_bias": False,
        "rope_parameters": {
            "rope_type": "linear",
            "rope_theta": 100.0,
            "factor": 2.0,
            "partial_rotary_factor": 1.0,
        },
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    ours = check_family(GPTNeoXConfig(**SMALL | CONFIGS[name]), tmp_path)
    assert (ours.config.stack.layers[0].residual == "parallel") == name.startswith(("par", "no"))


def test_other_names_and_keys_of_pythia_are_read(tmp_path: Path) -> None:
    config = GPTNeoXConfig(**SMALL, rotary_pct=0.5, rotary_emb_base=500)
    peer = their_decoder(config)
    peer.save_pretrained(tmp_path)
    expected = load(tmp_path).config
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    tensors["gpt_neox.layers.0.attention.masked_bias"] = torch.tensor(-1e9)
    tensors["gpt_neox.layers.0.attention.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, file)
    assert load(tmp_path).config == expected
    old = {"rotary_pct": 0.5, "rotary_emb_base": 500, "model_type": "gpt_neox", **SMALL}
    assert GPT_NEOX.read_config(old) == expected


def test_a_classifier_reads_the_last_token(tmp_path: Path) -> None:
    peer = randomized(
        GPTNeoXForSequenceClassification(
            GPTNeoXConfig(**SMALL | {"pad_token_id": VOCABULARY - 1}, num_labels=3)
        )
    )
    peer.save_pretrained(tmp_path)
    text = texts((9,))[0].clamp(max=VOCABULARY - 2)
    with torch.no_grad():
        result = load(tmp_path)(Ragged.from_list([text])).logits
        torch.testing.assert_close(result, peer(text[None]).logits, atol=1e-4, rtol=0)


def test_an_unknown_activation_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"hidden_act='mish'.*gelu_new"):
        GPT_NEOX.read_config(SMALL | {"model_type": "gpt_neox", "hidden_act": "mish"})
