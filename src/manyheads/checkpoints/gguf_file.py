"""GGUF files: the metadata, and the tensors, dequantized one at a time.

The header is read here, and not by the package `gguf`, which trusts every count in a file and takes
seconds for a vocabulary. Its block formats are used.
"""

import mmap
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from manyheads.checkpoints.tensor_map import Entry, MapEntry
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.build import Model
from manyheads.quantization.gguf_blocks import FOUR_BITS, four_bit_codes, joined
from manyheads.quantization.integer_codes import IntegerCodes, round_weight
from manyheads.quantization.model_weights import READOUT, matrix_of, set_codes

MAGIC = b"GGUF"
VERSIONS = (2, 3)
DAMAGED = "copy or download it again"
# The types of metadata: a letter for struct, or what follows.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# The smallest that an entry can be: a key, a type and a value; a name, sizes, a type, an offset.
LEAST_FIELD, LEAST_TENSOR = 13, 24
MAX_SIZES = 4
# The types that need no package, by their number in the file.
PLAIN: dict[int, tuple[str, torch.dtype]] = {
    0: ("F32", torch.float32),
    1: ("F16", torch.float16),
    28: ("F64", torch.float64),
    30: ("BF16", torch.bfloat16),
}
# A matrix is dequantized in pieces of so many values, so that little memory is needed beside it.
PIECE = 2**22


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where a tensor is in the file, and how it is stored."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int
    size: int


