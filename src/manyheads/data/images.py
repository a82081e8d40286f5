"""Images with classes (folders, .npz, idx files such as MNIST), and the preprocessing of a model.

A batch has float images (channels, height, width): pixels scaled to 0..1, minus `mean`, divided by
`std`. `tokens_per_image` is what an image counts for in `batch_tokens` of a stream: with 1, images.
"""

import json
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.batch import IGNORE_INDEX, Batch
from manyheads.data.sources.files import open_file
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.vision import Vision

# One number for all channels of an image, or one for each.
PerChannel = float | tuple[float, ...]

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff")
MODES = {1: "L", 3: "RGB"}
# The third byte of an idx file; numbers are written with the high byte first.
IDX_TYPES = {8: ">u1", 9: ">i1", 11: ">i2", 12: ">i4", 13: ">f4", 14: ">f8"}


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ImageArrays:
    """Images in memory: (n, height, width) or (n, height, width, channels), and n labels."""

    pixels: NDArray[Any]
    labels: NDArray[Any] | None = None
    names: tuple[str, ...] = ()
    mean: PerChannel = 0.5
    std: PerChannel = 0.5
    tokens_per_image: int = 1

    def __post_init__(self) -> None:
        shape = self.pixels.shape
        if len(shape) not in (3, 4) or (len(shape) == 4 and shape[3] not in MODES):
            raise InputError(
                f"images have shape {shape}", "use (n, height, width), or with 1 or 3 channels"
            )
        if self.labels is not None and (
            self.labels.shape != shape[:1] or self.labels.dtype.kind not in "iu"
        ):
            raise InputError(
                f"{shape[0]} images have labels of shape {self.labels.shape}, "
                f"{self.labels.dtype.name}",
                f"give {shape[0]} integers",
            )
        if self.labels is not None:
            odd = self.labels[(self.labels < 0) & (self.labels != IGNORE_INDEX)]
            if len(odd):
                raise InputError(
                    f"label {odd[0]} is negative",
                    f"number classes from 0, and use {IGNORE_INDEX} for images without one",
                )

    @property
    def sizes(self) -> int:
        return self.tokens_per_image

    def __len__(self) -> int:
        return len(self.pixels)

    def batch(self, numbers: Sequence[int]) -> Batch:
        images = tuple(
            normalize_pixels(self.pixels[number], self.mean, self.std) for number in numbers
        )
        labels = None
        if self.labels is not None:
            labels = torch.from_numpy(self.labels[list(numbers)].astype(np.int64))
        return Batch(images=images, labels=labels)


