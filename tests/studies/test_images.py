"""Images come from their files in order, and augmentation only moves them."""

import gzip
import json
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads.errors import InputError
from studies.images import SHAPES, SHIFT, ImageTask, augment, draw_shapes, read_images


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MANYHEADS_STUDY_DATA", str(tmp_path))
    read_images.cache_clear()
    return tmp_path


def test_a_row_of_a_png_is_an_image_of_cifar(folder: Path) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (3, 32, 32, 3), dtype=np.uint8)
    (folder / "cifar10").mkdir()
    Image.fromarray(pixels.reshape(3, 1024, 3)).save(folder / "cifar10" / "data_batch_1.png")
    (folder / "cifar10" / "train_lables.json").write_text(json.dumps([6, 9, 4]), "utf-8")
    images, labels = read_images("cifar10", "train", 2)
    assert np.array_equal(images, pixels[:2])
    assert labels.tolist() == [6, 9]
    with pytest.raises(InputError, match="has 3 images"):
        read_images("cifar10", "train", 4)


def test_fashion_images_get_a_frame(folder: Path) -> None:
    pixels = np.full((2, 28, 28), 7, dtype=np.uint8)
    (folder / "fashion-mnist").mkdir()
    for name, header, data in (
        ("images-idx3", (0x803, 2, 28, 28), pixels.tobytes()),
        ("labels-idx1", (0x801, 2), bytes([3, 5])),
    ):
        packed = b"".join(number.to_bytes(4, "big") for number in header) + data
        file = folder / "fashion-mnist" / f"t10k-{name}-ubyte.gz"
        file.write_bytes(gzip.compress(packed))
    images, labels = read_images("fashion-mnist", "test", 2)
    assert images.shape == (2, 32, 32, 1)
    assert images.sum() == pixels.sum()
    assert (images[:, 2:30, 2:30, 0] == 7).all()
    assert labels.tolist() == [3, 5]


@pytest.mark.usefixtures("folder")
def test_missing_images_are_named_with_what_to_do() -> None:
    with pytest.raises(InputError, match=r"data_batch_1\.png is missing.*images\.py"):
        read_images("cifar10", "train", 10)


def test_fewer_shapes_are_the_first_of_more() -> None:
    many, few = draw_shapes("train", 24), draw_shapes("train", 8)
    assert np.array_equal(many[0][:8], few[0])
    assert set(few[1]) == set(range(len(SHAPES)))
    assert not np.array_equal(few[0], draw_shapes("test", 8)[0])


def test_augmentation_shifts_within_zeros_and_mirrors() -> None:
    images = torch.randn(3, 2, 8, 8, generator=torch.Generator().manual_seed(0))
    still = torch.full((3,), SHIFT)
    mirrored = augment(images, still, still, torch.tensor([0, 1, 0]))
    torch.testing.assert_close(mirrored[[0, 2]], images[[0, 2]])
    torch.testing.assert_close(mirrored[1], images[1].flip(2))
    moved = augment(images, still + 1, still - 2, torch.zeros(3))
    torch.testing.assert_close(moved[:, :, :7, 2:], images[:, :, 1:, :6])
    assert not moved[:, :, 7:].any()
    assert not moved[:, :, :, :2].any()


def test_every_image_comes_once_before_any_comes_again() -> None:
    task = ImageTask("shapes", "cpu", 12, 8)
    epochs = [
        sorted(image.sum().item() for images, _ in islice(batches, 3) for image in images)
        for batches in [task.batches(4, 0, augmented=False)]
        for _ in range(2)
    ]
    assert epochs[0] == pytest.approx(epochs[1])
    assert len(set(epochs[0])) == 12
    images, labels = next(task.batches(12, 1, augmented=True))
    assert images.shape == (12, 3, 32, 32)
    assert labels.bincount().tolist() == [2, 2, 2, 2, 1, 1, 1, 1]


def test_channels_are_normalized() -> None:
    images = ImageTask("shapes", "cpu", 16, 8).images("train", slice(16))
    assert images.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(images.std((0, 2, 3)), torch.ones(3))
