"""How the tensors of a file correspond to those of a model, in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from manyheads.errors import InputError

Shapes = Mapping[str, tuple[int, ...]]
# Some rows, or of axis 1 columns, of a tensor of a file.
RowReader = Callable[[str, range, int], Tensor]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a model, and its tensors in a file.

    Several tensors of a file are concatenated as rows, in equal parts unless `rows` has their
    numbers. If `transposed`, the file stores [in, out]. The prefix is written; a file may lack it
    if `canonical_name` removes it.
    """

    name: str
    sources: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    prefix: str = ""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """The model's tensor, in its own memory so that the file can be closed."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if len(parts) > 1 and not self.transposed:
            return whole
        return (whole.mT if self.transposed else whole).clone(memory_format=torch.contiguous_format)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        """The tensors of the file, in the order of `sources`."""
        whole = tensor.mT.contiguous() if self.transposed else tensor
        return whole.split(self.sizes(len(whole))) if len(self.sources) > 1 else (whole,)

    def sizes(self, rows: int) -> list[int]:
        """The rows of each source where the model's tensor has this number."""
        count = len(self.sources)
        return list(self.rows) if self.rows else [rows // count] * count

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes in the file if the model's tensor has this shape."""
        whole = (*shape[:-2], shape[-1], shape[-2]) if self.transposed else shape
        if len(self.sources) == 1:
            return {self.sources[0]: whole}
        sizes = self.sizes(whole[0])
        return {name: (rows, *whole[1:]) for name, rows in zip(self.sources, sizes, strict=True)}

    def with_prefix(self, prefix: str) -> "Entry":
        return replace(self, prefix=prefix)

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {self.name: self.join([get(source) for source in self.sources])}

    def read_rows(self, get: RowReader, rows: range, like: Tensor) -> Tensor:
        """Some rows of the model's tensor, of a matrix or vector shaped as `like`."""
        if self.transposed:
            # They are columns of the file.
            columns = [get(source, rows, 1) for source in self.sources]
            return torch.cat(columns).mT
        parts, first = [], 0
        for source, count in zip(self.sources, self.sizes(len(like)), strict=True):
            start, stop = max(rows.start - first, 0), min(rows.stop - first, count)
            if start < stop:
                parts.append(get(source, range(start, stop), 0))
            first += count
        return torch.cat(parts) if parts else like.new_zeros(0, *like.shape[1:])

    def part(self, tensor: Tensor) -> dict[str, Tensor]:
        """The tensors of the file by name."""
        names = (self.prefix + source for source in self.sources)
        return dict(zip(names, self.split(tensor), strict=True))

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.part(tensors[self.name])

    def expected(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        return self.shapes(shapes[self.name])


@dataclass(frozen=True, slots=True)
class Interleaved(Entry):
    """An entry whose first source interleaves several blocks of rows by group.

    Each group has a part of every block: with two groups, q and g are stored as q0 g0 q1 g1.
    """

    blocks: tuple[int, ...] = ()
    groups: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = parts[0].unflatten(0, (self.groups, -1))
        shares = grouped.split([rows // self.groups for rows in self.blocks], dim=1)
        return torch.cat([*(share.flatten(0, 1) for share in shares), *parts[1:]])

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        pieces = tensor.split([*self.blocks, *self.rows[1:]])
        shares = [piece.unflatten(0, (self.groups, -1)) for piece in pieces[: len(self.blocks)]]
        return torch.cat(shares, dim=1).flatten(0, 1), *pieces[len(self.blocks) :]


@dataclass(frozen=True, slots=True)
class NeighbouringPairs(Entry):
    """Queries, keys and values whose rotary pairs are neighbours in the file, halves in the model.

    These are the first `channels` of each head of `size` channels: a0 b0 a1 b1 for a0 a1 b0 b1.
    """

    size: int = 1
    channels: int = 0

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        first, second = (torch.arange(at, self.channels, 2) for at in (0, 1))
        return torch.cat([*(self._ordered(p, (first, second)) for p in parts[:2]), *parts[2:]])

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        parts = Entry.split(self, tensor)
        pairs = torch.arange(self.channels).unflatten(0, (2, -1)).T.flatten()
        return [*(self._ordered(part, (pairs,)) for part in parts[:2]), *parts[2:]]

    def _ordered(self, rows: Tensor, order: tuple[Tensor, ...]) -> Tensor:
        index = torch.cat([*order, torch.arange(self.channels, self.size)])
        return rows.unflatten(0, (-1, self.size))[:, index].flatten(0, 1)


@dataclass(frozen=True, slots=True)
class Stacked(Entry):
    """An entry of `count` stacked matrices, each made of as many sources, all transposed."""

    count: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).unflatten(0, (self.count, -1)).mT.contiguous()

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.mT.flatten(0, 1).split(list(self.rows))

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {name: (rows, shape[1]) for name, rows in zip(self.sources, self.rows, strict=True)}


@dataclass(frozen=True, slots=True)
class Alternating(Entry):
    """An entry whose columns alternate between both halves of the model's: a0 b0 a1 b1."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        [whole] = parts
        return torch.cat((whole[..., ::2], whole[..., 1::2]), dim=-1)

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return (torch.stack(tensor.chunk(2, dim=-1), dim=-1).flatten(-2),)


@dataclass(frozen=True, slots=True)
class Depthwise(Entry):
    """An entry of convolutions per channel, whose sources have one more axis of one."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.squeeze(1) for part in parts])

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return tensor.unsqueeze(1).split(self.sizes(len(tensor)))

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        sizes = self.sizes(shape[0])
        return {name: (rows, 1, shape[1]) for name, rows in zip(self.sources, sizes, strict=True)}


@dataclass(frozen=True, slots=True)
class Repeated(Entry):
    """One tensor stored under several names; `transformers` computes with the first."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()

    def split(self, tensor: Tensor) -> Sequence[Tensor]:
        return [tensor.clone() for _ in self.sources]

    def shapes(self, shape: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.sources, shape)


@dataclass(frozen=True, slots=True)
class Either:
    """One tensor that files store in one of two ways; we write the usual one."""

    usual: Entry
    other: Entry

    @property
    def name(self) -> str:
        return self.usual.name

    def stored(self, stored: Shapes, shapes: Shapes) -> Entry:
        """The other entry if a file has tensors of it and none of the usual one.

        Where both have the same names, the sizes decide.
        """
        if self.usual.sources == self.other.sources:
            other = self.other.expected(shapes)
            fits = all(stored.get(name) == shape for name, shape in other.items())
            return self.other if fits else self.usual
        has_usual, has_other = (
            any(name in stored for name in entry.sources) for entry in (self.usual, self.other)
        )
        return self.other if has_other and not has_usual else self.usual

    def with_prefix(self, prefix: str) -> "Either":
        return Either(self.usual.with_prefix(prefix), self.other.with_prefix(prefix))

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        try:
            return self.usual.read(get)
        except KeyError:
            return self.other.read(get)

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.usual.write(tensors)


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of a file that holds several of the model, flattened, one after another.

    The prefix means the same as for `Entry`.
    """

    parts: Shapes
    source: str
    shape: tuple[int, ...]
    prefix: str = ""

    @property
    def name(self) -> str:
        return next(iter(self.parts))

    def with_prefix(self, prefix: str) -> "Packed":
        return replace(self, prefix=prefix)

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        pieces = get(self.source).flatten().split([prod(shape) for shape in self.parts.values()])
        return {
            name: piece.clone().view(shape)
            for (name, shape), piece in zip(self.parts.items(), pieces, strict=True)
        }

    def write(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = torch.cat([tensors[name].flatten() for name in self.parts])
        return {self.prefix + self.source: whole.view(self.shape)}

    def expected(self, shapes: Shapes) -> dict[str, tuple[int, ...]]:
        assert all(shapes[name] == shape for name, shape in self.parts.items())
        return {self.source: self.shape}


# As many as an error names.
MAX_FAULTS = 6

MapEntry = Entry | Packed | Either
TensorMap = Iterable[MapEntry]


def to_file(entries: TensorMap, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The tensors of a file, made from those of a model."""
    return {
        name: tensor.contiguous()
        for entry in entries
        for name, tensor in entry.write(tensors).items()
    }


def check_fits(
    entries: TensorMap,
    shapes: Shapes,
    stored: Shapes,
    where: str,
    in_file: Callable[[str], str] = str,
) -> None:
    """Refuse a file with tensors that are missing, unexpected or misshapen, and name the first.

    `in_file` gives the name that the file itself has for a tensor.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        chosen = entry.stored(stored, shapes) if isinstance(entry, Either) else entry
        expected |= chosen.expected(shapes)
    faults = [f"{name} {expected[name]} is missing" for name in expected.keys() - stored.keys()]
    faults += [
        f"{in_file(name)} is not part of the model" for name in stored.keys() - expected.keys()
    ]
    faults += [
        f"{in_file(name)} has shape {stored[name]}, expected {expected[name]}"
        for name in expected.keys() & stored.keys()
        if stored[name] != expected[name]
    ]
    if faults:
        shown = "; ".join(sorted(faults)[:MAX_FAULTS])
        more = f" and {len(faults) - MAX_FAULTS} more" if len(faults) > MAX_FAULTS else ""
        raise InputError(
            f"{where} does not fit its config: {shown}{more}",
            "use the config and the weights of the same model",
        )
