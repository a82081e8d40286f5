"""What the commands that look at heads ask for alike: a model, texts, where numbers go."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import tyro

from manyheads.atomic_write import check_writable, whole
from manyheads.errors import CutWarning, InputError
from manyheads.formatting import without_nan

if TYPE_CHECKING:
    from manyheads.models.build import Model
from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

    from manyheads.models.build import Model
    from manyheads.models.vision import Vision

DEFAULT = "house-gpt"

ModelName = Annotated[
    str,
    tyro.conf.Positional,
    tyro.conf.arg(metavar="[MODEL]", help_behavior_hint=f"(default: {DEFAULT})"),
]
Texts = Annotated[
    tyro.conf.UseAppendAction[tuple[str, ...]],
    tyro.conf.arg(metavar="TEXT", help_behavior_hint="(repeatable)"),
]
TextFile = Annotated[Path | None, tyro.conf.arg(metavar="TEXTFILE", help_behavior_hint="")]
JsonFile = Annotated[Path | None, tyro.conf.arg(metavar="OUT", help_behavior_hint="")]
Picture = Annotated[Path | None, tyro.conf.arg(metavar="PNG", help_behavior_hint="")]
OutFolder = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
DeviceName = str
DtypeName = Literal["as it is", "float32", "bfloat16", "float16"]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]
# Files of which each line is a text, and a file that something is written to.
LineFiles = Annotated[
    tyro.conf.UseAppendAction[tuple[Path, ...]],
    tyro.conf.arg(metavar="TEXTFILE", help_behavior_hint="(repeatable)"),
]
OutFile = Annotated[
    Path | None, tyro.conf.arg(aliases=["-o"], metavar="FILE", help_behavior_hint="")
]
PartName = Literal["attention", "encoder", "cross"]


def open_model(name: str, device: DeviceName, dtype: DtypeName = "as it is") -> "Model":
    """A model where it is asked to be, by default on CUDA where torch finds it."""
    import torch

    from manyheads.checkpoints.folder import load
    from manyheads.devices import device_of

    place = str(device_of(device, "--device"))
    return load(name, dtype=None if dtype == "as it is" else getattr(torch, dtype), device=place)


def read_texts(model: "Model", text: tuple[str, ...], file: Path | None, tokens: int) -> Any:
    """Texts as given, those of a file up to so many tokens, or else our own.

    For a model that translates, each line is a source, a tab and its target.
    """
    from manyheads.encoding.text_reader import reads_texts
    from manyheads.lens.inputs.synthetic import own_texts
    from manyheads.models.seq2seq import Seq2Seq

    if text and file is not None:
        raise InputError("texts come from --text or from --file", "give one of both, not both")
    if reads_texts(model).tokenizer is None:
        raise InputError("this model has no tokenizer", "put a tokenizer.json into its folder")
    pairs = isinstance(model, Seq2Seq)
    given = list(text) or ([] if file is None else texts_of(file))
    if not given:
        return own_texts(model)
    for place, each in enumerate(given):
        if not each.strip():
            raise InputError(f"text {place} is empty", "give some words")
    found: list[Any] = pairs_of(given) if pairs else given
    return found if text else first_texts(model, found, tokens)[0]


def where(of: PartName) -> dict[str, Any]:
    """The attention that is meant, as the lens takes it."""
    from manyheads.taps import Sublayer

    return {
        "stack": "encoder" if of == "encoder" else None,
        "sublayer": Sublayer.CROSS if of == "cross" else Sublayer.ATTENTION,
    }


def check_folder(path: Path | None, source: str = "") -> None:
    """Refuse a place for what comes of a model before it is made in vain, or over the model."""
    if path is None:
        return
    if path.is_file():
        raise InputError(f"{path} is a file", "name a folder")
    if source and Path(source).is_dir() and path.resolve() == Path(source).resolve():
        raise InputError(f"{path} holds the model itself, which would be lost", "name another")
    check_writable(path)


def check_json(path: Path | None) -> None:
    """Refuse a place for the numbers before anything is measured in vain."""
    if path is None:
        return
    if path.suffix != ".json":
        raise InputError(f"--json {path} does not end in .json", "name a file that does")
    if path.is_dir():
        raise InputError(f"--json {path} is a folder", "name a file")
    check_writable(path)


@contextmanager
def cuts_told() -> Iterator[None]:
    """Say once, on stderr, that texts were longer than the model reads."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", CutWarning)
        yield
    for each in dict.fromkeys(str(each.message) for each in told):
        print(each, file=sys.stderr)