class ImageFolder:
    """One folder per class; images are read with their batch and resized to `size` pixels a side.

    Without `size` they are not resized. Classes are numbered as in `names`, or alphabetically.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        size: int | None = None,
        channels: int = 3,
        mean: PerChannel = 0.5,
        std: PerChannel = 0.5,
        tokens_per_image: int = 1,
        names: Sequence[str] = (),
    ) -> None:
        self.size, self.channels, self.mean, self.std = size, channels, mean, std
        self.tokens_per_image = tokens_per_image
        root = Path(folder)
        if not root.is_dir():
            raise InputError(
                f"{folder} is not a folder", "give a folder with one sub-folder per class"
            )
        if channels not in MODES:
            raise InputError(
                f"channels must be 1 or 3, got {channels}", "use 1 (grey) or 3 (color)"
            )
        classes = sorted(p for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
        self.names = tuple(names) or tuple(folder.name for folder in classes)
        numbers = {name: number for number, name in enumerate(self.names)}
        for folder in classes:
            if folder.name not in numbers:
                raise InputError(
                    f"{folder} is an unknown class", f"use one of: {', '.join(self.names)}"
                )
        self.files = tuple(
            (file, numbers[folder.name])
            for folder in classes
            for file in sorted(folder.rglob("*"))
            if file.suffix.lower() in SUFFIXES and not file.name.startswith(".")
        )
        if not self.files:
            raise InputError(
                f"{folder} has no images in folders of classes",
                f"add {', '.join(SUFFIXES[:3])} files, such as {root.name}/cat/one.png",
            )

    @property
    def sizes(self) -> int:
        return self.tokens_per_image

    def __len__(self) -> int:
        return len(self.files)

    def batch(self, numbers: Sequence[int]) -> Batch:
        chosen = [self.files[number] for number in numbers]
        read = (read_pixels(file, channels=self.channels, size=self.size) for file, _ in chosen)
        images = tuple(normalize_pixels(pixels, self.mean, self.std) for pixels in read)
        return Batch(images=images, labels=torch.tensor([label for _, label in chosen]))


def read_pixels(file: Path, *, channels: int, size: int | None) -> NDArray[np.uint8]:
    """An image file in grey or in color, resized to `size` pixels a side unless it is None."""
    try:
        from PIL import Image, UnidentifiedImageError
    except ImportError:
        raise MissingPackageError(str(file), "pillow") from None
    if not file.is_file():
        raise InputError(f"{file} does not exist", "give an image file")
    try:
        with Image.open(file) as stored:
            image = stored.convert(MODES[channels])
        if size is not None:
            image = image.resize((size, size), Image.Resampling.BICUBIC)
        return np.asarray(image)
    except (UnidentifiedImageError, Image.DecompressionBombError):
        raise InputError(f"{file} is not an image", "use a PNG or a JPEG") from None
    except OSError as error:
        raise InputError(f"{file} is a damaged image ({error})", "use another") from None


def load_npz(
    path: str | Path, *, images: str = "images", labels: str = "labels", **options: Any
) -> ImageArrays:
    """The images and labels of an .npz file; labels are optional."""
    path = Path(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            if images not in arrays:
                names = ", ".join(arrays.files)
                raise InputError(f"{path} has no array {images!r}", f"use one of: {names}")
            label_array = arrays.get(labels)
            return ImageArrays(pixels=arrays[images], labels=label_array, **options)
    except FileNotFoundError:
        raise InputError(f"{path} does not exist", "check the path") from None
    except InputError:
        raise
    except (ValueError, AttributeError, EOFError, zipfile.BadZipFile) as error:
        raise InputError(
            f"{path} is not an .npz of plain arrays ({error})", "save it again"
        ) from None


def load_idx(images: str | Path, labels: str | Path | None = None, **options: Any) -> ImageArrays:
    """Images and labels of idx files, compressed or not."""
    label_array = None if labels is None else read_idx(labels)
    return ImageArrays(pixels=read_idx(images), labels=label_array, **options)


def read_idx(path: str | Path) -> NDArray[Any]:
    """The array of an idx file: two zeros, the dtype, the number of axes, the shape, the values."""
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist", "check the path")
    with open_file(path) as file:
        magic = file.read(4)
        if len(magic) < 4 or magic[:2] != b"\0\0" or magic[2] not in IDX_TYPES or not magic[3]:
            raise InputError(
                f"{path} starts with {magic.hex(' ') or 'nothing'} and is not an idx file",
                "use one such as train-images-idx3-ubyte, which starts with 00 00 08 03",
            )
        dtype, axes = np.dtype(IDX_TYPES[magic[2]]), magic[3]
        header, data = file.read(4 * axes), file.read()
    if len(header) < 4 * axes:
        raise InputError(f"{path} ends within its header", "download it again")
    shape = tuple(np.frombuffer(header, dtype=">u4").tolist())
    needed = int(np.prod(shape, dtype=object)) * dtype.itemsize
    if len(data) != needed:
        raise InputError(
            f"{path} has {len(data)} bytes of values, and its shape {shape} needs {needed}",
            "download it again",
        )
    return np.frombuffer(data, dtype=dtype).reshape(shape).astype(dtype.newbyteorder("="))


def normalize_pixels(pixels: NDArray[Any], mean: PerChannel, std: PerChannel) -> Tensor:
    """Pixels as a normalized tensor: integers are 0..255, floats are taken as scaled already."""
    image = pixels.astype(np.float32)
    if pixels.dtype.kind in "iu":
        image /= 255
    if image.ndim == 2:
        image = image[:, :, None]
    shift, scale = (_by_channel(values, image.shape[2]) for values in (mean, std))
    return torch.from_numpy(np.ascontiguousarray((image.transpose(2, 0, 1) - shift) / scale))


def _by_channel(value: PerChannel, channels: int) -> NDArray[np.float32]:
    numbers = np.asarray(value, dtype=np.float32).reshape(-1, 1, 1)
    if len(numbers) not in (1, channels):
        raise InputError(
            f"got {len(numbers)} numbers for images of {channels} channels",
            f"give one, or {channels}",
        )
    return numbers


FILE = "preprocessor_config.json"
BICUBIC = 3
# Luma weights of red, green and blue (ITU-R 601), as Pillow converts to grayscale.
BRIGHTNESS = (0.299, 0.587, 0.114)


def to_grayscale(image: Float[Tensor, "3 height width"]) -> Float[Tensor, "1 height width"]:
    """A color image as grayscale, for a model with one channel."""
    weights = torch.tensor(BRIGHTNESS, dtype=image.dtype, device=image.device)
    return (image * weights.reshape(-1, 1, 1)).sum(0, keepdim=True)


def image_normalization(model: Vision, channels: int) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel; 0.5 by default."""
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    tensors = []
    for name in ("image_mean", "image_std"):
        value = settings.get(name) or [0.5] * channels
        tensors.append(torch.tensor(value, dtype=torch.float32)[:channels].reshape(-1, 1, 1))
    return tensors[0], tensors[1]


