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

from manyheads.annotations import NonNegativeInt
from manyheads.argument_checks import check_fields
from manyheads.atomic_write import atomic_write, check_writable, exclusive_lock
from manyheads.checkpoints.files import MAX_JSON_BYTES, parse_json, read_small
from manyheads.dataclass_codec import DataclassCodec
from manyheads.errors import InputError, ManyheadsError, import_package, short_repr
from manyheads.tasks.search import chunking, residual_codes
from manyheads.train.loop.manifest import find_damage, write_manifest

IndexKind = Literal["dense", "late", "bm25", "hybrid"]
VectorFormat = Literal["float32", "float16", "2bit"]
# What a row holds besides its text: nothing, one vector, or one per token.
RowVectors = Literal["none", "dense", "late"]

FORMAT = 1
MANIFEST, LOCK = "manifest.json", "lock"
TABLE, KEYWORDS, CODES = "chunks-", "keywords-", "codes-"
CODEC = DataclassCodec(tag="kind")


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class IndexManifest:
    """What an index is made of and which files of it are in force."""

    kind: IndexKind
    row_vectors: RowVectors
    vectors: VectorFormat = "float32"
    model: str = ""
    model_fingerprint: str = ""
    settings: chunking.ChunkSettings = field(default_factory=chunking.ChunkSettings)
    width: NonNegativeInt = 0
    table: str = ""
    version: NonNegativeInt = 0
    keywords: str = ""
    codes: str = ""
    approximate: bool = False
    documents: NonNegativeInt = 0
    chunks: NonNegativeInt = 0
    vector_count: NonNegativeInt = 0
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
    def from_json(cls, text: bytes, where: str) -> "IndexManifest":
        """The manifest of a finished index, of which every value is checked here, once."""
        try:
            values = parse_json(text, f"{where}/{MANIFEST}")
            if not isinstance(values, dict) or type(values.get("format")) is not int:
                raise InputError("it has no format")
            names, version = {field.name for field in fields(cls)}, values.pop("format")
            if version == FORMAT and set(values) <= names:
                manifest: IndexManifest = CODEC.decode_table(cls, values)
                manifest._check()
                return manifest
        except ManyheadsError as error:
            raise InputError(
                f"{where}/{MANIFEST} cannot be read ({error.problem[:300]})",
                "delete that file and create the index again, which uses what was encoded",
            ) from None
        raise InputError(
            f"the index {where} has format {short_repr(version)}, and this version reads {FORMAT}",
            "update manyheads, or create the index again",
        )

    def _check(self) -> None:
        """Raise if the values contradict each other; the name of the table is a hash of most."""
        rows = {"bm25": ("none",), "hybrid": ("dense", "late")}.get(self.kind, (self.kind,))
        stamp = self.table_name.removeprefix(TABLE)
        keywords = f"{KEYWORDS}{stamp}-{self.version}" if self.kind in ("bm25", "hybrid") else ""
        coded = self.vectors == "2bit"
        expected: dict[str, Any] = {
            "row_vectors": self.row_vectors if self.row_vectors in rows else rows[0],
            "table": self.table_name,
            "keywords": keywords,
            "codes": f"{CODES}{stamp}" if coded and self.codes else "",
        }
        for name, value in expected.items():
            if getattr(self, name) != value:
                raise InputError(f"{name} is {short_repr(getattr(self, name))}, not {value!r}")
        for name in self.before:
            if not _is_ours(name) or Path(name).name != name:
                raise InputError(f"before has {short_repr(name)}")

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
                return read_small(self.path / name, MAX_JSON_BYTES)
            _, system, root = _file_system(self.address)
            with system.open_input_file(f"{root}/{name}") as file:
                content: bytes = file.read()
                return content
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InputError(
                f"{self.address}/{name} cannot be read ({error.strerror or error})",
                "create the index again",
            ) from None

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
            write_manifest(filled)
            if not self.is_remote:
                filled.replace(self.path / name)
                return
            fs, system, root = _file_system(self.address)
            system.create_dir(f"{root}/{name}", recursive=True)
            fs.copy_files(str(filled), f"{root}/{name}", destination_filesystem=system)

    @contextmanager
    def local_folder(self, name: str) -> Iterator[Path]:
        """A folder of the index on this machine, with intact files."""
        with tempfile.TemporaryDirectory() as temporary:
            folder = self.path / name
            if self.is_remote:
                folder = Path(temporary)
                fs, system, root = _file_system(self.address)
                fs.copy_files(f"{root}/{name}", temporary, source_filesystem=system)
            # Earlier versions wrote no checksums.
            if (folder / MANIFEST).exists() and (damage := find_damage(folder)):
                raise InputError(
                    f"{self.address}/{name} is damaged: {damage}", "create the index again"
                )
            yield folder

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
