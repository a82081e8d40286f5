"""What the commands read: files, lines, pairs, token ids, texts with labels, and images."""

import io
import re
import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import groupby, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from manyheads.cli.arguments import DtypeName, WeightName, check_minimum
from manyheads.errors import InputError, MissingPackageError
from manyheads.progress import MeasuredStream

if TYPE_CHECKING:
    from torch import Tensor

    from manyheads.models.build import Model
    from manyheads.models.vision import Vision


def check_model(name: str) -> None:
    """Refuse a model that is not there, or whose package is missing, before torch is loaded."""
    from manyheads.checkpoints.hub import folder_of

    if folder_of(name).is_file() and find_spec("gguf") is None:
        raise MissingPackageError(f"opening {name}", "gguf")


def open_model(
    name: str, device: str, dtype: DtypeName = "auto", weights: WeightName = None
) -> "Model":
    """Load a model onto a device, by default CUDA where it is available.

    With integer weights it is loaded onto the CPU.
    """
    if weights is not None:
        if device not in ("auto", "cpu") or dtype not in ("auto", "float32"):
            flag = f"--device {device}" if device not in ("auto", "cpu") else f"--dtype {dtype}"
            remedy = f"leave out {flag}, or --weights"
            raise InputError(f"--weights {weights} is computed on the CPU in float32", remedy)
        device = "cpu"
    check_model(name)
    import torch

    from manyheads.checkpoints.folder import load
    from manyheads.devices import resolve_device

    device = str(resolve_device(device, "--device"))
    own = None if dtype == "auto" else getattr(torch, dtype)
    return load(name, dtype=own, device=device, weights=weights)


def read_file(file: Path, flag: str = "--file") -> str:
    """The content of a UTF-8 file with some text in it; - is the standard input."""
    if file.is_dir():
        raise InputError(f"{flag} {file} is a folder", "name a file with text")
    if str(file) != "-" and not file.is_file():
        raise InputError(f"{flag} {file} does not exist", "name a file with text")
    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{flag} {file} is not UTF-8: {error.reason} at byte {error.start}", "convert it first"
        ) from None
    if not text.strip():
        raise InputError(f"{flag} {file} contains no text", "name a file with text")
    return text


def read_question() -> str:
    """The next line of the standard input; after a prompt if it is a terminal."""
    if sys.stdin.isatty():
        print("> ", end="", flush=True)
    return sys.stdin.readline()


def read_texts(*files: Path) -> list[str]:
    """The texts of files: the paragraphs between blank lines, or the lines if none is blank."""
    texts = []
    for file in files:
        text = read_file(file)
        parts = re.split(r"\n(?:[^\S\n]*\n)+", text.strip())
        parts = parts if len(parts) > 1 else text.split("\n")
        texts += [part.strip("\n") for part in parts if part.strip()]
    return texts


def stream_texts(
    paths: Sequence[Path], text_column: str = "text", *, max_characters: int
) -> MeasuredStream[str]:
    """The texts of files of any size, those of `read_texts` one at a time, and of rows.

    A text of more than `max_characters` comes in several.
    """
    from manyheads.data.sources.files import find_files
    from manyheads.data.sources.texts import KNOWN

    sizes = {file: file.stat().st_size for file in find_files(paths, KNOWN)}
    read = 0.0

    def texts() -> Iterator[str]:
        nonlocal read
        before = 0
        for file, size in sizes.items():
            for text, fraction in _texts_of(file, text_column, max_characters):
                read = before + fraction * size
                if text.strip():
                    yield text.strip("\n")
            before += size

    return MeasuredStream(texts(), lambda: read / max(1, sum(sizes.values())))


