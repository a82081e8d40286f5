"""Where an index lies, and its manifest: the small file whose replacement commits a change.

The manifest names the version of the table and the folder of keywords that are in force. A writer
prepares new ones beside them and then replaces the manifest, in one step; whatever it does not name
is not searched. A run that was killed left rows behind, which the next one takes up.
"""

import json
import re
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, fields, replace
from hashlib import blake2b
from pathlib import Path
from typing import Any, Literal

from manyheads.atomic_write import atomic_write, check_writable, exclusive_lock
from manyheads.errors import InputError, import_package
from manyheads.tasks.search import chunking, residual_codes

IndexKind = Literal["dense", "late", "bm25", "hybrid"]
VectorFormat = Literal["float32", "float16", "2bit"]
# What a row holds besides its text: nothing, one vector, or one per token.
RowVectors = Literal["none", "dense", "late"]

FORMAT = 1
MANIFEST, LOCK = "manifest.json", "lock"
TABLE, KEYWORDS, CODES = "chunks-", "keywords-", "codes-"


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """What an index is made of and which files of it are in force."""

    kind: IndexKind
    row_vectors: RowVectors
    vectors: VectorFormat = "float32"
    model: str = ""
    model_fingerprint: str = ""
    settings: chunking.ChunkSettings = field(default_factory=chunking.ChunkSettings)
    width: int = 0
    table: str = ""
    version: int = 0
    keywords: str = ""
    codes: str = ""
    approximate: bool = False
    documents: int = 0
    chunks: int = 0
    vector_count: int = 0
    # What a reader that opened the index before the last change may still be reading.
    before: tuple[str, ...] = ()

    @property
    def table_name(self) -> str:
        """The name of a table whose rows were all made in the same way."""
        origin: list[Any] = [self.row_vectors, self.model_fingerprint, asdict(self.settings)]
        if self.row_vectors != "none":
            origin += [self.vectors, self.width]
        return TABLE + blake2b(json.dumps(origin).encode(), digest_size=8).hexdigest()

    @property
    def row_width(self) -> int:
        """How many numbers, or bytes of a code, are stored per vector."""
        coded = residual_codes.NUMBER_BYTES + -(-self.width // residual_codes.PER_BYTE)
        return coded if self.vectors == "2bit" else self.width

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, **asdict(self)}, indent=1)

    @classmethod
    def from_json(cls, text: str | bytes, where: str) -> "IndexManifest":
        try:
            values = json.loads(text)
            version = values.pop("format")
            names = {field.name for field in fields(cls)}
            if version > FORMAT or not set(values) <= names:
                raise InputError(
                    f"the index {where} has format {version}, and this version reads {FORMAT}",
                    "update manyheads, or create the index again",
                )
            values["settings"] = chunking.ChunkSettings(**values["settings"])
            values["before"] = tuple(values["before"])
            return cls(**values)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(
                f"{where}/{MANIFEST} cannot be read ({error})", "create the index again"
            ) from None

    def with_before(self, old: "IndexManifest | None") -> "IndexManifest":
        """The same, keeping what the manifest that it replaces was made of."""
        names = () if old is None else (old.table, old.keywords, old.codes)
        return replace(self, before=tuple(name for name in names if name))


