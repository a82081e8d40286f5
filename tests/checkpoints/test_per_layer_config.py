"""Uneven models of the Llama family, written with `per_layer_config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

import manyheads
from manyheads import Head, surgery
from manyheads.errors import InputError

IDS = torch.tensor([[3, 1, 4, 1, 5, 9]])


def pruned(folder: Path, family: str) -> Any:
    """A model whose layer 1 has lost two of its four heads."""
    config = {"llama": transformers.LlamaConfig, "qwen3": transformers.Qwen3Config}[family](
        vocab_size=40,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
    )
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    model = manyheads.load(folder)
    return surgery.prune(model, [Head(1, 2), Head(1, 3)])


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_an_uneven_model_is_written_and_read(family: str, tmp_path: Path) -> None:
    model = pruned(tmp_path / "whole", family)
    saved = manyheads.save(model, tmp_path / "uneven")
    description = json.loads((tmp_path / "uneven/config.json").read_text())
    assert saved.family == description["model_type"] == family
    assert description["per_layer_config"] == {
        "1": {"num_attention_heads": 2, "num_key_value_heads": 1}
    }
    assert "transformers" in str(saved)
    assert saved.uneven
    again = manyheads.load(tmp_path / "uneven")
    assert again.config == model.config
    torch.testing.assert_close(again(IDS).logits, model(IDS).logits)
    # It stays what it is when it is saved once more.
    manyheads.save(again, tmp_path / "once more")
    assert json.loads((tmp_path / "once more/config.json").read_text()) == description
    # Llama's config does not allow it for heads yet.
    if family != "llama":
        peer = transformers.AutoConfig.from_pretrained(tmp_path / "uneven").per_layer_config
        assert [each.num_attention_heads for each in peer] == [4, 2, 4]


def test_groups_of_different_size_keep_our_own_layout(tmp_path: Path) -> None:
    model = surgery.prune(pruned(tmp_path / "whole", "llama"), [Head(0, 1)])
    saved = manyheads.save(model, tmp_path / "model")
    assert saved.family == "manyheads"


@pytest.mark.parametrize(
    ("per_layer", "match"),
    [
        ({"9": {"intermediate_size": 8}}, "0 to 2.*'9'"),
        ({"1": {"skip": ["mlp"]}}, "skip.*num_attention_heads"),
        ([1], "layers from 0 to 2"),
        ({"1": {"num_attention_heads": 3}}, "kv_heads"),
        ({"1": {"intermediate_size": 8}}, "mlp"),
    ],
)
def test_wrong_overrides_are_refused(per_layer: Any, match: str, tmp_path: Path) -> None:
    manyheads.save(pruned(tmp_path / "whole", "llama"), tmp_path / "model")
    file = tmp_path / "model/config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), "per_layer_config": per_layer}))
    with pytest.raises(InputError, match=match):
        manyheads.load(tmp_path / "model")
