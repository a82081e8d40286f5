"""The checksums of a checkpoint: manifest.json names every file with its size and its CRC-32.

They are against damage, not against attacks. CRC-32 detects every flipped bit and every burst of up
to 32 bits, and is several times faster than the cryptographic digests of Python.
"""

import json
import os
import zlib
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
# Bytes read at a time.
CHUNK = 2**22


def write_manifest(folder: Path) -> None:
    """Bring all files of a folder to the disk, and then write their checksums beside them."""
    files = {
        file.name: {"bytes": file.stat().st_size, "crc32": file_checksum(file, sync=True)}
        for file in sorted(folder.iterdir())
        if file.name != MANIFEST
    }
    with (folder / MANIFEST).open("w", encoding="utf-8") as opened:
        json.dump({"files": files, "crc32": _own_checksum(files)}, opened, indent=1)
        opened.flush()
        os.fsync(opened.fileno())


def find_damage(folder: Path) -> str:
    """What is wrong with the files of a folder, in words; empty if all are as they were written."""
    file = folder / MANIFEST
    if not file.is_file():
        return f"it has no {MANIFEST}"
    try:
        manifest = json.loads(file.read_bytes())
        files = manifest["files"]
        if manifest["crc32"] != _own_checksum(files):
            return f"{MANIFEST} has changed since it was written"
        for name, entry in files.items():
            if problem := _file_damage(folder / name, entry):
                return problem
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        return f"{MANIFEST} is not readable"
    except OSError as error:
        return f"{Path(error.filename or file).name} cannot be read ({error.strerror})"
    # Reading a checkpoint opens all of them.
    extra = [path.name for path in folder.glob("*.safetensors") if path.name not in files]
    return f"{extra[0]} is not in {MANIFEST}" if extra else ""


def file_checksum(file: Path, *, sync: bool = False) -> str:
    checksum = 0
    with file.open("rb") as opened:
        if sync:
            os.fsync(opened.fileno())
        while chunk := opened.read(CHUNK):
            checksum = zlib.crc32(chunk, checksum)
    return f"{checksum:08x}"


def _file_damage(file: Path, entry: Any) -> str:
    if not file.is_file():
        return f"{file.name} is missing"
    size = file.stat().st_size
    if size != entry["bytes"]:
        return f"{file.name} has {size:,} bytes instead of {entry['bytes']:,}"
    if file_checksum(file) != entry["crc32"]:
        return f"{file.name} has another checksum than when it was written"
    return ""


def _own_checksum(files: Any) -> str:
    return f"{zlib.crc32(json.dumps(files, sort_keys=True).encode()):08x}"