def _texts_of(file: Path, text_column: str, max_characters: int) -> Iterator[tuple[str, float]]:
    """The texts of a file, each with the fraction of the file that has been read."""
    from manyheads.data.sources.files import suffix_of
    from manyheads.data.sources.rows import ROW_FORMATS

    if suffix_of(file) in ROW_FORMATS:
        for row in ROW_FORMATS[suffix_of(file)](file):
            text = row.text(text_column)
            for start in range(0, len(text), max_characters):
                yield text[start : start + max_characters], row.fraction
        return
    runs = groupby(_lines(file, max_characters), lambda line: bool(line[0].strip()))
    paragraphs = len(list(islice((filled for filled, _ in runs if filled), 2))) > 1
    text, fraction = "", 0.0
    for line, fraction in _lines(file, max_characters):
        if paragraphs and line.strip() and len(text) + len(line) <= max_characters:
            text += line
            continue
        yield text, fraction
        text = line if line.strip() else ""
    yield text, fraction


def _lines(file: Path, max_characters: int) -> Iterator[tuple[str, float]]:
    """The lines of a file, long ones in pieces, and the fraction of it that has been read."""
    from manyheads.data.sources.files import decompress

    size = max(1, file.stat().st_size)
    with file.open("rb") as stored, decompress(file, stored) as opened:
        lines = io.TextIOWrapper(opened, encoding="utf-8")
        try:
            while line := lines.readline(max_characters):
                yield line, stored.tell() / size
        except UnicodeDecodeError as error:
            raise InputError(f"{file} is not UTF-8: {error.reason}", "convert it first") from None


def split_pairs(texts: list[str]) -> list[tuple[str, str]]:
    """The source and the target of every line, separated by a tab."""
    pairs = []
    for index, line in enumerate(line for text in texts for line in text.split("\n")):
        source, tab, target = line.partition("\t")
        if not tab:
            raise InputError(
                f"text {index} has no tab", "separate source and target by a tab in every line"
            )
        pairs.append((source, target))
    return pairs


def read_ids(texts: Sequence[str], *, pairs: bool = False) -> list[Any]:
    """The token ids of each text, separated by spaces; of pairs, source and target by a tab.

    >>> read_ids(["1 2 3"]), read_ids(["1 2\\t3"], pairs=True)
    ([[1, 2, 3]], [([1, 2], [3])])
    """
    if pairs:
        return [tuple(read_ids(pair)) for pair in split_pairs(list(texts))]
    try:
        ids = [[int(token) for token in text.replace(",", " ").split()] for text in texts]
    except ValueError:
        ids = []
    if not ids or not all(ids):
        options = " ".join(f"--ids {text!r}" for text in texts)
        raise InputError(f"{options} must be integers", 'separate them by spaces, as in "1 2 3"')
    return ids


def check_tokenizer(model: "Model") -> None:
    from manyheads.encoding.text_reader import require_text_model

    if require_text_model(model).tokenizer is None:
        raise InputError(
            "this model has no tokenizer",
            "put a tokenizer.json into its folder, or give token ids with --ids where it is taken",
        )


def split_texts(model: "Model", texts: list[Any], tokens: int) -> tuple[list[Any], list[Any]]:
    """The first texts up to a number of tokens, and the rest, in pieces that the model can read.

    A text may be split between both; the pairs of an encoder-decoder are not.
    """
    from manyheads.encoding.text_reader import first_texts, fit_texts

    check_minimum("--tokens", tokens, 1)
    first, rest = first_texts(model.tokenizer, texts, tokens)
    return fit_texts(model, first), fit_texts(model, rest)


def is_text_classifier(model: "Model") -> bool:
    from manyheads.models.readout import ClassHead
    from manyheads.models.vision import Vision

    return isinstance(model.config.readout, ClassHead) and not isinstance(model, Vision)


class ClassInputs(NamedTuple):
    """Texts or images, and the ids of their classes, if any."""

    inputs: "list[str] | list[Tensor]"
    classes: list[int] | None


