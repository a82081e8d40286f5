"""Files are found by name, folder and glob, and opened whatever they are packed with."""

import bz2
import gzip
import lzma
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from manyheads.data.sources.files import find_files, open_file
from manyheads.errors import InputError, MissingPackageError
from tests.messages import refuses

KNOWN = (".txt", ".jsonl", "")


def lay(folder: Path, *names: str) -> None:
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(name)


def names(folder: Path, *paths: str) -> list[str]:
    result = find_files([folder / path for path in paths], KNOWN)
    return [file.relative_to(folder).as_posix() for file in result]


def test_folders_globs_and_files_come_in_order_and_once(tmp_path: Path) -> None:
    lay(
        tmp_path,
        "b.txt",
        "a/z.TXT",
        "a/y.jsonl.gz",
        "a/pixels.png",
        "a/.git/x.txt",
        "c.txt",
        "bare",
    )
    assert names(tmp_path, "") == ["a/y.jsonl.gz", "a/z.TXT", "b.txt", "c.txt"]
    assert names(tmp_path, "c.txt", "?.txt", "**/*.jsonl*") == ["c.txt", "b.txt", "a/y.jsonl.gz"]
    assert names(tmp_path, "bare") == ["bare"]
    assert find_files(str(tmp_path / "b.txt"), KNOWN) == [tmp_path / "b.txt"]


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    lay(tmp_path, "a/pixels.png")
    with refuses(InputError, f"{tmp_path}/b.txt does not exist: check the path."):
        find_files([tmp_path / "b.txt"], KNOWN)
    with refuses(
        InputError, f"no file matches {tmp_path}/*.txt: check the folder and the pattern."
    ):
        find_files([tmp_path / "*.txt"], KNOWN)
    with refuses(InputError, f"{tmp_path} has no .txt or .jsonl file: give another folder."):
        find_files([tmp_path], KNOWN)
    with refuses(
        InputError,
        f"{tmp_path}/a/pixels.png has an unknown suffix '.png': use .txt or .jsonl, or set format.",
    ):
        find_files([tmp_path / "a" / "*"], KNOWN)
    with refuses(InputError, "there is no file to read: give a file, a folder or a glob."):
        find_files([], KNOWN)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    ".gz": gzip.compress,
    ".bz2": bz2.compress,
    ".xz": lzma.compress,
    "": bytes,
}


@pytest.mark.parametrize("suffix", PACKERS)
def test_bytes_come_out_unpacked(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.txt{suffix}"
    file.write_bytes(PACKERS[suffix](b"words " * 1000))
    with open_file(file) as unpacked:
        assert unpacked.read() == b"words " * 1000


@pytest.mark.parametrize("suffix", [".gz", ".bz2", ".xz"])
def test_broken_packing_is_named(suffix: str, tmp_path: Path) -> None:
    file = tmp_path / f"a.txt{suffix}"
    packed = PACKERS[suffix](bytes(range(256)) * 1000)
    for data in (packed[: len(packed) // 2], b"not packed at all, only named so"):
        file.write_bytes(data)
        problem = rf"a\.txt\{suffix} is not a complete \{suffix} file \("
        with pytest.raises(InputError, match=problem), open_file(file) as unpacked:
            unpacked.read()


def test_a_missing_zstandard_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "zstandard", None)
    missing = f"{tmp_path}/a.zst needs the package zstandard: run pip install zstandard."
    (tmp_path / "a.zst").touch()
    with refuses(MissingPackageError, missing), open_file(tmp_path / "a.zst"):
        pass


def test_zstandard_is_read_where_it_is(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    (tmp_path / "a.zst").write_bytes(zstandard.compress(b"words " * 9))
    with open_file(tmp_path / "a.zst") as unpacked:
        assert unpacked.read() == b"words " * 9
    packed = zstandard.compress(bytes(range(256)) * 1000)
    problem = r"is not a complete \.zst file \("
    for data in (packed[: len(packed) // 2], packed + packed[:9], b"no such thing"):
        (tmp_path / "a.zst").write_bytes(data)
        with pytest.raises(InputError, match=problem), open_file(tmp_path / "a.zst") as unpacked:
            unpacked.read()


def test_zstandard_has_lines_through_all_its_frames(tmp_path: Path) -> None:
    zstandard = pytest.importorskip("zstandard")
    lines = [f"{number} words\n".encode() for number in range(20_000)]
    half = len(lines) // 2
    frames = [zstandard.compress(b"".join(some)) for some in (lines[:half], [], lines[half:])]
    (tmp_path / "a.jsonl.zst").write_bytes(b"".join(frames))
    with open_file(tmp_path / "a.jsonl.zst") as unpacked:
        assert list(unpacked) == lines