class GGUFFile:
    """A GGUF file: `metadata` by key, and tensors by name, read when they are asked for."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, StoredTensor] = {}
        self._blocks: dict[int, tuple[int, int]] = {}
        try:
            with file.open("rb") as opened:
                if opened.read(len(MAGIC)) != MAGIC:
                    raise InputError(f"{file} is not a GGUF file", "give a .gguf file or a folder")
                self._map: mmap.mmap | None = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_READ)
        except OSError as error:
            raise InputError(f"{file} cannot be read ({error.strerror})", "check it") from None
        try:
            self._read_header(_Header(self._map, file))
        except BaseException:
            self.close()
            raise

    def _read_header(self, header: "_Header") -> None:
        version = header.number("I")
        if version not in VERSIONS:
            raise InputError(
                f"{self.file} is a GGUF file of version {version}, or of another byte order",
                f"use one of version {' or '.join(map(str, VERSIONS))}, little-endian",
            )
        tensors, fields = header.count(LEAST_TENSOR), header.count(LEAST_FIELD)
        for _ in range(fields):
            key = header.text()
            self.metadata[key] = header.value(header.number("I"))
        entries = [header.tensor() for _ in range(tensors)]
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 0 < alignment < 2**20:
            raise InputError(f"{self.file} has general.alignment={alignment!r:.40}", DAMAGED)
        start = -(-header.offset // alignment) * alignment
        for name, shape, kind, offset in entries:
            if name in self.tensors:
                raise InputError(f"{self.file} has two tensors {name!r:.100}", DAMAGED)
            size = self._bytes(name, shape, kind)
            if start + offset + size > header.end:
                raise InputError(
                    f"{self.file} is truncated: {name!r:.100} ends at byte "
                    f"{start + offset + size:,}, and the file has {header.end:,}",
                    DAMAGED,
                )
            self.tensors[name] = StoredTensor(name, shape, kind, start + offset, size)

    def _bytes(self, name: str, shape: tuple[int, ...], kind: int) -> int:
        """The size of a tensor in the file."""
        if kind in PLAIN:
            return prod(shape) * PLAIN[kind][1].itemsize
        values, size = self._block(name, kind)
        if not shape or shape[-1] % values:
            raise InputError(
                f"{self.file}: {name!r:.100} has shape {shape}, and its rows are not made of "
                f"blocks of {values} values",
                DAMAGED,
            )
        return prod(shape) // values * size

    def _block(self, name: str, kind: int) -> tuple[int, int]:
        """The values and the bytes of one block."""
        if kind in self._blocks:
            return self._blocks[kind]
        gguf = import_gguf(self.file)
        try:
            quantization = gguf.GGMLQuantizationType(kind)
            values, size = gguf.GGML_QUANT_SIZES[quantization]
            gguf.quants.dequantize(np.zeros((1, size), np.uint8), quantization)
            self._blocks[kind] = int(values), int(size)
            return self._blocks[kind]
        except ValueError:
            label = f"the unknown type {kind}"
        except (NotImplementedError, KeyError):
            label = quantization.name
        raise InputError(
            f"{self.file} stores {name!r:.100} as {label}, which cannot be dequantized",
            "use a file in F32, F16, BF16, Q8_0, Q4_0, Q4_1, Q4_K, Q6_K or similar",
        )

    def kind_name(self, name: str) -> str:
        """How a tensor is stored, such as Q4_K."""
        kind = self.tensors[name].kind
        if kind in PLAIN:
            return PLAIN[kind][0]
        return str(import_gguf(self.file).GGMLQuantizationType(kind).name)

    def __getitem__(self, name: str) -> Tensor:
        """A tensor in its own memory, in float32 if it was quantized."""
        return self.read(name)

    def read(self, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """A tensor in its own memory, dequantized in pieces, in `dtype` if it is given."""
        entry = self.tensors[name]
        assert self._map is not None
        if entry.kind in PLAIN:
            stored = PLAIN[entry.kind][1]
            # A copy: the file may be closed before the tensor.
            data = bytearray(self._map[entry.start : entry.start + entry.size])
            plain = torch.frombuffer(data, dtype=stored) if data else torch.empty(0, dtype=stored)
            return plain.reshape(entry.shape).to(dtype or stored)
        result = torch.empty(prod(entry.shape), dtype=dtype or torch.float32)
        first = 0
        for piece in self.pieces(name):
            result[first : first + piece.numel()] = piece.flatten()
            first += piece.numel()
        return result.reshape(entry.shape)

    def pieces(self, name: str) -> Iterator[Tensor]:
        """Some rows of a quantized tensor after the other, in float32."""
        entry = self.tensors[name]
        assert self._map is not None
        gguf = import_gguf(self.file)
        values, size = self._block(name, entry.kind)
        kind = gguf.GGMLQuantizationType(entry.kind)
        row = entry.shape[-1] // values * size
        step = max(1, PIECE // entry.shape[-1]) * row
        for begin in range(entry.start, entry.start + entry.size, step):
            end = min(begin + step, entry.start + entry.size)
            blocks = np.frombuffer(self._map[begin:end], dtype=np.uint8)
            yield torch.from_numpy(gguf.quants.dequantize(blocks.reshape(-1, row), kind))

    def codes(self, name: str, *, four_bits: bool) -> IntegerCodes:
        """A quantized matrix as codes of four bits if it is stored so, or of eight."""
        if not four_bits:
            return joined([round_weight(piece, "int8") for piece in self.pieces(name)])
        entry = self.tensors[name]
        assert self._map is not None
        data = bytearray(self._map[entry.start : entry.start + entry.size])
        blocks = torch.frombuffer(data, dtype=torch.uint8)
        size = self._block(name, entry.kind)[1]
        return four_bit_codes(self.kind_name(name), blocks.view(entry.shape[0], -1, size))

    def release(self) -> None:
        """Give back the memory of the pages that were read; they can be read again."""
        if self._map is not None and hasattr(self._map, "madvise"):
            self._map.madvise(mmap.MADV_DONTNEED)

    def close(self) -> None:
        if self._map is not None:
            self._map.close()
            self._map = None


class _Header:
    """Reads the head of a file and never past its end."""

    def __init__(self, data: mmap.mmap, file: Path) -> None:
        self.data, self.file, self.end, self.offset = data, file, len(data), len(MAGIC)

    def take(self, size: int) -> int:
        """Go on by so many bytes, and give where they start."""
        if size > self.end - self.offset:
            raise InputError(f"{self.file} is truncated or damaged in its header", DAMAGED)
        start, self.offset = self.offset, self.offset + size
        return start

    def number(self, letter: str) -> Any:
        layout = struct.Struct("<" + letter)
        return layout.unpack_from(self.data, self.take(layout.size))[0]

    def count(self, least: int) -> int:
        """A number of things of which each takes at least so many bytes."""
        count: int = self.number("Q")
        if count * least > self.end - self.offset:
            raise InputError(
                f"{self.file} announces {count:,} entries, more than fit into it", DAMAGED
            )
        return count

    def text(self) -> str:
        size = self.number("Q")
        start = self.take(size)
        return self.data[start : start + size].decode("utf-8", "replace")

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind == ARRAY:
            return self.array(self.number("I"))
        raise InputError(f"{self.file} has metadata of the unknown type {kind}", DAMAGED)

    def array(self, kind: int) -> list[Any]:
        if kind == STRING:
            return [self.text() for _ in range(self.count(8))]
        if kind not in SCALARS:
            raise InputError(f"{self.file} has a list of the unknown type {kind}", DAMAGED)
        width = struct.calcsize("<" + SCALARS[kind])
        count = self.count(width)
        start = self.take(count * width)
        return list(struct.unpack_from(f"<{count}{SCALARS[kind]}", self.data, start))

    def tensor(self) -> tuple[str, tuple[int, ...], int, int]:
        """Name, shape with the rows first, type and offset."""
        name, dimensions = self.text(), self.number("I")
        if dimensions > MAX_SIZES:
            raise InputError(f"{self.file}: {name!r:.100} has {dimensions} dimensions", DAMAGED)
        shape = [self.number("Q") for _ in range(dimensions)]
        return name, tuple(reversed(shape)), self.number("I"), self.number("Q")


class GGUFWeights:
    """The tensors of a GGUF file under the names of the model's family, as `WeightFiles` has them.

    `names` maps these to the file's own; `change` makes a tensor of the family from one of the
    file. Tensors are read in `dtype`, if it is set.
    """

    def __init__(
        self, file: GGUFFile, names: dict[str, str], change: Callable[[str, Tensor], Tensor]
    ) -> None:
        self._file, self._names, self._change = file, names, change
        self.dtype: torch.dtype | None = None
        self._read = 0

    def shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: self._file.tensors[own].shape for name, own in self._names.items()}

    def dtypes(self) -> list[torch.dtype]:
        """The dtype of most weights, and float32 if they are quantized."""
        sizes: dict[torch.dtype, int] = {}
        for own in self._names.values():
            entry = self._file.tensors[own]
            dtype = PLAIN[entry.kind][1] if entry.kind in PLAIN else torch.float32
            sizes[dtype] = sizes.get(dtype, 0) + prod(entry.shape)
        return sorted(sizes, key=lambda dtype: -sizes[dtype])[:1]

    def in_file(self, name: str) -> str:
        """The name that the file itself has for a tensor."""
        return self._names.get(name, name)

    def __getitem__(self, name: str) -> Tensor:
        own = self._names[name]
        # Vectors are small and may lose too much if they are rounded before the change.
        vector = len(self._file.tensors[own].shape) < 2
        tensor = self._change(own, self._file.read(own, None if vector else self.dtype))
        tensor = tensor if self.dtype is None else tensor.to(self.dtype)
        self._read += self._file.tensors[own].size
        if self._read > 2**24:
            self._file.release()
            self._read = 0
        return tensor

    @property
    def quantized(self) -> bool:
        """Whether any tensor is stored as integers."""
        return any(self._file.tensors[own].kind not in PLAIN for own in self._names.values())

    def codes(self, names: Sequence[str]) -> IntegerCodes | None:
        """The rows of these matrices as integer codes; None if one of them is not quantized."""
        own = [self._names[name] for name in names]
        if any(self._file.tensors[name].kind in PLAIN for name in own):
            return None
        four_bits = all(self._file.kind_name(name) in FOUR_BITS for name in own)
        parts = []
        for name in own:
            part = self._file.codes(name, four_bits=four_bits)
            # Rows may be in another order in the file.
            codes, scales = self._change(name, part.codes), self._change(name, part.scales)
            offsets = None if part.offsets is None else self._change(name, part.offsets)
            parts.append(IntegerCodes(codes, scales, part.columns, offsets))
        self._file.release()
        return joined(parts)

    def __enter__(self) -> "GGUFWeights":
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()


def import_gguf(file: Path) -> Any:
    """The package with the block formats."""
    try:
        import gguf
        import gguf.quants
    except ImportError:
        raise MissingPackageError(f"{file}, which is quantized,", "gguf") from None
    return gguf


def keep_quantized(
    model: Model,
    entries: Iterable[MapEntry],
    codes_of: Callable[[Sequence[str]], IntegerCodes | None],
) -> list[MapEntry]:
    """Give a model on the meta device the quantized matrices of its file, and return what is left.

    `codes_of` has the codes of tensors by their names in the family.
    """
    rest: list[MapEntry] = []
    for entry in entries:
        name, codes = entry.name.removesuffix(".weight"), None
        name = READOUT if name == "readout" else name
        if type(entry) is Entry and name != entry.name and not entry.transposed:
            codes = None if matrix_of(model, name) is None else codes_of(entry.sources)
        if codes is None:
            rest.append(entry)
        else:
            set_codes(model, name, codes)
    return rest
