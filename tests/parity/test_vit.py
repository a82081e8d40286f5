"""The vision transformer gives the classes of `transformers`, at any resolution."""

import pytest
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification

from manyheads.models.build import build
from manyheads.models.recipes import vit
from manyheads.models.vision import Vision
from tests.parity import copying
from tests.parity.comparing import assert_same

Pair = tuple[ViTForImageClassification, Vision]


@pytest.fixture(scope="module")
def pair() -> Pair:
    peer = ViTForImageClassification(
        ViTConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=4,
            intermediate_size=48,
            num_labels=7,
            attn_implementation="eager",
        )
    ).eval()
    copying.scramble(peer)
    ours = build(vit(width=32, heads=4, hidden=48, layers=2, classes=7))
    copying.vit(peer, ours)
    return peer, ours


def image(height: int, width: int) -> Tensor:
    return torch.randn(3, height, width, generator=torch.Generator().manual_seed(height + width))


def alone(peer: ViTForImageClassification, images: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [peer(one[None], interpolate_pos_encoding=True).logits[0] for one in images]


@pytest.mark.parametrize("side", [224, 384])
def test_classes_are_those_of_transformers(pair: Pair, side: int) -> None:
    peer, ours = pair
    images = [image(side, side), -image(side, side)]
    with torch.no_grad():
        assert_same(ours(torch.stack(images)).logits, alone(peer, images))


def test_several_resolutions_in_one_batch_are_each_as_in_transformers(pair: Pair) -> None:
    peer, ours = pair
    images = [image(*sides) for sides in ((224, 224), (384, 384), (32, 64), (16, 16), (224, 224))]
    with torch.no_grad():
        assert_same(ours(images).logits, alone(peer, images))
