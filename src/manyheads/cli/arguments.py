"""Arguments that several commands share: their types with the help of each, and their checks."""

import json
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, redirect_stdout
from contextvars import ContextVar
from io import StringIO
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import tyro

from manyheads.atomic_write import atomic_write, check_writable
from manyheads.errors import InputError
from manyheads.formatting import without_nan

if TYPE_CHECKING:
    from manyheads.lens.results.files import Result

DEFAULT_MODEL = "house-gpt"
_JSON_STREAM: ContextVar[Any] = ContextVar("json_stream", default=None)


def metavar(name: str, hint: str = "", /, **more: Any) -> Any:
    """How help shows an argument: a name for its value, and a hint instead of its default."""
    return tyro.conf.arg(metavar=name, help_behavior_hint=hint, **more)


def repeatable(name: str, /, **more: Any) -> Any:
    return metavar(name, "(repeatable)", **more)


Strings = tyro.conf.UseAppendAction[tuple[str, ...]]
Integers = tyro.conf.UseAppendAction[tuple[int, ...]]
Paths = tyro.conf.UseAppendAction[tuple[Path, ...]]
# A type without `help` is described by the docstring below the field.
PositionalText = Annotated[str, tyro.conf.Positional]
OptionalModel = Annotated[PositionalText, metavar("[MODEL]", f"(default: {DEFAULT_MODEL})")]
MODEL_HELP = "The folder of a model, a bundled model, or a model of the hub: org/name."
AnyModel = Annotated[OptionalModel, tyro.conf.arg(help=MODEL_HELP)]
RequiredModel = Annotated[PositionalText, tyro.conf.arg(metavar="MODEL")]
OptionalText = Annotated[str | None, metavar("TEXT")]
OptionalInt = Annotated[int | None, metavar("INT")]
OptionalFloat = Annotated[float | None, metavar("FLOAT")]
ManyTexts = Annotated[Strings, repeatable("TEXT")]
TextFile = Annotated[Path | None, metavar("TEXTFILE")]
LineFiles = Annotated[Paths, repeatable("TEXTFILE")]
# Token ids instead of a text, such as "1 2 3".
ManyIds = Annotated[Strings, repeatable('"1 2 3"')]
FOLDER_HELP = "For a vision model: a folder of images; for a classifier, one folder per class."
ImageFolder = Annotated[Path | None, metavar("FOLDER", help=FOLDER_HELP)]
OptionalFolder = Annotated[Path | None, metavar("FOLDER", "(none)")]
JsonFile = Annotated[Path | None, metavar("OUT")]
RESULT_HELP = "A JSON file to save everything to, for manyheads.lens to read; - prints it instead."
ResultFile = Annotated[Path | None, metavar("OUT", help=RESULT_HELP)]
PngFile = Annotated[Path | None, metavar("PNG")]
OutFolder = Annotated[Path, tyro.conf.arg(aliases=["-o"], metavar="FOLDER")]
OptionalOutFolder = Annotated[Path | None, metavar("FOLDER", aliases=["-o"])]
OutFile = Annotated[Path | None, metavar("FILE", aliases=["-o"])]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightName = Annotated[Literal["int8", "int4", "stored"] | None, metavar("{int8,int4,stored}")]
OF_HELP = "Of an encoder-decoder: the decoder's self-attention, the encoder's, or cross-attention."
AttentionName = Annotated[Literal["attention", "encoder", "cross"], tyro.conf.arg(help=OF_HELP)]
Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff, tyro.conf.arg(help_behavior_hint="")]


def attention_site(of: AttentionName) -> dict[str, Any]:
    """The stack and the sublayer that --of means."""
    from manyheads.taps import Sublayer

    return {
        "stack": "encoder" if of == "encoder" else None,
        "sublayer": Sublayer.CROSS if of == "cross" else Sublayer.ATTENTION,
    }


def check_minimum(flag: str, value: int, minimum: int) -> None:
    if value < minimum:
        raise InputError(f"{flag} must be at least {minimum}, got {value}")


