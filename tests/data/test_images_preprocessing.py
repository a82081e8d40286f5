"""How images become numbers, as training, reports and transformers do it."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from PIL import Image

from manyheads import load, save
from manyheads.data.images import (
    ImageFolder,
    find_images,
    image_normalization,
    image_size,
    read_image,
    record_image_preprocessing,
    to_grayscale,
)
from manyheads.errors import InputError
from manyheads.models.build import build
from manyheads.models.vision import Vision
from tests.messages import refuses


@pytest.fixture
def photo(tmp_path: Path) -> Path:
    path = tmp_path / "photos" / "noise" / "one.png"
    path.parent.mkdir(parents=True)
    drawn = np.random.default_rng(0).integers(0, 256, (20, 24, 3)).astype(np.uint8)
    Image.fromarray(drawn).save(path)
    return path


def small() -> Any:
    shape = {"layers": 1, "width": 16, "heads": 2, "hidden": 16, "image": 16, "patch": 8}
    return build("vit-b16", seed=0, classes=2, **shape)


def test_a_colored_image_is_as_grey_as_training_reads_it(photo: Path) -> None:
    with Image.open(photo) as open_file:
        peer = torch.from_numpy(np.array(open_file.convert("L"))).float() / 255
        ours = torch.from_numpy(np.array(open_file)).permute(2, 0, 1).float() / 255
    assert torch.allclose(to_grayscale(ours)[0], peer, atol=1 / 255)


def test_the_preprocessing_of_training_is_saved_and_other_keys_stay() -> None:
    model = small()
    model.side_files = {"preprocessor_config.json": b'{"do_center_crop": true, "image_std": [1]}'}
    record_image_preprocessing(model, 0.4, 0.3)
    said = json.loads(model.side_files["preprocessor_config.json"])
    assert (said["do_center_crop"], said["image_mean"], said["image_std"]) == (
        True,
        [0.4] * 3,
        [0.3] * 3,
    )
    mean, deviation = image_normalization(model, 3)
    assert torch.allclose(mean, torch.tensor(0.4))
    assert torch.allclose(deviation, torch.tensor(0.3))


def test_transformers_makes_the_same_numbers(photo: Path, tmp_path: Path) -> None:
    model = small()
    record_image_preprocessing(model, 0.4, 0.3)
    save(model, tmp_path / "model")
    assert load(tmp_path / "model").side_files == model.side_files
    processor = transformers.AutoImageProcessor.from_pretrained(tmp_path / "model", backend="pil")
    with Image.open(photo) as open_file:
        peer = processor(open_file, return_tensors="pt")["pixel_values"][0]
    folder = ImageFolder(photo.parent.parent, size=16, mean=0.4, std=0.3)
    assert torch.allclose(folder.batch([0]).images[0], peer, atol=1e-5)


def test_the_size_of_training_is_saved_and_read() -> None:
    model = small()
    assert image_size(model) == 16
    record_image_preprocessing(model, 0.4, 0.3, 32)
    said = json.loads(model.side_files["preprocessor_config.json"])
    assert said["size"] == {"height": 32, "width": 32}
    assert image_size(model) == 32
    record_image_preprocessing(model, 0.4, 0.3)
    assert image_size(model) == 32, "what was known stays"


@pytest.mark.parametrize("said", [{"size": 32}, {"size": {"shortest_edge": 32}}])
def test_what_is_no_square_or_is_cropped_is_read_as_the_patches_are_made(
    said: dict[str, object],
) -> None:
    model = small()
    model.side_files = {"preprocessor_config.json": json.dumps(said).encode()}
    assert image_size(model) == 16
    cropped = {"size": {"height": 32, "width": 32}, "do_center_crop": True}
    model.side_files = {"preprocessor_config.json": json.dumps(cropped).encode()}
    assert image_size(model) == 16


def seeing(channels: int = 3) -> Vision:
    shape: dict[str, Any] = {"layers": 1, "width": 16, "heads": 2, "hidden": 16}
    model = build("vit-b16", **shape, image=32, channels=channels, classes=2, seed=0)
    assert isinstance(model, Vision)
    return model


@pytest.fixture
def image_file(tmp_path: Path) -> Path:
    pixels = np.random.default_rng(0).integers(0, 256, (40, 48, 3), dtype=np.uint8)
    (tmp_path / "cats").mkdir()
    Image.fromarray(pixels).save(tmp_path / "cats/one.png")
    return tmp_path / "cats/one.png"


@pytest.mark.parametrize("channels", [1, 3])
def test_a_file_is_read_as_training_reads_it(image_file: Path, channels: int) -> None:
    model = seeing(channels)
    record_image_preprocessing(model, 0.4, 0.3)
    folder = ImageFolder(image_file.parents[1], size=32, channels=channels, mean=0.4, std=0.3)
    images = folder.batch([0]).images
    assert images is not None
    torch.testing.assert_close(read_image(model, image_file), images[0])


def test_a_folder_stands_for_the_images_in_it(image_file: Path) -> None:
    (image_file.parent / "note.txt").write_text("no image")
    assert find_images(image_file.parents[1]) == [image_file] == find_images(image_file)
    image_file.unlink()
    with refuses(InputError, f"{image_file.parent} has no images: add .png, .jpg, .jpeg files."):
        find_images(image_file.parent)


def test_what_is_no_image_is_refused(image_file: Path) -> None:
    with refuses(InputError, f"{image_file.parent}/two.png does not exist: give an image file."):
        read_image(seeing(), image_file.parent / "two.png")
    with refuses(InputError, f"{__file__} is not an image: use a PNG or a JPEG."):
        read_image(seeing(), Path(__file__))
    image_file.write_bytes(image_file.read_bytes()[:200])
    with pytest.raises(InputError, match="is a damaged image"):
        read_image(seeing(), image_file)
