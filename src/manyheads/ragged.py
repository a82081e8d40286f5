"""Ragged batches: sequences of different lengths end to end in one tensor, without padding."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from operator import index
from typing import Any, Literal

import torch
import torch.distributed as dist
from jaxtyping import Int, Shaped
from torch import Tensor

from manyheads.devices import check_memory
from manyheads.errors import InputError, ShapeError, short_repr

# Fewer tokens than these fit any machine.
MANY_TOKENS = 2**24


def check_dense(tensor: Tensor, name: str) -> None:
    """Refuse a sparse tensor."""
    if torch.compiler.is_compiling() or tensor.layout in (torch.strided, torch.jagged):
        return
    raise InputError(f"{name} must be dense, got a tensor of {tensor.layout}", "use to_dense()")


# A text whose blocks would be shorter stays with one process.
SMALLEST_BLOCK = 16


@dataclass(frozen=True, slots=True)
class Span:
    """The tokens from position `start` to `stop` of a text."""

    text: int
    start: int
    stop: int

    def __len__(self) -> int:
        return self.stop - self.start


@dataclass(frozen=True, slots=True, eq=False)
class ContextShard:
    """The tokens of this process, number `rank` of those that share the texts.

    `lengths` are those of the whole texts, and `spans` the tokens of every process in the order in
    which it packs them. Of W processes number r holds the blocks r and 2W - 1 - r of each text, so
    that all have the same work under a causal mask too. `group` is their process group.

    >>> shard = ContextShard.of((100, 8), size=2, rank=0)
    >>> shard.own[:2]
    (Span(text=0, start=0, stop=25), Span(text=0, start=75, stop=100))
    >>> shard.local_lengths, shard.spans[1]
    ((50, 8), (Span(text=0, start=25, stop=75),))
    """

    lengths: tuple[int, ...]
    spans: tuple[tuple[Span, ...], ...]
    rank: int
    group: Any = None

    @classmethod
    def of(
        cls, lengths: Sequence[int], *, size: int, rank: int, group: Any = None
    ) -> "ContextShard":
        """Long texts in blocks; a short one with the process that has the fewest tokens."""
        spans: list[list[Span]] = [[] for _ in range(size)]
        tokens = [0] * size
        for text, length in enumerate(lengths):
            if length < 2 * size * SMALLEST_BLOCK:
                process = tokens.index(min(tokens))
                spans[process] += [Span(text, 0, length)] if length else []
                tokens[process] += length
                continue
            ends = [length * block // (2 * size) for block in range(2 * size + 1)]
            for process in range(size):
                first, last = process, 2 * size - 1 - process
                blocks = [Span(text, *ends[first : first + 2]), Span(text, *ends[last : last + 2])]
                if first + 1 == last:
                    blocks = [Span(text, ends[first], ends[last + 1])]
                spans[process] += blocks
                tokens[process] += sum(map(len, blocks))
        return cls(tuple(lengths), tuple(map(tuple, spans)), rank, group)

    @classmethod
    def in_group(cls, lengths: Sequence[int], group: Any = None) -> "ContextShard":
        """The tokens of this process in a group, by default that of all processes."""
        size, rank = dist.get_world_size(group), dist.get_rank(group)
        return cls.of(lengths, size=size, rank=rank, group=group)

    @property
    def size(self) -> int:
        """The number of processes."""
        return len(self.spans)

    @property
    def own(self) -> tuple[Span, ...]:
        """The tokens of this process."""
        return self.spans[self.rank]

    @property
    def local_lengths(self) -> tuple[int, ...]:
        """How many tokens of each text this process holds."""
        counts = [0] * len(self.lengths)
        for span in self.own:
            counts[span.text] += len(span)
        return tuple(counts)

    def first_rows(self, process: int) -> tuple[int, ...]:
        """The row of each span of a process in its packed tokens, and their total."""
        return (0, *accumulate(map(len, self.spans[process])))

    def positions(self) -> Int[Tensor, " n"]:
        """The positions of the own tokens in their texts."""
        return _joined([torch.arange(span.start, span.stop) for span in self.own])

    def rows(self) -> Int[Tensor, " n"]:
        """The own tokens as rows of the packed whole texts."""
        starts = (0, *accumulate(self.lengths))
        return _joined(
            [torch.arange(span.start, span.stop) + starts[span.text] for span in self.own]
        )

    def take(self, values: Shaped[Tensor, "m *rest"]) -> Shaped[Tensor, "n *rest"]:
        """The rows of this process."""
        return values[self.rows().to(values.device)]

    def reduce(self, numbers: Tensor, *, largest: bool = False) -> Tensor:
        """The sum over the processes, or the largest."""
        if self.size > 1:
            numbers = numbers.contiguous()
            op = dist.ReduceOp.MAX if largest else dist.ReduceOp.SUM
            dist.all_reduce(numbers, op=op, group=self.group)
        return numbers

    def gather(self, numbers: Tensor) -> Tensor:
        """The numbers of all processes, one process per row."""
        if self.size == 1:
            return numbers[None]
        rows = [torch.empty_like(numbers) for _ in range(self.size)]
        dist.all_gather(rows, numbers.contiguous(), group=self.group)
        return torch.stack(rows)

    def global_rank(self, rank: int) -> int:
        """The number of a process of this group among all processes."""
        return rank if self.group is None else dist.get_global_rank(self.group, rank)


class HostLengths:
    """Lengths and starts as plain numbers.

    Neither a dataclass nor a tuple: torch.compile would specialize on the values of those.
    """

    __slots__ = ("each", "starts")

    def __init__(self, each: tuple[int, ...], starts: tuple[int, ...]) -> None:
        self.each = each
        self.starts = starts


@dataclass(frozen=True, slots=True, eq=False)
class Lengths:
    """The length of each sequence and where it starts in the packed tensor.

    `each` and `starts` are on the host, so that no kernel waits for the device to know a shape.
    Code that reads only `longest`, `uniform` and the tensors compiles once for all batches.
    Sequences lie end to end (`tight`) except in a cache, which has free slots behind each. In a
    step of fixed shape only the device knows how many slots of a sequence are `filled`. Where
    processes share texts, these are the tokens of one `shard`, at their positions in the texts.

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
    shard: ContextShard | None = None

    @classmethod
    def of(cls, each: Sequence[int], device: torch.device | str = "cpu") -> "Lengths":
        """Sequences end to end."""
        if not torch.compiler.is_compiling() and not _are_integers(each):
            raise InputError(f"lengths must be a sequence of integers, got {short_repr(each)}")
        each = tuple(int(length) for length in each)
        if any(length < 0 for length in each):
            raise InputError(f"lengths must be at least 0, got {each}")
        offsets = (0, *accumulate(each))
        if not torch.compiler.is_compiling() and offsets[-1] >= MANY_TOKENS:
            check_memory(3 * 8 * offsets[-1], f"lengths of {offsets[-1]:,} tokens", "use fewer")
            if offsets[-1] >= 2**31:
                raise InputError(f"a batch has fewer than 2**31 tokens, got {offsets[-1]:,}")
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
    def with_capacity(
        cls, each: Sequence[int], capacity: int, device: torch.device | str
    ) -> "Lengths":
        """Sequences with `capacity` slots each in the packed tensor, the first of them filled."""
        packed = cls.of(each, device)
        starts = tuple(capacity * index for index in range(len(packed.each)))
        # Free slots behind the last sequence count too: they are part of the packed tensor.
        tight = all(length == capacity for length in packed.each)
        return replace(packed, host=HostLengths(packed.each, starts), tight=tight)

    @classmethod
    def of_shard(cls, shard: ContextShard, device: torch.device | str = "cpu") -> "Lengths":
        """The tokens that this process holds of each text, possibly none."""
        packed = cls.of(shard.local_lengths, device)
        return replace(packed, positions=shard.positions().to(device), shard=shard)

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
        """The number of sequences, from a tensor shape, so that compiled code accepts any."""
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
        check_dense(self.values, "values")
        if not self.lengths.tight:
            raise ShapeError("these lengths have gaps between sequences", "use Lengths.of(each)")
        if self.values.shape[0] != self.lengths.positions.shape[0]:
            raise ShapeError(
                f"there are {self.values.shape[0]} values, and lengths {self.lengths.each} sum to "
                f"{self.lengths.total}",
                "give lengths that sum to the number of tokens",
            )

    @classmethod
    def from_list(cls, sequences: Sequence[Shaped[Tensor, "_ *rest"]]) -> "Ragged":
        """Concatenate tensors that differ only in their first axis."""
        if not isinstance(sequences, Sequence):
            raise InputError(f"sequences must be a list of tensors, got {short_repr(sequences)}")
        if not sequences:
            raise InputError("the list of sequences is empty", "give at least one")
        for number, sequence in enumerate(sequences):
            if not isinstance(sequence, Tensor) or not sequence.dim():
                raise InputError(
                    f"sequence {number} must be a tensor with at least one axis, got "
                    f"{short_repr(sequence)}"
                )
            check_dense(sequence, f"sequence {number}")
        tails = {tuple(sequence.shape[1:]) for sequence in sequences}
        if len(tails) > 1:
            raise ShapeError(
                f"the sequences have different shapes after the first axis: {sorted(tails)}",
                "make all axes but the first equal",
            )
        lengths = Lengths.of([sequence.shape[0] for sequence in sequences], sequences[0].device)
        return cls(torch.cat(list(sequences)), lengths)

    @classmethod
    def from_padded(
        cls, values: Shaped[Tensor, "b t *rest"], mask: Shaped[Tensor, "..."] | None = None
    ) -> "Ragged":
        """Drop the padding of a padded batch: tokens where `mask` is 0, on any side."""
        check_dense(values, "values")
        if mask is None:
            batch, length = values.shape[:2]
            return cls(values.flatten(0, 1), Lengths.of([length] * batch, values.device))
        check_dense(mask, "mask")
        expected = tuple(values.shape[:2])
        if tuple(mask.shape) != expected:
            raise ShapeError(
                f"the mask has shape {tuple(mask.shape)}, and the batch {expected}",
                f"give a mask of shape {expected}, 1 for a token and 0 for padding",
            )
        if mask.dtype != torch.bool and not bool(((mask == 0) | (mask == 1)).all()):
            remedy = "use 1 for a token, 0 for padding"
            raise InputError("the mask has values other than 0 and 1", remedy)
        tokens = mask.to(values.device) != 0
        return cls(values[tokens], Lengths.of(tokens.sum(1).tolist(), values.device))

    @classmethod
    def concatenate(cls, batches: Sequence["Ragged"]) -> "Ragged":
        """One batch that holds the sequences of all, in order."""
        if not batches:
            raise InputError("the list of batches is empty", "give at least one")
        each = [length for batch in batches for length in batch.lengths.each]
        values = torch.cat([batch.values for batch in batches])
        return cls(values, Lengths.of(each, values.device))

    def to_list(self) -> list[Shaped[Tensor, "_ *rest"]]:
        return [self.values[tokens] for tokens in self.lengths.slices()]

    def to_padded(
        self,
        mask: Shaped[Tensor, "b t"] | None = None,
        *,
        fill: int | float = 0,
        side: Literal["left", "right"] = "right",
    ) -> Shaped[Tensor, "b t *rest"]:
        """A padded tensor, with tokens where `mask` is 1 or with the padding on one side."""
        device = self.values.device
        if mask is None:
            columns = torch.arange(self.lengths.longest, device=device)
            each = torch.tensor(self.lengths.each, device=device).unsqueeze(1)
            mask = columns < each if side == "right" else columns >= self.lengths.longest - each
        tokens = mask.to(device) != 0
        counts = tuple(tokens.sum(1).tolist())
        if counts != self.lengths.each:
            raise ShapeError(
                f"the mask has {counts} tokens per row, and the sequences have {self.lengths.each}",
                "give the mask of this batch",
            )
        padded = self.values.new_full((*tokens.shape, *self.values.shape[1:]), fill)
        places = tokens.view(*tokens.shape, *[1] * (self.values.dim() - 1))
        return padded.masked_scatter(places, self.values)

    def of(self, sequence: int) -> Shaped[Tensor, "_ *rest"]:
        """The tokens of one sequence."""
        if not -len(self) <= sequence < len(self):
            raise InputError(f"sequence must be in 0 to {len(self) - 1}, got {sequence}")
        start = self.lengths.starts[sequence]
        return self.values[start : start + self.lengths.each[sequence]]

    def select(self, sequences: Sequence[int]) -> "Ragged":
        """The selected sequences, in this order; one may occur twice."""
        chosen = [self.of(sequence) for sequence in sequences]
        if not chosen:
            return Ragged(self.values[:0], Lengths.of([], self.values.device))
        return Ragged.from_list(chosen)

    def split(self, counts: Sequence[int]) -> list["Ragged"]:
        """Split into batches of `counts` sequences, the inverse of `concatenate`."""
        if sum(counts) != len(self) or any(count < 0 for count in counts):
            raise InputError(
                f"counts must sum to the {len(self)} sequences of the batch, got {tuple(counts)}"
            )
        bounds = [0, *accumulate(counts)]
        return [self.select(range(start, end)) for start, end in pairwise(bounds)]

    def with_values(self, values: Shaped[Tensor, "n *rest"]) -> "Ragged":
        """Other values for the same sequences."""
        return Ragged(values, self.lengths)

    def shard(self, shard: ContextShard) -> "Ragged":
        """The tokens of this process, where several share the texts."""
        return Ragged(shard.take(self.values), Lengths.of_shard(shard, self.device))

    def map(self, function: Callable[[Tensor], Tensor]) -> "Ragged":
        return self.with_values(function(self.values))

    def to(self, device: torch.device | str) -> "Ragged":
        return Ragged(self.values.to(device), self.lengths.to(device))

    @property
    def device(self) -> torch.device:
        return self.values.device

    def __len__(self) -> int:
        return len(self.lengths)


def _are_integers(each: object) -> bool:
    try:
        return all(index(length) == length for length in each)  # type: ignore[attr-defined]
    except (TypeError, ValueError):
        return False


def _joined(parts: list[Tensor]) -> Tensor:
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.long)