class IndexLocation:
    """A folder, or an address of an object store such as s3://bucket/notes."""

    def __init__(self, where: str | Path) -> None:
        # A Path has lost one of the two slashes.
        address = re.sub(r"^(\w{2,}):/(?!/)", r"\1://", str(where))
        self.is_remote = "://" in address
        self.address = address.rstrip("/") if self.is_remote else str(Path(where).expanduser())
        self.path = Path(self.address)

    def __str__(self) -> str:
        return self.address

    def prepare(self) -> None:
        """Refuse a folder that cannot be an index, and create it."""
        if self.is_remote:
            return
        if self.path.exists() and not self.path.is_dir():
            raise InputError(f"{self.path} is a file", "name a folder for the index")
        foreign = [name for name in self.names() if not _is_ours(name)]
        if foreign:
            raise InputError(
                f"{self.path} is a folder with other things in it, such as {sorted(foreign)[0]}",
                "name a new folder for the index",
            )
        check_writable(self.path / MANIFEST)
        self.path.mkdir(parents=True, exist_ok=True)

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Refuse a second writer. An object store has no locks."""

        def on_busy() -> None:
            raise InputError(
                f"another process is writing to the index {self}",
                "wait until it has finished, or stop it",
            )

        held = nullcontext() if self.is_remote else exclusive_lock(self.path / LOCK, on_busy)
        with held:
            yield

    def manifest(self) -> IndexManifest | None:
        """The manifest in force, None if no index was ever finished."""
        content = self.read(MANIFEST)
        return None if content is None else IndexManifest.from_json(content, self.address)

    def require_manifest(self) -> IndexManifest:
        manifest = self.manifest()
        if manifest is not None:
            return manifest
        if any(map(_is_ours, self.names())):
            raise InputError(
                f"the index {self} was never finished",
                "create it again with the same documents: what was encoded is used",
            )
        raise InputError(f"there is no index in {self}", "create it with manyheads index")

    def commit(self, manifest: IndexManifest) -> None:
        """Replace the manifest: from here on readers see the new state."""
        self.write(MANIFEST, manifest.to_json().encode())

    def read(self, name: str) -> bytes | None:
        """The content of a small file, None if there is none."""
        try:
            if not self.is_remote:
                return (self.path / name).read_bytes()
            _, system, root = _file_system(self.address)
            with system.open_input_file(f"{root}/{name}") as file:
                content: bytes = file.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Write a small file, which is complete or not there."""
        if not self.is_remote:
            with atomic_write(self.path / name) as temporary:
                temporary.write_bytes(content)
            return
        _, system, root = _file_system(self.address)
        with system.open_output_stream(f"{root}/{name}") as file:
            file.write(content)

    @contextmanager
    def new_folder(self, name: str) -> Iterator[Path]:
        """A folder to fill, which gets its name when the block succeeds."""
        parent = None if self.is_remote else self.path
        with tempfile.TemporaryDirectory(dir=parent, prefix=f".{name}.") as temporary:
            filled = Path(temporary) / name
            filled.mkdir()
            yield filled
            if not self.is_remote:
                filled.replace(self.path / name)
                return
            fs, system, root = _file_system(self.address)
            system.create_dir(f"{root}/{name}", recursive=True)
            fs.copy_files(str(filled), f"{root}/{name}", destination_filesystem=system)

    @contextmanager
    def local_folder(self, name: str) -> Iterator[Path]:
        """A folder of the index on this machine."""
        if not self.is_remote:
            yield self.path / name
            return
        fs, system, root = _file_system(self.address)
        with tempfile.TemporaryDirectory() as temporary:
            fs.copy_files(f"{root}/{name}", temporary, source_filesystem=system)
            yield Path(temporary)

    def names(self) -> list[str]:
        """The files and folders of the index, and whatever else lies there."""
        if not self.is_remote:
            return [file.name for file in self.path.iterdir()] if self.path.is_dir() else []
        fs, system, root = _file_system(self.address)
        files = system.get_file_info(fs.FileSelector(root, allow_not_found=True))
        return [file.base_name for file in files]

    def remove_all_but(self, manifest: IndexManifest) -> None:
        """Remove what the manifest does not name."""
        named = (manifest.table, manifest.keywords, manifest.codes, *manifest.before)
        stay = {MANIFEST, LOCK, *named}
        for name in self.names():
            if name.removesuffix(".lance") in stay or not _is_ours(name):
                continue
            if self.is_remote:
                _, system, root = _file_system(self.address)
                system.delete_dir(f"{root}/{name}")
            elif (self.path / name).is_dir():
                shutil.rmtree(self.path / name, ignore_errors=True)
            else:
                (self.path / name).unlink(missing_ok=True)


def _is_ours(name: str) -> bool:
    """Whether a name is one that an index uses, those of interrupted writers included."""
    return name in (MANIFEST, LOCK) or name.lstrip(".").startswith(
        (TABLE, KEYWORDS, CODES, MANIFEST)
    )


def _file_system(address: str) -> tuple[Any, Any, str]:
    """The module of Arrow's file systems, that of an address, and the path in it."""
    fs = import_package("pyarrow.fs", f"the address {address}", "'manyheads[search]'")
    try:
        return fs, *fs.FileSystem.from_uri(address)
    except (ValueError, OSError) as error:
        raise InputError(
            f"{address} is not an address that can be opened ({error})",
            "use s3://bucket/folder, gs://bucket/folder or a folder",
        ) from None
