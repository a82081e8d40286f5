"""The table of names between two layouts, read in both directions."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from manyheads.errors import InputError

__all__ = ["Entry", "Packed", "fitting", "from_theirs", "to_theirs"]


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of ours and where it lies in a file of theirs.

    Several of theirs are ours laid row under row. `turned` says that theirs is stored [in, out].
    The prefix is written, and read or not, where `canonical` takes prefixes off.
    """

    ours: str
    theirs: tuple[str, ...]
    rows: tuple[int, ...] = ()
    turned: bool = False
    prefix: str = ""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Ours in memory of its own, so that the file can be let go."""
        whole = parts[0] if len(parts) == 1 else torch.cat(list(parts))
        if len(parts) > 1 and not self.turned:
            return whole
        return (whole.T if self.turned else whole).clone(memory_format=torch.contiguous_format)

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        whole = ours.T.contiguous() if self.turned else ours
        pieces = whole.split(list(self.rows)) if len(self.theirs) > 1 else (whole,)
        names = (self.prefix + name for name in self.theirs)
        return dict(zip(names, pieces, strict=True))

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        """The shapes that theirs must have where ours has this one."""
        whole = ours[::-1] if self.turned else ours
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
class Packed:
    """One tensor of theirs that holds some of ours one after another, all of them read flat.

    The prefix is as an entry's.
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


def from_theirs(
    entries: Iterable[Entry | Packed], get: Callable[[str], Tensor]
) -> Iterable[tuple[str, Tensor]]:
    """Our tensors one after another, each made of theirs."""
    for entry in entries:
        yield from entry.read(get).items()


def to_theirs(entries: Iterable[Entry | Packed], ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Their tensors, each cut out of ours."""
    return {
        name: tensor.contiguous() for entry in entries for name, tensor in entry.write(ours).items()
    }


def fitting(
    entries: Iterable[Entry | Packed],
    ours: Mapping[str, tuple[int, ...]],
    found: Mapping[str, tuple[int, ...]],
    where: str,
) -> None:
    """Refuse a file whose tensors do not fit, naming all that are missing, surplus or misshapen."""
    expected: dict[str, tuple[int, ...]] = {}
    for entry in entries:
        expected |= entry.expected(ours)
    faults = [f"{name} {expected[name]} is missing" for name in expected.keys() - found.keys()]
    faults += [f"{name} belongs to no part of the model" for name in found.keys() - expected.keys()]
    faults += [
        f"{name} is {found[name]} and the config asks for {expected[name]}"
        for name in expected.keys() & found.keys()
        if found[name] != expected[name]
    ]
    if faults:
        raise InputError(
            f"{where} does not fit its config.json: {'; '.join(sorted(faults))}",
            "use the config and the weights of one model",
        )
