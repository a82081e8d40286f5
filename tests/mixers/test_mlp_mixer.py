"""MLP-Mixer: weights across the tokens of texts of one length."""

from pathlib import Path

import pytest
import torch

from manyheads import Ragged, load, save
from manyheads.errors import InputError
from manyheads.mixers import MlpMixer
from manyheads.mixers.mlp_mixer import MlpMixerLayer
from manyheads.models import Branch, ClassHead, LayerConfig, Patches, StackConfig, VisionConfig
from manyheads.models.build import build
from manyheads.parts import MLP


def test_every_channel_is_mixed_alike() -> None:
    torch.manual_seed(0)
    layer = MlpMixerLayer(MlpMixer(width=6, length=4, hidden=9))
    text = torch.randn(4, 6)
    result = layer(Ragged.from_list([torch.zeros(4, 6), text])).to_list()[1]
    for channel in range(6):
        expected = layer.contract(torch.nn.functional.gelu(layer.expand(text[:, channel])))
        torch.testing.assert_close(result[:, channel], expected)


def test_a_text_of_another_length_is_refused() -> None:
    layer = MlpMixerLayer(MlpMixer(width=6, length=4, hidden=9))
    with pytest.raises(InputError, match=r"5 tokens.*exactly 4 tokens"):
        layer(Ragged.from_list([torch.randn(4, 6), torch.randn(5, 6)]))


def test_images_are_classified_and_saved(tmp_path: Path) -> None:
    mixes = LayerConfig(
        attention=None,
        mixer=Branch(MlpMixer(width=8, length=5, hidden=6)),
        feedforward=Branch(MLP(width=8, hidden=12)),
    )
    config = VisionConfig(
        patches=Patches(image=8, size=4, channels=1, width=8),
        stack=StackConfig(width=8, layers=(mixes, mixes)),
        readout=ClassHead(classes=3, pool="mean"),
    )
    model = build(config, seed=0)
    images = torch.randn(2, 1, 8, 8)
    model(images).logits.sum().backward()
    assert all(each.grad is not None for each in model.stack.parameters())
    save(model, tmp_path)
    with torch.no_grad():
        torch.testing.assert_close(load(tmp_path)(images).logits, model(images).logits)
