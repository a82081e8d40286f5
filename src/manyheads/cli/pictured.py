"""What the commands that look at heads ask of images: a folder of them, for a model that sees."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import tyro

from manyheads.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from manyheads.models.build import Model
    from manyheads.models.vision import Vision

__all__ = ["ImagePlace", "Pictures", "first_images", "image_folder"]

ImagePlace = Annotated[Path | None, tyro.conf.arg(metavar="FOLDER", help_behavior_hint="")]


class Pictures(NamedTuple):
    """Images as a model reads them, and the numbers of their classes where it tells any."""

    images: "list[Tensor]"
    classes: list[int] | None


def image_folder(model: "Model", image: Path | None, *, texts: bool) -> Path | None:
    """Where images come from, if any do; refused beside texts, or for a model that sees none."""
    from manyheads.models.vision import Vision

    sees = isinstance(model, Vision)
    if image is None:
        if sees and not texts:
            raise InputError("this model reads images", "give a folder of them with --image")
        return None
    if texts:
        raise InputError("a model reads texts or images", "give --image alone, or leave it out")
    if not sees:
        raise InputError("this model reads no images", "give it texts with --file")
    if not image.is_dir():
        raise InputError(f"{image} is no folder", "name one with images in it")
    return image


def first_images(
    model: "Vision", folder: Path, tokens: int, seed: int, more: int = 0
) -> tuple[Pictures, Pictures]:
    """Images drawn from all in a folder, with so many tokens together, and as others up to `more`.

    For a model of classes they lie in folders named after them. An image has as many tokens as
    patches, and one more.
    """
    import torch

    from manyheads.data.image_preprocessing import find_images, image_size
    from manyheads.models.readout import ClassHead

    if tokens < 1:
        raise InputError(f"--tokens {tokens} measures nothing", "use 1 or more")
    each = (image_size(model) // model.config.patches.size) ** 2 + 1
    classed = isinstance(model.config.readout, ClassHead)
    files = _labelled(model, folder) if classed else [(file, 0) for file in find_images(folder)]
    drawn = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    first, last = max(1, tokens // each), -(-more // each)
    return (
        _read(model, [files[number] for number in drawn[:first]], classed),
        _read(model, [files[number] for number in drawn[first : first + last]], classed),
    )


def _labelled(model: "Vision", folder: Path) -> Sequence[tuple[Path, int]]:
    """The files of a folder a class, numbered as the model numbers them."""
    from manyheads.data.images import ImageFolder
    from manyheads.models.readout import ClassHead

    head: Any = model.config.readout
    assert isinstance(head, ClassHead)
    found = ImageFolder(folder, names=model.class_names)
    if len(found.names) != head.classes:
        raise InputError(
            f"{folder} has {len(found.names)} folders and the model {head.classes} classes",
            "lay the images in a folder a class",
        )
    return found.files


def _read(model: "Vision", files: Sequence[tuple[Path, int]], classed: bool) -> Pictures:
    from manyheads.data.image_preprocessing import read_image

    images = [read_image(model, file) for file, _ in files]
    return Pictures(images, [label for _, label in files] if classed else None)
