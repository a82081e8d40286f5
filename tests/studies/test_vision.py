"""The models of images, and how far away their layers read."""

import pytest
import torch
from torch import nn

from manyheads import build
from manyheads.models import Vision
from manyheads.models.recipes import vit
from studies.vision.image_models import (
    attention_distances,
    class_logits,
    gradient_distances,
    grid_distances,
)
from studies.vision.residual_cnn import ResidualCNN


def transformer() -> Vision:
    sizes = {"width": 16, "heads": 2, "hidden": 16, "layers": 2, "channels": 1, "classes": 4}
    model = build(vit(**sizes, image=32, patch=8), seed=0)
    assert isinstance(model, Vision)
    return model.eval()


def network(blocks: int = 1) -> ResidualCNN:
    return ResidualCNN(channels=1, widths=(4, 8), blocks=blocks, classes=4).eval()


def images() -> torch.Tensor:
    return torch.randn(2, 1, 32, 32, generator=torch.Generator().manual_seed(0))


def test_logits_are_those_of_the_model_itself() -> None:
    model = transformer()
    torch.testing.assert_close(class_logits(model, images()), model(images()).logits)


def test_resnet_20_has_its_published_weights() -> None:
    model = ResidualCNN(channels=3, widths=(16, 32, 64), blocks=3, classes=10)
    convolutions = [part for part in model.modules() if isinstance(part, nn.Conv2d)]
    # 0.27 million, and two projections instead of padded shortcuts.
    assert len([part for part in convolutions if part.kernel_size == (3, 3)]) == 19
    assert sum(weight.numel() for weight in model.parameters()) == 272_474


def test_a_seed_fixes_the_weights_and_leaves_the_global_one_alone() -> None:
    torch.manual_seed(7)
    expected = torch.rand(1)
    torch.manual_seed(7)
    first, second = network(), network()
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.head.weight, second.head.weight)


def test_grid_distances_are_in_pixels() -> None:
    distances = grid_distances(3, 4)
    assert distances.shape == (9, 9)
    assert distances[0].tolist() == pytest.approx(
        [0, 4, 8, 4, 32**0.5, 80**0.5, 8, 80**0.5, 128**0.5]
    )


def test_even_attention_has_the_mean_distance() -> None:
    model = transformer()
    for layer in model.stack.layers:
        for weight in layer.attention.parameters():
            nn.init.zeros_(weight)
    distances = attention_distances(model, images())
    assert [len(layer) for layer in distances] == [2, 2]
    even = float(grid_distances(4, 8).mean())
    assert [value for layer in distances for value in layer] == pytest.approx([even] * 4, rel=1e-4)


def test_the_field_of_convolutions_is_bounded_and_grows() -> None:
    fields = gradient_distances(network(blocks=2), images())
    assert len(fields) == 4
    assert fields == sorted(fields)
    # Five convolutions of 3 x 3 reach five pixels in each direction.
    assert fields[1] < 5 * 2**0.5


def test_a_patch_reads_only_itself_without_attention() -> None:
    model = transformer()
    for layer in model.stack.layers:
        nn.init.zeros_(layer.attention.output.weight)
    within = gradient_distances(model, images())
    assert max(within) < 4 * 2**0.5
    assert gradient_distances(transformer(), images())[1] > within[1]
