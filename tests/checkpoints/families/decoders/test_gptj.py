"""GPT-J folders."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import GPTJConfig, GPTJForSequenceClassification, GPTJModel

from manyheads import Ragged, load, save, surgery
from manyheads.checkpoints.families.decoders.gptj import GPTJ
from manyheads.errors import ConfigError
from tests.checkpoints.peer_models import assert_equal, randomized
from tests.parity.comparing import VOCABULARY, assert_same, texts
from tests.parity.families import check_family, their_decoder

SMALL: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "n_embd": 48,
    "n_layer": 2,
    "n_head": 3,
    "n_positions": 64,
    "rotary_dim": 6,
    "bos_token_id": None,
    "eos_token_id": None,
}
CONFIGS = {
    "a part of each head": {},
    "whole heads, tied, relu": {
        "rotary_dim": 16,
        "tie_word_embeddings": True,
        "activation_function": "relu",
        "n_inner": 40,
    },
}


@pytest.mark.parametrize("name", CONFIGS)
def test_same_numbers_here_and_back(name: str, tmp_path: Path) -> None:
    check_family(GPTJConfig(**SMALL | CONFIGS[name]), tmp_path)


def test_a_classifier_and_a_bare_model(tmp_path: Path) -> None:
    config = GPTJConfig(**SMALL | {"pad_token_id": VOCABULARY - 1}, num_labels=3)
    classifier = randomized(GPTJForSequenceClassification(config))
    classifier.save_pretrained(tmp_path / "classes")
    text = texts((9,))[0].clamp(max=VOCABULARY - 2)
    with torch.no_grad():
        result = load(tmp_path / "classes")(Ragged.from_list([text])).logits
        torch.testing.assert_close(result, classifier(text[None]).logits, atol=1e-4, rtol=0)
    bare = randomized(GPTJModel(config))
    bare.save_pretrained(tmp_path / "bare")
    file = tmp_path / "bare/model.safetensors"
    save_file({**load_file(file), "h.0.attn.masked_bias": torch.tensor(-1e9)}, file)
    with torch.no_grad():
        result = load(tmp_path / "bare")(Ragged.from_list([text])).hidden
        assert_same(result, [bare(text[None]).last_hidden_state[0]])


def test_the_norm_of_both_branches_is_one_when_trained_copied_and_pruned(tmp_path: Path) -> None:
    their_decoder(GPTJConfig(**SMALL)).save_pretrained(tmp_path)
    model: Any = load(tmp_path)
    layer = model.stack.layers[1]
    assert layer.feedforward_residual.norm is layer.attention_residual.norm
    assert not any("feedforward_residual" in name for name in model.state_dict())
    batch = Ragged.from_list(texts())
    model(batch).logits.values.sum().backward()
    assert layer.attention_residual.norm.weight.grad.abs().max() > 0
    smaller = surgery.prune(model, ["L0H1", "L1H0", "L1H1", "L1H2"])
    with torch.no_grad():
        model.stack.layers[0].attention.output.weight[:, 16:32] = 0
        model.stack.layers[1].attention.output.weight.zero_()
        assert_same(smaller(batch).logits, model(batch).logits.to_list())
    save(smaller, tmp_path / "smaller")
    assert_equal(load(tmp_path / "smaller"), smaller)


def test_the_number_of_rotated_channels_is_exact() -> None:
    for channels in range(2, 102, 2):
        sizes = {"n_embd": 202, "n_head": 2, "rotary_dim": channels}
        config: Any = GPTJ.read_config(SMALL | sizes)
        assert config.stack.attention(0).position.rotated_channels(101) == channels


@pytest.mark.parametrize("channels", [None, 0, 20])
def test_rotated_channels_that_no_head_has_are_refused(channels: int | None) -> None:
    with pytest.raises(ConfigError, match="rotary_dim must be in 1 to 16"):
        GPTJ.read_config(SMALL | {"model_type": "gptj", "rotary_dim": channels})
