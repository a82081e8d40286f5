"""Images of folders, arrays and idx files reach a model scaled, with their classes."""

import gzip
import struct
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from manyheads.data.images import ImageArrays, ImageFolder, load_idx, load_npz, read_idx
from manyheads.data.stream import Stream
from manyheads.errors import InputError
from tests.messages import refuses

PIXELS = np.arange(7 * 4 * 6, dtype=np.uint8).reshape(7, 4, 6)
LABELS = np.arange(7, dtype=np.uint8)


def idx(path: Path, array: np.ndarray, kind: int = 8) -> Path:  # type: ignore[type-arg]
    header = bytes([0, 0, kind, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape)
    data = header + array.tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_idx_files_are_read_packed_or_not(suffix: str, tmp_path: Path) -> None:
    images = idx(tmp_path / f"images-idx3-ubyte{suffix}", PIXELS)
    labels = idx(tmp_path / f"labels-idx1-ubyte{suffix}", LABELS)
    result = load_idx(images, labels)
    assert (result.pixels == PIXELS).all()
    assert result.labels is not None
    assert result.labels.tolist() == list(range(7))
    wide = idx(tmp_path / "wide", np.array([1, -2], dtype=">i4"), kind=12)
    assert read_idx(wide).tolist() == [1, -2]


def test_broken_idx_files_are_named(tmp_path: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"\x1f\x8b\x08\x00")
    with refuses(
        InputError,
        f"{file} starts with 1f 8b 08 00 and is not an idx file: "
        "use one such as train-images-idx3-ubyte, which starts with 00 00 08 03.",
    ):
        read_idx(file)
    file.write_bytes(b"\0\0\x08\x03\0\0")
    with refuses(InputError, f"{file} ends within its header: download it again."):
        read_idx(file)
    file.write_bytes(idx(tmp_path / "b", PIXELS).read_bytes()[:-3])
    with refuses(
        InputError,
        f"{file} has 165 bytes of values, and its shape (7, 4, 6) needs 168: download it again.",
    ):
        read_idx(file)
    with refuses(InputError, f"{tmp_path}/c does not exist: check the path."):
        read_idx(tmp_path / "c")


def test_npz_arrays_are_chosen_by_name_and_pickles_never_read(tmp_path: Path) -> None:
    file = tmp_path / "a.npz"
    np.savez(file, images=PIXELS, labels=LABELS, other=PIXELS[:, :2])
    assert (load_npz(file).pixels == PIXELS).all()
    assert load_npz(file, images="other", labels="none").labels is None
    with refuses(InputError, f"{file} has no array 'x': use one of: images, labels, other."):
        load_npz(file, images="x")
    np.savez(file, images=np.array([{}], dtype=object))
    with pytest.raises(InputError, match=r"a\.npz is not an \.npz of plain arrays"):
        load_npz(file)
    with refuses(InputError, f"{tmp_path}/b.npz does not exist: check the path."):
        load_npz(tmp_path / "b.npz")


def test_shapes_that_are_no_images_are_refused() -> None:
    with refuses(
        InputError,
        "images have shape (4, 6): use (n, height, width), or with 1 or 3 channels.",
    ):
        ImageArrays(pixels=PIXELS[0])
    with refuses(InputError, "7 images have labels of shape (3,), uint8: give 7 integers."):
        ImageArrays(pixels=PIXELS, labels=LABELS[:3])
    below = LABELS.astype("int64") - 1
    message = (
        f"label {below[below < 0][0]} is negative: number classes from 0, and use -100 for "
        "images without one."
    )
    with refuses(InputError, message):
        ImageArrays(pixels=PIXELS, labels=below)


def test_pixels_are_scaled_and_stay_with_their_labels() -> None:
    images = ImageArrays(pixels=PIXELS, labels=LABELS)
    for batch in Stream(images, batch_tokens=3, seed=2).single_epoch():
        assert batch.labels is not None
        for image, label in zip(batch.images, batch.labels.tolist(), strict=True):
            expected = torch.from_numpy(PIXELS[label].astype(np.float32))[None] / 255 * 2 - 1
            torch.testing.assert_close(image, expected)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, color in (("dog", "red"), ("cat", "blue")):
        (tmp_path / name).mkdir()
        for number in range(3):
            Image.new("RGB", (5 + number, 4), color).save(tmp_path / name / f"{number}.png")
    (tmp_path / "cat" / "notes.txt").write_text("no image")
    return tmp_path


def test_a_folder_a_class(folder: Path) -> None:
    images = ImageFolder(folder)
    assert (images.names, len(images)) == (("cat", "dog"), 6)
    batch = images.batch([0, 4])
    assert [tuple(image.shape) for image in batch.images] == [(3, 4, 5), (3, 4, 6)]
    assert batch.images[0][:, 0, 0].tolist() == [-1, -1, 1]
    assert batch.labels is not None
    assert batch.labels.tolist() == [0, 1]
    square = ImageFolder(folder, size=8, channels=1).batch([5])
    assert square.images[0].shape == (1, 8, 8)


def test_names_of_classes_number_the_folders(folder: Path) -> None:
    images = ImageFolder(folder, names=("bird", "dog", "cat"))
    assert images.names == ("bird", "dog", "cat")
    labels = images.batch([0, 5]).labels
    assert labels is not None
    assert labels.tolist() == [2, 1]
    with refuses(InputError, f"{folder}/dog is an unknown class: use one of: cat, bird."):
        ImageFolder(folder, names=("cat", "bird"))


def test_what_is_no_folder_of_images_is_named(folder: Path, tmp_path: Path) -> None:
    with refuses(
        InputError, f"{folder}/birds is not a folder: give a folder with one sub-folder per class."
    ):
        ImageFolder(folder / "birds")
    with refuses(
        InputError,
        f"{folder}/cat has no images in folders of classes: "
        "add .png, .jpg, .jpeg files, such as cat/cat/one.png.",
    ):
        ImageFolder(folder / "cat")
    (tmp_path / "cat" / "0.png").write_bytes(b"broken")
    with pytest.raises(InputError, match=r"0\.png is not an image: use a PNG"):
        ImageFolder(folder).batch([0])


def test_every_channel_may_have_its_own_range() -> None:
    pixels = np.full((1, 2, 2, 3), 255, dtype=np.uint8)
    images = ImageArrays(pixels=pixels, mean=(0.5, 0.4, 0.2), std=(0.5, 0.3, 0.1)).batch([0]).images
    assert images is not None
    torch.testing.assert_close(images[0][:, 0, 0], torch.tensor([1.0, 2.0, 8.0]))
    with refuses(InputError, "got 2 numbers for images of 3 channels: give one, or 3."):
        ImageArrays(pixels=pixels, mean=(0.5, 0.4)).batch([0])
