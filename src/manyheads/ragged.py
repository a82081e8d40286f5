"""Ragged: many sequences of different lengths laid end to end in one tensor, without padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Literal

import torch
from jaxtyping import Bool, Int, Shaped
from torch import Tensor

from manyheads.errors import InputError, ShapeError


class HostLengths:
    """Lengths and starts as plain numbers.

    No dataclass and no tuple, because compiled code would be tied to whatever such a one holds.
    """

    __slots__ = ("each", "starts")

    def __init__(self, each: tuple[int, ...], starts: tuple[int, ...]) -> None:
        self.each = each
        self.starts = starts


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """How long each sequence is and where it starts in the packed tensor.

    `each` and `starts` live on the host, so that no kernel waits for the device to learn a shape.
    Code that reads only `longest`, `uniform` and the tensors compiles once for all batches.
    Sequences lie end to end (`tight`) everywhere but in a cache, which keeps room behind each. In a
    step of fixed shape only the device knows how much of its room a sequence has `filled`.

    >>> lengths = Lengths.of([2, 0, 3])
    >>> lengths.total, lengths.longest, lengths.positions.tolist()
    (5, 3, [0, 1, 0, 1, 2])
    """

    host: HostLengths
    offsets: Int[Tensor, "b_plus_1"]
    positions: Int[Tensor, " n"]
    sequence_of_token: Int[Tensor, " n"]
    longest: int
    uniform: bool
    tight: bool
    filled: Int[Tensor, " b"] | None = None

    @classmethod
    def of(cls, each: Sequence[int], device: torch.device | str = "cpu") -> "Lengths":
        """Sequences end to end."""
        each = tuple(int(length) for length in each)
        if any(length < 0 for length in each):
            raise InputError(f"lengths {each} hold a negative one", "give lengths of 0 or more")
        offsets = (0, *accumulate(each))
        counts = torch.tensor(each, dtype=torch.long)
        owner = torch.arange(len(each)).repeat_interleave(counts, output_size=offsets[-1])
        positions = torch.arange(offsets[-1]) - torch.tensor(offsets)[owner]
        return cls(
            host=HostLengths(each, offsets[:-1]),
            offsets=torch.tensor(offsets, dtype=torch.int32).to(device),
            positions=positions.to(device),
            sequence_of_token=owner.to(device),
            longest=max(each, default=0),
            uniform=len(set(each)) <= 1,
            tight=True,
        )

    @classmethod
    def with_capacity(cls, each: Sequence[int], capacity: int, device: torch.device | str) -> "Lengths":
        """Sequences that each own `capacity` slots of the packed tensor and fill the first of them."""
        packed = cls.of(each, device)
        starts = tuple(capacity * index for index in range(len(packed.each)))
        # The room behind the last sequence counts too: the packed tensor holds it.
        tight = all(length == capacity for length in packed.each)
        return replace(packed, host=HostLengths(packed.each, starts), tight=tight)

    @property
    def each(self) -> tuple[int, ...]:
        return self.host.each

    @property
    def starts(self) -> tuple[int, ...]:
        return self.host.starts

    @property
    def total(self) -> int:
        return sum(self.each)

    @property
    def count(self) -> int:
        """How many sequences there are, read off a tensor so that compiled code may see any."""
        return self.offsets.shape[0] - 1

    def __len__(self) -> int:
        return len(self.each)

    def slices(self) -> Iterator[slice]:
        for start, length in zip(self.starts, self.each, strict=True):
            yield slice(start, start + length)

    def to(self, device: torch.device | str) -> "Lengths":
        return replace(
            self,
            offsets=self.offsets.to(device),
            positions=self.positions.to(device),
            sequence_of_token=self.sequence_of_token.to(device),
            filled=None if self.filled is None else self.filled.to(device),
        )


@dataclass(frozen=True, slots=True, eq=False)
class Ragged:
    """Many sequences in one tensor: `values` holds their tokens end to end.

    >>> batch = Ragged.from_list([torch.tensor([7, 8, 9]), torch.tensor([5])])
    >>> batch.values.tolist(), batch.lengths.each
    ([7, 8, 9, 5], (3, 1))
    >>> batch.to_padded().tolist()
    [[7, 8, 9], [5, 0, 0]]
    """

    values: Shaped[Tensor, "n *rest"]
    lengths: Lengths

    def __post_init__(self) -> None:
        if not self.lengths.tight:
            raise ShapeError("these lengths leave room between sequences", "use Lengths.of(each)")
        if self.values.shape[0] != self.lengths.positions.shape[0]:
            raise ShapeError(
                f"values hold {self.values.shape[0]} tokens and lengths {self.lengths.each} "
                f"ask for {self.lengths.total}",
                "give lengths that sum to the number of tokens",
            )

    @classmethod
    def from_list(cls, sequences: Sequence[Shaped[Tensor, "_ *rest"]]) -> "Ragged":
        """Lay tensors that differ only in their first axis end to end."""
        if not sequences:
            raise InputError("an empty list says nothing of shape or type", "give one sequence")
        tails = {tuple(sequence.shape[1:]) for sequence in sequences}
        if len(tails) > 1:
            raise ShapeError(
                f"sequences end in shapes {sorted(tails)}", "make all axes but the first agree"
            )
        lengths = Lengths.of([sequence.shape[0] for sequence in sequences], sequences[0].device)
        return cls(torch.cat(list(sequences)), lengths)

    @classmethod
    def from_padded(
        cls, values: Shaped[Tensor, "b t *rest"], mask: Shaped[Tensor, "..."] | None = None
    ) -> "Ragged":
        """Drop the padding of a padded batch: tokens where `mask` is 0, left, right or between."""
        if mask is None:
            batch, length = values.shape[:2]
            return cls(values.flatten(0, 1), Lengths.of([length] * batch, values.device))
        kept = _checked_mask(values, mask)
        return cls(values[kept], Lengths.of(kept.sum(1).tolist(), values.device))

    @classmethod
    def concatenate(cls, batches: Sequence["Ragged"]) -> "Ragged":
        """One batch that holds the sequences of all, in order."""
        if not batches:
            raise InputError("there is nothing to concatenate", "give at least one batch")
        each = [length for batch in batches for length in batch.lengths.each]
        values = torch.cat([batch.values for batch in batches])
        return cls(values, Lengths.of(each, values.device))

    def to_list(self) -> list[Shaped[Tensor, "_ *rest"]]:
        return [self.values[place] for place in self.lengths.slices()]

    def to_padded(
        self,
        mask: Shaped[Tensor, "b t"] | None = None,
        *,
        fill: int | float = 0,
        side: Literal["left", "right"] = "right",
    ) -> Shaped[Tensor, "b t *rest"]:
        """Back to a rectangle: where `mask` has its ones, or with the padding on one side."""
        if mask is None:
            mask = self._side_mask(side)
        kept = mask.to(self.values.device) != 0
        if tuple(kept.sum(1).tolist()) != self.lengths.each:
            raise ShapeError(
                f"mask keeps {tuple(kept.sum(1).tolist())} tokens a row",
                f"give one that keeps {self.lengths.each}",
            )
        padded = self.values.new_full((*kept.shape, *self.values.shape[1:]), fill)
        return padded.masked_scatter(
            kept.view(*kept.shape, *[1] * (self.values.dim() - 1)), self.values
        )

    def _side_mask(self, side: Literal["left", "right"]) -> Bool[Tensor, "b t"]:
        device = self.values.device
        places = torch.arange(self.lengths.longest, device=device)
        each = torch.tensor(self.lengths.each, device=device).unsqueeze(1)
        return places < each if side == "right" else places >= self.lengths.longest - each

    def of(self, sequence: int) -> Shaped[Tensor, "_ *rest"]:
        """The tokens of one sequence."""
        if not -len(self) <= sequence < len(self):
            raise InputError(f"there is no sequence {sequence}", f"use 0 to {len(self) - 1}")
        start = self.lengths.starts[sequence]
        return self.values[start : start + self.lengths.each[sequence]]

    def select(self, sequences: Sequence[int]) -> "Ragged":
        """The named sequences, in the given order; one may be named twice."""
        chosen = [self.of(sequence) for sequence in sequences]
        if not chosen:
            return Ragged(self.values[:0], Lengths.of([], self.values.device))
        return Ragged.from_list(chosen)

    def split(self, counts: Sequence[int]) -> list["Ragged"]:
        """Batches of `counts` sequences each; `concatenate` puts them together again."""
        if sum(counts) != len(self) or any(count < 0 for count in counts):
            raise InputError(
                f"counts {tuple(counts)} do not split {len(self)} sequences",
                f"give counts that sum to {len(self)}",
            )
        bounds = [0, *accumulate(counts)]
        return [self.select(range(start, end)) for start, end in pairwise(bounds)]

    def with_values(self, values: Shaped[Tensor, "n *rest"]) -> "Ragged":
        """The same sequences carrying other values."""
        return Ragged(values, self.lengths)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Ragged":
        return self.with_values(function(self.values))

    def to(self, device: torch.device | str) -> "Ragged":
        return Ragged(self.values.to(device), self.lengths.to(device))

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.lengths)


def _checked_mask(
    values: Shaped[Tensor, "b t *rest"], mask: Shaped[Tensor, "..."]
) -> Bool[Tensor, "b t"]:
    expected = tuple(values.shape[:2])
    if tuple(mask.shape) != expected:
        raise ShapeError(
            f"mask has shape {tuple(mask.shape)} and the batch {expected}",
            f"give a mask of shape {expected}, 1 for a token and 0 for padding",
        )
    if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
        raise InputError("mask holds values other than 0 and 1", "use 1 for a token, 0 for padding")
    return mask.to(values.device) != 0