def split_labeled(
    model: "Model", file: Path | None, tokens: int
) -> tuple[ClassInputs, ClassInputs]:
    """The first rows of a file up to a number of tokens, and the rest.

    No text is split: half of it may be of another class.
    """
    from manyheads.data.labeled import LabeledTexts, label_ids
    from manyheads.data.sources.rows import ROW_FORMATS, FileRows
    from manyheads.encoding.text_reader import first_texts
    from manyheads.models.readout import ClassHead

    if file is None or file.suffix not in ROW_FORMATS:
        raise InputError(
            "a classifier is measured on texts with labels",
            f"give --file with rows of text and label: {', '.join(ROW_FORMATS)}",
        )
    head = model.config.readout
    assert isinstance(head, ClassHead)
    rows = list(LabeledTexts(FileRows((str(file),))))
    names = model.class_names or tuple(str(number) for number in range(head.classes))
    labels = [row.label for row in rows if not isinstance(row.label, tuple)]
    if len(labels) < len(rows):
        raise InputError(f"{file} has several labels per text", "give one label per text")
    classes, _ = label_ids(labels, [row.location for row in rows], names)
    texts = [row.text for row in rows]
    check_minimum("--tokens", tokens, 1)
    count = len(first_texts(model.tokenizer, texts, tokens)[0])
    return ClassInputs(texts[:count], classes[:count]), ClassInputs(texts[count:], classes[count:])


def image_source(model: "Model", image: Path | None, *, texts: bool) -> Path | None:
    """The folder of --image, if any, checked against the model and --text or --file."""
    from manyheads.models.vision import Vision

    is_vision = isinstance(model, Vision)
    if image is None:
        if is_vision and not texts:
            raise InputError("this model reads images", "give a folder of them with --image")
        return None
    if texts:
        raise InputError("--image excludes --text and --file", "give one of them")
    if not is_vision:
        raise InputError("--image needs a vision model and this one reads text", "give --file")
    if not image.is_dir():
        raise InputError(f"--image {image} is not a folder", "name a folder of images")
    return image


def load_images(model: "Model", paths: Sequence[Path], tokens: int) -> "list[Tensor]":
    """The images of some files and folders, with a number of tokens in all, or one image."""
    from manyheads.data.images import find_images, read_image
    from manyheads.models.vision import Vision

    if not isinstance(model, Vision):
        raise InputError(
            "--image needs a vision model and this one reads text", "give --text or --file"
        )
    files = [file for path in paths for file in find_images(path)]
    return [read_image(model, file) for file in files[: max(1, tokens // _tokens_per_image(model))]]


def _tokens_per_image(model: "Vision") -> int:
    from manyheads.data.images import image_size

    return (image_size(model) // model.config.patches.size) ** 2 + 1


def sample_images(
    model: "Model", folder: Path, tokens: int, seed: int, more: int = 0
) -> tuple[ClassInputs, ClassInputs]:
    """A random sample of images with a number of tokens, and others with up to `more` tokens.

    For a classifier, each class has its own folder. An image has one token per patch, and one more.
    """
    import torch

    from manyheads.data.images import ImageFolder, find_images, read_image
    from manyheads.models.readout import ClassHead
    from manyheads.models.vision import Vision

    assert isinstance(model, Vision)
    check_minimum("--tokens", tokens, 1)
    per_image = _tokens_per_image(model)
    head = model.config.readout
    labeled = isinstance(head, ClassHead)
    files: Sequence[tuple[Path, int]]
    if isinstance(head, ClassHead):
        folders = ImageFolder(folder, names=model.class_names)
        if len(folders.names) != head.classes:
            raise InputError(
                f"--image {folder} has {len(folders.names)} folders and the model {head.classes} "
                "classes",
                "put the images of each class into a folder of its own",
            )
        files = folders.files
    else:
        files = [(file, 0) for file in find_images(folder)]

    def read(indices: list[int]) -> ClassInputs:
        images = [read_image(model, files[index][0]) for index in indices]
        return ClassInputs(images, [files[index][1] for index in indices] if labeled else None)

    order = torch.randperm(len(files), generator=torch.Generator().manual_seed(seed)).tolist()
    first, last = max(1, tokens // per_image), -(-more // per_image)
    return read(order[:first]), read(order[first : first + last])
