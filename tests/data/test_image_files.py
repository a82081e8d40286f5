"""Image files as a model reads them: as in training."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads.data.image_preprocessing import find_images, read_image, record_image_preprocessing
from manyheads.data.images import ImageFolder
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.vision import Vision
from tests.messages import refuses


def seeing(channels: int = 3) -> Vision:
    shape: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "hidden": 16}
    model = build("vit-b16", **shape, image=32, channels=channels, classes=2, seed=0)
    assert isinstance(model, Vision)
    return model


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    (tmp_path / "cats").mkdir()
    Image.fromarray(pixels).save(tmp_path / "cats/one.png")
    return tmp_path / "cats/one.png"


@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_is_read_as_training_reads_it(photo: Path, channels: int) -> None:
    model = seeing(channels)
    record_image_preprocessing(model, 0.4, 0.3)
    folder = ImageFolder(photo.parents[1], size=32, channels=channels, mean=0.4, std=0.3)
    images = folder.batch([0]).images
    assert images is not None
    torch.testing.assert_close(read_image(model, photo), images[0])


def test_a_folder_stands_for_the_images_in_it(photo: Path) -> None:
    (photo.parent / "note.txt").write_text("no image")
    assert find_images(photo.parents[1]) == [photo] == find_images(photo)
    photo.unlink()
    with refuses(InputError, f"{photo.parent} holds no image: lay .png, .jpg, .jpeg files there."):
        find_images(photo.parent)


def test_what_is_no_image_is_refused(photo: Path) -> None:
    with refuses(InputError, f"there is no file {photo.parent}/two.png: name an image."):
        read_image(seeing(), photo.parent / "two.png")
    with refuses(InputError, f"{__file__} is no image: name a PNG or a JPEG."):
        read_image(seeing(), Path(__file__))
    photo.write_bytes(photo.read_bytes()[:200])
    with pytest.raises(InputError, match="is a broken image"):
        read_image(seeing(), photo)
