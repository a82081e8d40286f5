"""The files of a checkpoint folder: memory-mapped when read, replaced together when written."""

import json
import os
import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.atomic_write import atomic_folder
from manyheads.errors import InputError
from manyheads.formatting import kind_of

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_MAPPED_BYTES = 2**24
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# The dtypes that a model computes in, as safetensors names them; others are I8, F8_E4M3, ...
COMPUTE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# More levels than any file of a model has, and fewer than Python can follow.
MAX_DEPTH = 64
# More bytes than such a file has; TOML takes a second per megabyte.
MAX_JSON_BYTES, MAX_TOML_BYTES = 2**26, 2**20
# The time that TOML takes grows with the square of the dots in a key.
DOTTED_KEY = re.compile(rb"""(?:\.[ \t]*[\w"'-]+[ \t]*){%d}""" % MAX_DEPTH)


class WeightFiles:
    """The tensors of a folder, mapped into memory and read one at a time.

    They are read in `dtype`, if it is set, except those whose names end in `as_stored`. Pages that
    were read stay in memory until their file is closed, so files are closed now and then: a caller
    that copies each tensor never holds the weights twice.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
        self.dtype: torch.dtype | None = None
        self.as_stored: tuple[str, ...] = ()
        self._open: dict[Path, Any] = {}
        self._read = 0
        for file in _weight_files(folder):
            opened = self._opened(file)
            for name in opened.keys():  # noqa: SIM118, it is no dictionary
                self._file_of[name] = file
                part = opened.get_slice(name)
                self._shapes[name], self._dtypes[name] = tuple(part.get_shape()), part.get_dtype()

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return self._shapes

    def dtypes(self) -> list[torch.dtype]:
        """The dtypes of the weights, that of the first one first."""
        dtypes = (COMPUTE_DTYPES.get(name) for name in self._dtypes.values())
        return list(dict.fromkeys(dtype for dtype in dtypes if dtype is not None))

    def in_file(self, name: str) -> str:
        """The name that the files themselves have for a tensor: the same."""
        return name

    def __getitem__(self, name: str) -> Tensor:
        as_stored = self._check_dtype(name)
        tensor: Tensor = self._reading(name).get_tensor(name)
        self._read += tensor.nbytes
        return tensor if self.dtype is None or as_stored else tensor.to(self.dtype)

    def rows(self, name: str, rows: range, axis: int = 0) -> Tensor:
        """Some rows of a tensor, or of axis 1 some columns; no others are read."""
        as_stored, chosen = self._check_dtype(name), slice(rows.start, rows.stop)
        stored = self._reading(name).get_slice(name)
        tensor: Tensor = stored[chosen] if axis == 0 else stored[:, chosen]
        self._read += tensor.nbytes
        return tensor if self.dtype is None or as_stored else tensor.to(self.dtype)

    def _check_dtype(self, name: str) -> bool:
        """Whether a tensor stays as it is stored; another one must have a dtype to compute in."""
        as_stored = name.endswith(self.as_stored)
        if self._dtypes[name] not in COMPUTE_DTYPES and not as_stored:
            raise InputError(
                f"{self._file_of[name]} stores {name} as {self._dtypes[name]}, not supported",
                "use the model before quantization, in 16 or 32 bits",
            )
        return as_stored

    def _reading(self, name: str) -> Any:
        """The file of a tensor, open."""
        if self._read > MAX_MAPPED_BYTES:
            self._open.clear()
            self._read = 0
        return self._opened(self._file_of[name])

    def _opened(self, file: Path) -> Any:
        if file not in self._open:
            try:
                self._open[file] = safe_open(file, framework="pt")
            except (SafetensorError, OSError) as error:
                raise InputError(
                    f"{file} is truncated or damaged ({error})", "copy or download it again"
                ) from None
        return self._open[file]

    def __enter__(self) -> "WeightFiles":
        return self

    def __exit__(self, *_: object) -> None:
        self._open.clear()


def _weight_files(folder: Path) -> list[Path]:
    whole = file_in(folder, WEIGHTS)
    if whole is not None:
        return [whole]
    if (folder / INDEX).exists():
        shards = {name: file_in(folder, name) for name in _shards(folder)}
        missing = [name for name, file in shards.items() if file is None]
        if missing or not shards:
            raise InputError(
                f"{folder / INDEX} lists {_some(missing) or 'no file'}, which does not exist",
                "copy or download the missing files",
            )
        return [file for file in shards.values() if file is not None]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder} has its weights in a pickle ({_some(pickles)}), which can run any code",
            "convert them if you trust them: safetensors.torch.save_file("
            f"torch.load({pickles[0]!r}, weights_only=True), {WEIGHTS!r})",
        )
    raise InputError(f"{folder} has no {WEIGHTS} and no {INDEX}", "give a folder with weights")


def _shards(folder: Path) -> list[str]:
    """The files that an index lists."""
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(file, str) for file in named.values()):
        raise InputError(
            f"{folder / INDEX} has no weight_map from tensors to files", "download it again"
        )
    return sorted(set(named.values()))


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def file_in(folder: Path, name: str) -> Path | None:
    """A file of a folder, or None if there is none.

    What is outside the folder is refused: a path that leads there, or a link. The cache of the hub
    is an exception, where all files are links to its own blobs.
    """
    file, home = folder / name, folder.resolve()
    try:
        target = file.resolve()
        blobs = [parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots"]
        if not any(target.is_relative_to(place) for place in (home, *blobs)):
            raise InputError(
                f"{name[:200]!r} leads out of {folder}, to {str(target)[:200]!r}",
                "copy the file into the folder if you trust it",
            )
        return file if file.is_file() else None
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, InputError):
            raise
        raise InputError(f"{name[:200]!r} is not the name of a file") from None


def read_json(file: Path, kind: type = dict) -> Any:
    """A JSON object, or a list, from a file that must exist."""
    if file_in(file.parent, file.name) is None:
        raise InputError(f"there is no {file}", "give the folder of a model")
    content = parse_json(read_small(file, MAX_JSON_BYTES), str(file))
    if not isinstance(content, kind):
        expected = "an object {...}" if kind is dict else "a list [...]"
        raise InputError(f"{file} must hold {expected}, got {kind_of(content)}")
    return content


def read_small(file: Path, limit: int) -> bytes:
    """The bytes of a file that has at most `limit` of them, or is refused before it is read."""
    with file.open("rb") as opened:
        data = opened.read(limit + 1)
    if len(data) > limit:
        raise InputError(f"{file} has more than {limit >> 20} MB", "give the right file")
    return data


def parse_json(data: bytes, where: str, *, remedy: str = "fix it or download it again") -> Any:
    """JSON whose values are not nested too deeply; `where` names it in errors."""
    return _parse(lambda: json.loads(data.decode("utf-8")), "JSON", where, remedy)


def parse_toml(data: bytes, where: str) -> dict[str, Any]:
    """The tables of TOML, which are not nested too deeply; `where` names it in errors."""
    remedy = "correct that line"
    if DOTTED_KEY.search(data):
        raise InputError(f"{where} has a key of more than {MAX_DEPTH} names", remedy)
    tables: dict[str, Any] = _parse(
        lambda: tomllib.loads(data.decode("utf-8")), "valid TOML", where, remedy
    )
    return tables


def _parse(read: Callable[[], Any], form: str, where: str, remedy: str) -> Any:
    try:
        content = read()
    except ValueError as error:
        raise InputError(f"{where} is not {form} ({error})"[:400], remedy) from None
    except RecursionError:
        raise InputError(f"{where} is nested more than {MAX_DEPTH} levels deep", remedy) from None
    level: list[Any] = [content]
    for _ in range(MAX_DEPTH):
        level = [
            inner
            for item in level
            if isinstance(item, dict | list)
            for inner in (item.values() if isinstance(item, dict) else item)
        ]
        if not level:
            return content
    raise InputError(f"{where} is nested more than {MAX_DEPTH} levels deep", remedy)


def write_folder(
    folder: Path,
    files: Mapping[str, Callable[[Path], object]],
    *,
    outdated: Callable[[Path], Iterable[str]] = lambda _: (),
) -> None:
    """Write files into a folder: all of them, or none if writing fails.

    Other files of the folder stay, except those that `outdated` names and older weights in
    several files.
    """
    try:
        with atomic_folder(folder) as fresh:
            for name in outdated(fresh):
                (fresh / name).unlink(missing_ok=True)
            for name, write in files.items():
                _make_own_folder((fresh / name).parent, fresh)
                (fresh / name).unlink(missing_ok=True)
                write(fresh / name)
                # Some writers make it readable by its owner only, and models are shared.
                (fresh / name).chmod(0o644)
                with (fresh / name).open("rb") as opened:
                    os.fsync(opened.fileno())
            if WEIGHTS in files:
                _drop_shards(fresh)
    except OSError as error:
        why = f"{error.strerror or error}, and nothing there was changed"
        raise OSError(error.errno, why, str(folder)) from error


def _make_own_folder(inner: Path, folder: Path) -> None:
    """Make a folder inside another, so that nothing is written through a link."""
    inner.mkdir(parents=True, exist_ok=True)
    if not inner.resolve().is_relative_to(folder.resolve()):
        raise InputError(
            f"{inner.name} is a link out of the folder to save to", "remove the link first"
        )


def _drop_shards(folder: Path) -> None:
    """Remove older weights in several files, which some programs would read too."""
    if not (folder / INDEX).is_file():
        return
    try:
        older = _shards(folder)
    except InputError:
        older = []
    for name in [*(file for file in older if Path(file).name == file and file != WEIGHTS), INDEX]:
        (folder / name).unlink(missing_ok=True)
