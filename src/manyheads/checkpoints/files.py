"""The files of a checkpoint folder: memory-mapped when read, replaced together when written."""

import json
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor

from manyheads.errors import InputError

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
MAX_MAPPED_BYTES = 2**24
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl")
# The dtypes that a model computes in, as safetensors names them; others are I8, F8_E4M3, ...
COMPUTE_DTYPES = ("F64", "F32", "F16", "BF16")


class WeightFiles:
    """The tensors of a folder, mapped into memory and read one at a time.

    Pages that were read stay in memory until their file is closed, so files are closed now and
    then: a caller that copies each tensor never holds the weights twice.
    """

    def __init__(self, folder: Path) -> None:
        self._file_of: dict[str, Path] = {}
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._dtypes: dict[str, str] = {}
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

    def __getitem__(self, name: str) -> Tensor:
        if self._dtypes[name] not in COMPUTE_DTYPES:
            raise InputError(
                f"{self._file_of[name]} stores {name} as {self._dtypes[name]}, not supported",
                "use the model before quantisation, in 16 or 32 bits",
            )
        if self._read > MAX_MAPPED_BYTES:
            self._open.clear()
            self._read = 0
        tensor: Tensor = self._opened(self._file_of[name]).get_tensor(name)
        self._read += tensor.nbytes
        return tensor

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
    if (folder / WEIGHTS).exists():
        return [folder / WEIGHTS]
    if (folder / INDEX).exists():
        named = _shards(folder)
        missing = [name for name in named if not (folder / name).exists()]
        if missing or not named:
            raise InputError(
                f"{folder / INDEX} lists {', '.join(missing) or 'no file'}, which does not exist",
                "copy or download the missing files",
            )
        return [folder / name for name in named]
    pickles = sorted(file.name for pattern in PICKLES for file in folder.glob(pattern))
    if pickles:
        raise InputError(
            f"{folder} has its weights in a pickle ({', '.join(pickles)}), which can run any code",
            "convert them if you trust them: safetensors.torch.save_file("
            f"torch.load({pickles[0]!r}, weights_only=True), {WEIGHTS!r})",
        )
    raise InputError(f"{folder} has no {WEIGHTS} and no {INDEX}", "give a folder with weights")


def _shards(folder: Path) -> list[str]:
    """The files that an index lists."""
    named = read_json(folder / INDEX).get("weight_map")
    if not isinstance(named, dict) or not all(isinstance(each, str) for each in named.values()):
        raise InputError(
            f"{folder / INDEX} has no weight_map from tensors to files", "download it again"
        )
    return sorted(set(named.values()))


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file that must exist."""
    content = _parsed(file)
    if not isinstance(content, dict):
        raise InputError(f"{file} must hold an object {{...}}, got a {type(content).__name__}")
    return content


def read_list(file: Path) -> list[Any]:
    """A JSON list from a file that must exist."""
    content = _parsed(file)
    if not isinstance(content, list):
        raise InputError(f"{file} must hold a list [...], got a {type(content).__name__}")
    return content


def _parsed(file: Path) -> Any:
    if not file.is_file():
        raise InputError(f"there is no {file}", "give the folder of a model")
    try:
        return json.loads(file.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{file} is not JSON ({error})", "fix it or download it again") from None


def write_folder(
    folder: Path, files: Mapping[str, Callable[[Path], object]], *, without: Iterable[str] = ()
) -> None:
    """Write files into a folder: all of them, or none if writing fails.

    They are written to a new folder next to it, which then replaces it. Other files of the old
    folder stay, except those in `without` and older weights in several files.
    """
    folder = folder.resolve()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file", "give a folder to save to")
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        if folder.exists():
            shutil.copytree(folder, fresh, dirs_exist_ok=True, copy_function=_link)
        for name, write in files.items():
            (fresh / name).parent.mkdir(parents=True, exist_ok=True)
            (fresh / name).unlink(missing_ok=True)
            write(fresh / name)
            # Some writers make it readable by its owner only, and models are shared.
            (fresh / name).chmod(0o644)
            _flush(fresh / name)
        for name in without:
            (fresh / name).unlink(missing_ok=True)
        if WEIGHTS in files:
            _drop_shards(fresh)
        fresh.chmod(0o755)
        _replace(fresh, folder)
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        why = f"{error.strerror or error}, and nothing there was changed"
        raise OSError(error.errno, why, str(folder)) from error
    except BaseException:
        shutil.rmtree(fresh, ignore_errors=True)
        raise


def _drop_shards(folder: Path) -> None:
    """Remove older weights in several files, which some programs would read too."""
    if not (folder / INDEX).is_file():
        return
    try:
        older = _shards(folder)
    except InputError:
        older = []
    for name in [*(each for each in older if Path(each).name == each and each != WEIGHTS), INDEX]:
        (folder / name).unlink(missing_ok=True)


def _replace(fresh: Path, folder: Path) -> None:
    if not folder.exists():
        fresh.rename(folder)
        return
    old = Path(tempfile.mkdtemp(prefix=f".{folder.name}-old-", dir=folder.parent))
    folder.rename(old)
    try:
        fresh.rename(folder)
    except BaseException:
        old.rename(folder)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _link(source: str, target: str) -> str:
    """Link a file that stays, or copy it if the file system cannot link."""
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)
    return target


def _flush(file: Path) -> None:
    with file.open("rb") as opened:
        os.fsync(opened.fileno())