def read_letters(file: Path) -> str:
    """All that a file says, - being what is piped in."""
    if file.is_dir():
        raise InputError(f"{file} is a folder", "name a file with texts")
    if str(file) != "-" and not file.is_file():
        raise InputError(f"there is no file {file}", "name one with texts")
    try:
        return sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise InputError(
            f"{file} is not UTF-8: {error.reason} at byte {error.start}", "convert it first"
        ) from None


def lines_of(file: Path) -> list[str]:
    """Lines end where a line feed or a carriage return says so, and nowhere else."""
    return [line.removesuffix("\n") for line in StringIO(read_file(file))]


def read_file(file: Path) -> str:
    """A text of some words."""
    text = read_letters(file)
    if not text.strip():
        raise InputError(f"{file} holds no text", "name a file with some")
    return text


def texts_of(file: Path) -> list[str]:
    """Apart by blank lines, or one a line where there are none."""
    said = read_file(file)
    parts = said.split("\n\n") if "\n\n" in said.strip() else said.split("\n")
    return [part.strip("\n") for part in parts if part.strip()]


class Labelled(NamedTuple):
    """Texts and the numbers of their classes."""

    texts: list[str]
    classes: list[int]


def first_labelled(model: "Model", file: Path | None, tokens: int) -> tuple[Labelled, Labelled]:
    """The first rows of a file for a model of classes, as `first_texts`, and the others.

    All are whole: half a text may be of another class.
    """
    from manyheads.data.labelled import LabelledTexts, label_ids
    from manyheads.data.sources.rows import ROW_FORMATS, FileRows
    from manyheads.models.readout import ClassHead

    if file is None or file.suffix not in ROW_FORMATS:
        raise InputError(
            "a text alone does not say of which class it is",
            f"give --file with rows of text and label: {', '.join(ROW_FORMATS)}",
        )
    head = model.config.readout
    assert isinstance(head, ClassHead)
    rows = list(LabelledTexts(FileRows((str(file),))))
    known = model.class_names or tuple(str(number) for number in range(head.classes))
    classes, _ = label_ids([row.label for row in rows], [row.location for row in rows], known)
    texts = [row.text for row in rows]
    count = len(first_texts(model, texts, tokens)[0])
    return (
        Labelled(texts[:count], classes[:count]),
        Labelled(texts[count:], classes[count:]),
    )


def tells_classes(model: "Model") -> bool:
    """Of whole texts."""
    from manyheads.models.readout import ClassHead
    from manyheads.models.vision import Vision

    return isinstance(model.config.readout, ClassHead) and not isinstance(model, Vision)


def first_texts(model: "Model", texts: list[Any], tokens: int) -> tuple[list[Any], list[Any]]:
    """The first texts, as many as have so many tokens together, and the others.

    The last is cut where it would be more; the pairs of a model that translates stay whole.
    """
    if tokens < 1:
        raise InputError(f"--tokens {tokens} measures nothing", "use 1 or more")
    left = tokens
    for place, text in enumerate(texts):
        parts = text if isinstance(text, tuple) else (text,)
        found = [model.tokenizer.encode(part, add_special_tokens=False) for part in parts]
        count = sum(len(each) for each in found)
        if count >= left:
            rest = texts[place + 1 :]
            if count == left or isinstance(text, tuple):
                return texts[: place + 1], rest
            end = found[0].offsets[left - 1][1]
            return [*texts[:place], text[:end]], [*filter(str.strip, [text[end:]]), *rest]
        left -= count
    return texts, []


def pairs_of(texts: list[str]) -> list[tuple[str, str]]:
    """A source, a tab and its target in every line."""
    found = []
    for place, line in enumerate(line for text in texts for line in text.split("\n")):
        source, tab, target = line.partition("\t")
        if not tab:
            raise InputError(
                f"text {place} has no tab", "write a source, a tab and its target a line"
            )
        found.append((source, target))
    return found


def write_json(path: Path, value: Any) -> None:
    """Whole, or not at all."""
    with whole(path) as beside:
        told = json.dumps(without_nan(value), indent=1, allow_nan=False)
        beside.write_text(told, encoding="utf-8")


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
