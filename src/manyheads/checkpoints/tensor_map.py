"""How the tensors of a file correspond to ours, in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of ours, and its tensors in a file of theirs.

    Several of theirs are concatenated as our rows. If `transposed`, theirs is stored as [in, out].
    The prefix is written; a file may lack it if `canonical_name` removes it.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    transposed: bool = False
    prefix: str = ""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Our tensor, in its own memory so that the file can be closed."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if len(parts) > 1 and not self.transposed:
            return whole
        return (whole.mT if self.transposed else whole).clone(memory_format=torch.contiguous_format)

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        whole = ours.mT.contiguous() if self.transposed else ours
        pieces = whole.split(list(self.rows)) if len(self.theirs) > 1 else (whole,)
        names = (self.prefix + name for name in self.theirs)
        return dict(zip(names, pieces, strict=True))

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes of theirs if ours has this shape."""
        whole = (*ours[:-2], ours[-1], ours[-2]) if self.transposed else ours
        if len(self.theirs) == 1:
            return {self.theirs[0]: whole}
        return {name: (rows, *whole[1:]) for name, rows in zip(self.theirs, self.rows, strict=True)}

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        return {self.ours: self.join([get(name) for name in self.theirs])}

    def write(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.part(ours[self.ours])

    def expected(self, ours: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        return self.shapes(ours[self.ours])


@dataclass(frozen=True, slots=True)
class Interleaved(Entry):
    """An entry whose first tensor of theirs interleaves several blocks of our rows by group.

    Each group has a part of every block: with two groups, q and g are stored as q0 g0 q1 g1.
    """

    blocks: tuple[int, ...] = ()
    groups: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        grouped = parts[0].unflatten(0, (self.groups, -1))
        shares = grouped.split([rows // self.groups for rows in self.blocks], dim=1)
        return torch.cat([*(share.flatten(0, 1) for share in shares), *parts[1:]])

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        pieces = ours.split([*self.blocks, *self.rows[1:]])
        shares = [piece.unflatten(0, (self.groups, -1)) for piece in pieces[: len(self.blocks)]]
        interleaved = torch.cat(shares, dim=1).flatten(0, 1)
        names = (self.prefix + name for name in self.theirs)
        return dict(zip(names, (interleaved, *pieces[len(self.blocks) :]), strict=True))


@dataclass(frozen=True, slots=True)
class Stacked(Entry):
    """An entry of `count` matrices of ours, each made of as many of theirs, all transposed."""

    count: int = 1

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat(list(parts)).unflatten(0, (self.count, -1)).mT.contiguous()

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        names = (self.prefix + name for name in self.theirs)
        return dict(zip(names, ours.mT.flatten(0, 1).split(list(self.rows)), strict=True))

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return {name: (rows, ours[1]) for name, rows in zip(self.theirs, self.rows, strict=True)}


@dataclass(frozen=True, slots=True)
class Alternating(Entry):
    """An entry whose columns alternate between both halves of ours: a0 b0 a1 b1."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        [whole] = parts
        return torch.cat((whole[..., ::2], whole[..., 1::2]), dim=-1)

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        halves = torch.stack(ours.chunk(2, dim=-1), dim=-1)
        return {self.prefix + self.theirs[0]: halves.flatten(-2)}


@dataclass(frozen=True, slots=True)
class Depthwise(Entry):
    """An entry of convolutions per channel, whose tensors of theirs have one more axis of one."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return torch.cat([part.squeeze(1) for part in parts])

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        pieces = ours.unsqueeze(1).split(list(self.rows)) if self.rows else (ours.unsqueeze(1),)
        names = (self.prefix + name for name in self.theirs)
        return dict(zip(names, pieces, strict=True))

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        rows = self.rows or (ours[0],)
        return {name: (each, 1, ours[1]) for name, each in zip(self.theirs, rows, strict=True)}


@dataclass(frozen=True, slots=True)
class Either:
    """One tensor of ours that files store in one of two ways; we write the usual one."""

    usual: Entry
    other: Entry

    @property
    def ours(self) -> str:
        return self.usual.ours

    def stored(
        self, shapes: Mapping[str, tuple[int, ...]], ours: Mapping[str, tuple[int, ...]]
    ) -> Entry:
        """The other entry if a file has tensors of it and none of the usual one.

        Where both have the same names, the sizes decide.
        """
        if self.usual.theirs == self.other.theirs:
            other = self.other.expected(ours)
            fits = all(shapes.get(name) == shape for name, shape in other.items())
            return self.other if fits else self.usual
        has_usual, has_other = (
            any(name in shapes for name in entry.theirs) for entry in (self.usual, self.other)
        )
        return self.other if has_other and not has_usual else self.usual

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        try:
            return self.usual.read(get)
        except KeyError:
            return self.other.read(get)

    def write(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return self.usual.write(ours)


@dataclass(frozen=True, slots=True)
class Packed:
    """One tensor of theirs that holds several of ours, flattened, one after another.

    The prefix means the same as for `Entry`.
    """

    ours: Mapping[str, tuple[int, ...]]
    theirs: str
    shape: tuple[int, ...]
    prefix: str = ""

    def read(self, get: Callable[[str], Tensor]) -> dict[str, Tensor]:
        pieces = get(self.theirs).flatten().split([prod(shape) for shape in self.ours.values()])
        return {
            name: piece.clone().view(shape)
            for (name, shape), piece in zip(self.ours.items(), pieces, strict=True)
        }

    def write(self, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
        whole = torch.cat([ours[name].flatten() for name in self.ours])
        return {self.prefix + self.theirs: whole.view(self.shape)}

    def expected(self, ours: Mapping[str, tuple[int, ...]]) -> dict[str, tuple[int, ...]]:
        assert all(ours[name] == shape for name, shape in self.ours.items())
        return {self.theirs: self.shape}


# As many as an error names.
MAX_FAULTS = 6

TensorMap = Iterable[Entry | Packed | Either]


def to_theirs(entries: TensorMap, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """All of their tensors, made from ours."""
    return {
        name: tensor.contiguous() for entry in entries for name, tensor in entry.write(ours).items()
    }


def check_fits(
    entries: TensorMap,
    ours: Mapping[str, tuple[int, ...]],
    stored: Mapping[str, tuple[int, ...]],
    where: str,
    in_file: Callable[[str], str] = str,
) -> None:
    """Refuse a file with tensors that are missing, unexpected or misshapen, and name the first.

    `in_file` gives the name that the file itself has for a tensor.
    """
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        chosen = entry.stored(stored, ours) if isinstance(entry, Either) else entry
        expected |= chosen.expected(ours)
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
