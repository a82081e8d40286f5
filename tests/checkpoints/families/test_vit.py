"""ViT folders, with the names of the hub and those of transformers 5's modules."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification, ViTModel

from manyheads import build, load, save
from manyheads.checkpoints.families.vit import VIT
from manyheads.errors import ConfigError, InputError
from tests.checkpoints.peer_models import randomized, same_files
from tests.parity.comparing import assert_same

SMALL = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "intermediate_size": 40,
    "image_size": 28,
    "patch_size": 4,
    "num_labels": 5,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "one head, relu": {"num_attention_heads": 1, "hidden_act": "relu", "num_hidden_layers": 1},
    "grey, tanh": {"num_channels": 1, "hidden_act": "gelu_new", "layer_norm_eps": 1e-3},
    "dropout": {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.2, "num_labels": 3},
}
# The model's own size, a larger one as 384 is to 224, and sides that differ.
SIDES = ((28, 28), (48, 48), (8, 16), (4, 4), (28, 28))
WEIGHTS = "model.safetensors"


def peer_model(kind: Callable[..., Any] = ViTForImageClassification, **changes: Any) -> Any:
    return randomized(kind(ViTConfig(**(SMALL | changes), attn_implementation="eager")))


def images(channels: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(channels, *sides, generator=generator) for sides in SIDES]


def classes(model: Any, pictures: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [model(one[None], interpolate_pos_encoding=True).logits[0] for one in pictures]


def hidden(model: Any, pictures: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [
            model(one[None], interpolate_pos_encoding=True).last_hidden_state[0] for one in pictures
        ]


def assert_equal(one: Any, other: Any) -> None:
    assert one.config == other.config
    result, expected = one.state_dict(), other.state_dict()
    assert result.keys() == expected.keys()
    assert all(torch.equal(result[name], expected[name]) for name in expected)


def of_modules(name: str) -> str:
    """A name of their files as transformers 5 calls the module."""
    for old, new in (
        ("encoder.layer.", "layers."),
        ("attention.attention.query", "attention.q_proj"),
        ("attention.attention.key", "attention.k_proj"),
        ("attention.attention.value", "attention.v_proj"),
        ("attention.output.dense", "attention.o_proj"),
        ("intermediate.dense", "mlp.fc1"),
        ("output.dense", "mlp.fc2"),
    ):
        name = name.replace(old, new)
    return name


@pytest.mark.parametrize("name", CONFIGS)
def test_same_classes_here_and_back(name: str, tmp_path: Path) -> None:
    model = peer_model(**CONFIGS[name])
    model.save_pretrained(tmp_path / "theirs")
    pictures = images(model.config.num_channels)
    expected = classes(model, pictures)
    ours: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        assert_same(ours(pictures).logits, expected)
    ours.source_config = None  # our own words must do
    assert save(ours, tmp_path / "ours").family == "vit"
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = ViTForImageClassification.from_pretrained(
        tmp_path / "ours", attn_implementation="eager"
    )
    torch.testing.assert_close(classes(again.eval(), pictures), expected)
    assert_equal(load(tmp_path / "ours"), ours)


@pytest.mark.parametrize("pooled", [True, False])
def test_the_bare_model_gives_hidden_states_and_keeps_its_pooler(
    pooled: bool, tmp_path: Path
) -> None:
    model = peer_model(lambda config: ViTModel(config, add_pooling_layer=pooled))
    model.save_pretrained(tmp_path / "theirs")
    pictures = images(3)
    ours: Any = load(tmp_path / "theirs")
    assert ours.readout is None
    with torch.no_grad():
        assert_same(ours(pictures).hidden, hidden(model, pictures))
    ours.source_config = None  # our own words must do
    assert save(ours, tmp_path / "ours").family == "vit"
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = ViTModel.from_pretrained(
        tmp_path / "ours", add_pooling_layer=False, attn_implementation="eager"
    )
    torch.testing.assert_close(hidden(again.eval(), pictures), hidden(model, pictures))
    assert_equal(load(tmp_path / "ours"), ours)


@pytest.mark.parametrize("prefix", ["vit.", ""])
@pytest.mark.parametrize("rename", [of_modules, str], ids=["modules", "hub"])
def test_every_layout_of_names_loads_the_same(
    prefix: str, rename: Callable[[str], str], tmp_path: Path
) -> None:
    model = peer_model()
    model.save_pretrained(tmp_path)
    expected = load(tmp_path)
    stored = load_file(tmp_path / WEIGHTS)
    renamed = {
        prefix + rename(name.removeprefix("vit.")) if name.startswith("vit.") else name: tensor
        for name, tensor in stored.items()
    }
    if rename is of_modules and prefix:
        assert renamed.keys() == model.state_dict().keys()
    renamed[prefix + "pooler.dense.weight"] = torch.zeros(24, 24)
    save_file(renamed, tmp_path / WEIGHTS)
    assert_equal(load(tmp_path), expected)


def test_a_model_opens_in_transformers(tmp_path: Path) -> None:
    model = build(
        "vit-b16", width=24, heads=3, hidden=32, layers=1, image=16, patch=8, classes=4, seed=0
    )
    with torch.no_grad():
        model.readout.weight.normal_(generator=torch.Generator().manual_seed(0))
    assert save(model, tmp_path).family == "vit"
    opened = ViTForImageClassification.from_pretrained(tmp_path).eval()
    picture = torch.randn(3, 16, 16, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        assert_same(model(picture[None]).logits, classes(opened, [picture]))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qkv_bias": False}, "qkv_bias=false"),
        ({"hidden_act": "mish"}, "hidden_act='mish' is not supported: use gelu, gelu_new"),
        ({"image_size": [28, 32]}, "must be square"),
        ({"architectures": ["ViTForMaskedImageModeling"]}, "is not supported"),
    ],
)
def test_an_unsupported_config_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        VIT.read_config({"model_type": "vit", **SMALL, **changes})


def test_a_grid_of_another_size_is_named_with_its_shape(tmp_path: Path) -> None:
    peer_model().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"image_size": 32}))
    reason = r"position_embeddings has shape \(1, 50, 24\), expected \(1, 65, 24\)"
    with pytest.raises(InputError, match=reason):
        load(tmp_path)
