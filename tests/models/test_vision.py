"""Vision: images of any sizes in one batch, cut into patches and read like sentences."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.errors import ConfigError, InputError, ShapeError
from manyheads.models.build import build
from manyheads.models.readout import NoReadout
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.ragged import Ragged
from tests.models.zoo import VISIONS, WIDTH, images, layer, small, vision

SIDES = ((8, 8), (4, 12), (8, 8), (16, 4))


def test_a_tensor_gives_a_rectangle_and_a_list_a_ragged_batch() -> None:
    model, batch = small(VISIONS["vit"]), images(((8, 12),) * 3)
    with torch.no_grad():
        rectangle, ragged = model(torch.stack(batch)), model(batch)
    assert rectangle.hidden.shape == (3, 7, WIDTH)
    assert isinstance(ragged.hidden, Ragged)
    assert torch.equal(rectangle.hidden.flatten(0, 1), ragged.hidden.values)
    assert torch.equal(rectangle.logits, ragged.logits)
    assert ragged.logits.shape == (3, 5)


def test_every_image_has_its_patches_and_a_class_token() -> None:
    with torch.no_grad():
        output = small(VISIONS["vit"])(images(SIDES))
    assert output.hidden.lengths.each == (5, 4, 5, 5)
    assert output.logits.shape == (4, 5)


@pytest.mark.parametrize("name", VISIONS)
def test_several_resolutions_are_each_as_alone(name: str) -> None:
    model, batch = small(VISIONS[name]), images(SIDES)
    with torch.no_grad():
        together = model(batch)
        for index, image in enumerate(batch):
            alone = model(image[None])
            torch.testing.assert_close(
                together.hidden.of(index), alone.hidden[0], rtol=1e-4, atol=1e-4
            )
            torch.testing.assert_close(
                together.logits[index], alone.logits[0], rtol=1e-4, atol=1e-4
            )


def by_hand(image: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """Patches row by row, each flattened and projected."""
    rows, columns = image.shape[1] // 4, image.shape[2] // 4
    vectors = [
        weight.flatten(1) @ image[:, 4 * y : 4 * y + 4, 4 * x : 4 * x + 4].flatten() + bias
        for y in range(rows)
        for x in range(columns)
    ]
    return torch.stack(vectors)


def test_a_patch_is_a_flat_square_times_a_matrix() -> None:
    embedding = build(VISIONS["vit"], seed=0).embedding.requires_grad_(False)
    embedding.class_token.normal_()
    convolution, table = embedding.convolution, embedding.positions
    convolution.bias.normal_()
    (image,) = images(((8, 8),))
    result = embedding(image[None])[0]
    patches = by_hand(image, convolution.weight, convolution.bias)
    torch.testing.assert_close(result[0], embedding.class_token + table.class_token)
    torch.testing.assert_close(result[1:], patches + table.patches.flatten(0, 1))


def test_positions_of_another_grid_are_interpolated_and_the_class_token_kept() -> None:
    embedding = build(VISIONS["vit"], seed=0).embedding.requires_grad_(False)
    (image,) = images(((12, 16),))
    result = embedding(image[None])[0]
    patches = by_hand(image, embedding.convolution.weight, embedding.convolution.bias)
    grid = embedding.positions.patches.permute(2, 0, 1)[None]
    resized = F.interpolate(grid, size=(3, 4), mode="bicubic", align_corners=False)
    torch.testing.assert_close(result[1:], patches + resized[0].flatten(1).T)
    torch.testing.assert_close(result[0], embedding.class_token + embedding.positions.class_token)


def test_images_of_one_size_are_embedded_together(monkeypatch: pytest.MonkeyPatch) -> None:
    model = small(VISIONS["vit"])
    shapes: list[tuple[int, ...]] = []
    forward = torch.nn.Conv2d.forward

    def counted(self: torch.nn.Conv2d, x: Tensor) -> Tensor:
        shapes.append(tuple(x.shape))
        return forward(self, x)

    monkeypatch.setattr(torch.nn.Conv2d, "forward", counted)
    with torch.no_grad():
        model(images(SIDES))
    assert shapes == [(2, 3, 8, 8), (1, 3, 4, 12), (1, 3, 16, 4)]


@pytest.mark.parametrize(
    ("side", "nearest"), [((8, 10), (8, 8)), ((7, 8), (4, 8)), ((3, 4), (4, 4)), ((0, 4), (4, 4))]
)
def test_an_image_that_is_no_multiple_of_the_patch_is_refused(
    side: tuple[int, int], nearest: tuple[int, int]
) -> None:
    for inputs in (torch.zeros(1, 3, *side), [torch.zeros(3, 8, 8), torch.zeros(3, *side)]):
        with pytest.raises(InputError) as caught:
            small(VISIONS["vit"])(inputs)
        assert str(caught.value) == (
            f"an image of {side[0]} x {side[1]} is not a multiple of the patch size 4: "
            f"resize or crop it, for example to {nearest[0]} x {nearest[1]}."
        )


@pytest.mark.parametrize("channels", [1, 4])
def test_other_channels_are_refused(channels: int) -> None:
    with pytest.raises(ShapeError) as caught:
        small(VISIONS["vit"])(torch.zeros(1, channels, 8, 8))
    assert str(caught.value) == f"an image must have 3 channels, got {channels}."


def test_images_of_another_shape_are_refused() -> None:
    model = small(VISIONS["vit"])
    with pytest.raises(ShapeError) as caught:
        model(torch.zeros(3, 8, 8))
    assert str(caught.value) == (
        "images have shape (3, 8, 8): give (batch, channels, height, width), "
        "or a list of (channels, height, width)."
    )
    with pytest.raises(ShapeError, match=r"image 1 has shape \(8, 8\): give \(channels, height"):
        model([torch.zeros(3, 8, 8), torch.zeros(8, 8)])
    with pytest.raises(InputError, match="the list of images is empty: give at least one"):
        model([])


def test_an_image_size_that_is_no_multiple_is_refused_in_the_config() -> None:
    with pytest.raises(
        ConfigError, match="image=30 is not a multiple of the patch size=4: use 28 or"
    ):
        Patches(width=WIDTH, image=30, size=4)


def test_patches_of_another_width_are_refused() -> None:
    with pytest.raises(ConfigError, match="the patches have width 16, and the stack 32: give both"):
        VisionConfig(patches=Patches(width=16), stack=StackConfig(width=WIDTH, layers=(layer(),)))


def test_a_model_takes_images_of_another_precision() -> None:
    model = small(VISIONS["vit"])
    with torch.no_grad():
        whole, half = model(images()), model([image.half() for image in images()])
    assert half.logits.dtype == torch.float32
    torch.testing.assert_close(half.logits, whole.logits, rtol=1e-2, atol=1e-1)


def test_without_a_readout_the_hidden_states_are_the_answer() -> None:
    with torch.no_grad():
        output = small(vision(layer(), readout=NoReadout()))(images())
    assert output.logits is None
    assert output.hidden.values.shape == (19, WIDTH)


def test_gradients_reach_pixels_and_every_parameter() -> None:
    model, batch = build(VISIONS["vit"], seed=0), images()
    for image in batch:
        image.requires_grad_()
    model(batch).logits.square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    assert all(image.grad.abs().min() > 0 for image in batch)
