"""DINOv2 folders, without and with register tokens."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import (
    AutoModel,
    AutoModelForImageClassification,
    Dinov2Config,
    Dinov2WithRegistersConfig,
)

from manyheads import Record, Site, Tap, build, lens, load, save
from manyheads.checkpoints.families.dinov2 import DINOV2
from manyheads.errors import ConfigError, InputError
from manyheads.lens.head_kinds.image_attention import measure_image_attention
from manyheads.models.model_interface import ModelInputs
from manyheads.models.readout import ClassHead
from tests.checkpoints.peer_models import assert_equal, randomized, same_files
from tests.parity.comparing import assert_same

SMALL: dict[str, Any] = {
    "hidden_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": 28,
    "patch_size": 4,
    "num_labels": 5,
}
CONFIGS: dict[str, Callable[[], Any]] = {
    "plain": lambda: Dinov2Config(**SMALL),
    "gated": lambda: Dinov2Config(**SMALL, use_swiglu_ffn=True, mlp_ratio=3, layerscale_value=0.1),
    "registers": lambda: Dinov2WithRegistersConfig(**SMALL, num_register_tokens=3),
}
# The model's own size, a larger one, and sides that differ.
SIDES = ((28, 28), (48, 48), (8, 16), (4, 4), (28, 28))


def peer_model(auto: Any, name: str) -> Any:
    return randomized(auto.from_config(CONFIGS[name](), attn_implementation="eager"))


def images() -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, *sides, generator=generator) for sides in SIDES]


def outputs(model: Any, what: str) -> list[Tensor]:
    with torch.no_grad():
        return [getattr(model(image[None]), what)[0] for image in images()]


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize(
    ("auto", "what"),
    [(AutoModelForImageClassification, "logits"), (AutoModel, "last_hidden_state")],
)
def test_same_outputs_here_and_back(name: str, auto: Any, what: str, tmp_path: Path) -> None:
    model = peer_model(auto, name)
    model.save_pretrained(tmp_path / "theirs")
    expected = outputs(model, what)
    ours: Any = load(tmp_path / "theirs")
    with torch.no_grad():
        result = ours(images())
    assert_same(result.logits if what == "logits" else result.hidden, expected)
    ours.source_config = None
    assert save(ours, tmp_path / "ours").family == model.config.model_type
    same_files(tmp_path / "theirs", tmp_path / "ours")
    again = auto.from_pretrained(tmp_path / "ours", attn_implementation="eager").eval()
    torch.testing.assert_close(outputs(again, what), expected)
    assert_equal(load(tmp_path / "ours"), ours)


@pytest.mark.parametrize("name", CONFIGS)
def test_the_names_of_modules_load_the_same(name: str, tmp_path: Path) -> None:
    model = peer_model(AutoModelForImageClassification, name)
    model.save_pretrained(tmp_path)
    expected = load(tmp_path)
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert_equal(load(tmp_path), expected)


@pytest.mark.parametrize("name", ["plain", "registers"])
def test_heads_write_what_the_scales_of_their_layer_leave(name: str, tmp_path: Path) -> None:
    peer_model(AutoModelForImageClassification, name).save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    picture = images()[:1]
    with pytest.raises(InputError, match="ablation"):
        lens.attribute_logits(ours, picture)
    plain = build(replace(ours.config, readout=ClassHead(classes=5)), seed=0)
    plain.load_state_dict(
        plain.state_dict()
        | {key: each for key, each in ours.state_dict().items() if not key.startswith("readout.")}
    )
    assert lens.attribute_logits(plain, picture).completeness < 1e-5
    record = Record([Site(0, Tap.HEAD_OUTPUT)])
    with torch.no_grad():
        ours(picture, watch=record)
    layer = ours.stack.layers[0]
    outputs = record[Site(0, Tap.HEAD_OUTPUT)].values
    columns = layer.attention.output.weight.detach().unflatten(1, (3, 8))
    written = torch.einsum("nhd,chd->nhc", outputs, columns)
    written = written * layer.attention_residual.second_norm.weight.detach()
    result = lens.statistics(ours, picture, progress=False)["output_norm"].ranked()
    norms = {(each.head.layer, each.head.head): value for each, value in result}
    for head, expected in enumerate(written.norm(dim=-1).mean(0).tolist()):
        assert norms[0, head] == pytest.approx(expected, rel=1e-4)


def test_patches_are_counted_behind_the_registers(tmp_path: Path) -> None:
    peer_model(AutoModel, "registers").save_pretrained(tmp_path)
    ours: Any = load(tmp_path)
    picture = images()[:1]
    result = measure_image_attention(ours, ModelInputs(images=tuple(picture)), progress=False)
    sites = [Site(layer, Tap.PATTERN) for layer in range(2)]
    record = Record(sites)
    with torch.no_grad():
        ours(picture, watch=record)
    patterns = torch.cat([record[site].of(0) for site in sites])
    itself = patterns[:, 4:, 4:].diagonal(dim1=1, dim2=2).mean(1)
    torch.testing.assert_close(
        torch.tensor(result.means["self"]).float(), itself, atol=1e-5, rtol=0
    )


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"qkv_bias": False}, "qkv_bias=true"),
        ({"drop_path_rate": 0.1}, "drop_path_rate=0"),
        ({"image_size": [28, 32]}, "image_size must be square"),
        ({"architectures": ["Dinov2Backbone"]}, "use Dinov2ForImageClassification"),
    ],
)
def test_what_is_not_supported_is_refused(changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        DINOV2.read_config({"model_type": "dinov2", **SMALL, **changes})