def check_temperature(temperature: float | None) -> None:
    """Refuse to sample at a temperature of 0, which means not to sample."""
    if temperature is not None and temperature <= 0:
        raise InputError(
            f"--temperature must be above 0, got {temperature:g}",
            "leave it out to choose the most likely token",
        )


def check_exclusive(flags: str, *values: object) -> None:
    """Refuse more than one of the options; `flags` names them, as in "--text and --file"."""
    if sum(value is not None and value != () for value in values) > 1:
        raise InputError(f"{flags} exclude each other", "give one of them")


def check_one_of(command: str, flags: str, *values: object) -> None:
    """Refuse none and more than one of the options, as in "--text or --file"."""
    if sum(value is not None and value != () for value in values) != 1:
        raise InputError(f"manyheads {command} needs {flags}", "give one of them")


def check_not_empty(flag: str, text: str | None) -> None:
    if text is not None and not text.strip():
        raise InputError(f"{flag} {text!r} is empty", "give at least one word")


def check_picture(path: Path | None, suffixes: tuple[str, ...] = (".png",)) -> None:
    """Refuse a picture that cannot be written, before any work."""
    if path is not None:
        from manyheads.pictures import check_image_path

        check_image_path(path, suffixes)


def check_out_folder(path: Path | None, source: str = "", flag: str = "--out") -> None:
    """Refuse a folder that cannot be written, or that holds the model itself, before any work."""
    if path is None:
        return
    if path.is_file():
        raise InputError(f"{flag} {path} is a file", "name a folder")
    if source and Path(source).is_dir() and path.resolve() == Path(source).resolve():
        raise InputError(f"{flag} {path} would overwrite the model itself", "name another folder")
    check_writable(path)


def check_jsonl(path: Path | None) -> None:
    """Refuse a file for rows that cannot be written, before any work."""
    if path is None:
        return
    from manyheads.encoding.encode import check_file

    if path.suffix != ".jsonl":
        raise InputError(f"--out must end in .jsonl, got {path}")
    check_file(path)


def prints_json(path: Path | None) -> bool:
    """Whether --json is -, so that JSON is printed instead of the page."""
    return str(path) == "-"


@contextmanager
def page_for_json(path: Path | None) -> Iterator[None]:
    """With --json -, what is printed goes nowhere, and `print_json` to the standard output."""
    if not prints_json(path):
        yield
        return
    token = _JSON_STREAM.set(sys.stdout)
    try:
        with redirect_stdout(StringIO()):
            yield
    finally:
        _JSON_STREAM.reset(token)


def print_json(value: Any) -> None:
    """Print a value in one line for --json -."""
    line = json.dumps(without_nan(value), ensure_ascii=False, allow_nan=False)
    print(line, file=_JSON_STREAM.get() or sys.stdout, flush=True)


def check_json(path: Path | None) -> None:
    """Refuse a JSON file that cannot be written, before any work."""
    if path is None or prints_json(path):
        return
    if path.suffix != ".json":
        raise InputError(f"--json {path} does not end in .json", "name a file that does")
    if path.is_dir():
        raise InputError(f"--json {path} is a folder", "name a file")
    check_writable(path)


def write_json(path: Path | None, value: Any) -> None:
    """Write JSON atomically, or print it for -, with null for NaN; nothing without a path."""
    if path is None:
        return
    if prints_json(path):
        print_json(value)
        return
    with atomic_write(path) as partial:
        text = json.dumps(without_nan(value), indent=1, allow_nan=False)
        partial.write_text(text, encoding="utf-8")


def write_jsonl(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    """Write one row per line, atomically."""
    with atomic_write(path) as partial, partial.open("w", encoding="utf-8") as opened:
        opened.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)


def save_result(path: Path | None, result: "Result") -> None:
    """Save a result of the lens to the file of --json, if any."""
    if path is not None and prints_json(path):
        print_json(result.to_json())
    elif path is not None:
        result.save(path)
        print(f"saved everything to {path}")