def image_mean_std(model: Vision) -> tuple[PerChannel, PerChannel]:
    """The same as numbers: one number if all channels are equal."""
    both: list[PerChannel] = []
    for by_channel in image_normalization(model, model.config.patches.channels):
        # Six digits are the precision of float32.
        numbers = tuple(round(number, 6) for number in by_channel.flatten().tolist())
        both.append(numbers[0] if len(set(numbers)) == 1 else numbers)
    return both[0], both[1]


def image_size(model: Vision) -> int:
    """The side of the images the model was trained on, in pixels; the patch grid may differ.

    With center cropping it is the size after the crop.
    """
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    size = settings.get("size")
    side = size.get("height") if isinstance(size, dict) else None
    if side is None or side != size.get("width") or settings.get("do_center_crop"):
        return model.config.patches.image
    return int(side)


def record_image_preprocessing(
    model: Vision, mean: PerChannel, std: PerChannel, size: int | None = None
) -> None:
    """Record the image preprocessing in the model, for us and for `transformers`.

    Other settings are kept, except that images of a new `size` are not cropped.
    """
    patches = model.config.patches
    usual = {
        "image_processor_type": "ViTImageProcessor",
        "do_convert_rgb": True if patches.channels == 3 else None,
        "do_resize": True,
        "size": {"height": patches.image, "width": patches.image},
        "resample": BICUBIC,
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
    }
    settings = json.loads(model.side_files.get(FILE, b"{}"))
    now: dict[str, Any] = {
        name: list(value) if isinstance(value, tuple) else [value] * patches.channels
        for name, value in (("image_mean", mean), ("image_std", std))
    }
    if size is not None:
        now["size"] = {"height": size, "width": size}
        if settings.get("do_center_crop"):
            now["do_center_crop"] = False
    text = json.dumps({**usual, **settings, **now}, indent=2).encode()
    model.side_files = {**model.side_files, FILE: text}


def find_images(path: Path) -> list[Path]:
    """The file itself, or all images in a folder and those within it."""
    if not path.is_dir():
        return [path]
    images = [file for file in sorted(path.rglob("*")) if file.suffix.lower() in SUFFIXES]
    if not images:
        raise InputError(f"{path} has no images", f"add {', '.join(SUFFIXES[:3])} files")
    return images


def read_image(model: Vision, file: Path | str) -> Float[Tensor, "channels height width"]:
    """Any image that Pillow reads, resized and normalized for the model."""
    patches = model.config.patches
    if patches.channels not in MODES:
        raise InputError(
            f"the model reads images of {patches.channels} channels, and files have 1 or 3",
            "use tensors instead of files",
        )
    pixels = read_pixels(Path(file), channels=patches.channels, size=image_size(model))
    return normalize_pixels(pixels, *image_mean_std(model))
