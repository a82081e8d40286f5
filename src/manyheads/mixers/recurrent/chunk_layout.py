"""A ragged batch cut into chunks of equal size, for recurrences that work chunk by chunk."""

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from manyheads.ragged import Lengths

# The layers of a stack cut the same lengths, some of them into chunks of several sizes. A recorded
# CUDA graph reads the layouts of its batch: this is enough for graphs of four shapes.
REMEMBERED = 16


@dataclass(frozen=True, slots=True, eq=False)
class ChunkLayout:
    """Where the tokens of each chunk are; a chunk never has tokens of two sequences.

    The last chunk of a sequence is filled up with empty slots, whose values are zero.

    >>> chunks = ChunkLayout.of(Lengths.of([3, 0, 2]), size=2)
    >>> chunks.token_of_slot.tolist(), chunks.counts.each
    ([[0, 1], [2, 5], [3, 4]], (2, 0, 1))
    """

    token_of_slot: Int[Tensor, "c s"]
    slot_of_token: Int[Tensor, " n"]
    # How many chunks each sequence has.
    counts: Lengths
    # Of the sequences that are not empty: their number, first and last chunk.
    sequence_of_first: Int[Tensor, " a"]
    first_of_sequence: Int[Tensor, " a"]
    last_of_sequence: Int[Tensor, " a"]
    # Whether the tokens fill all slots in their own order.
    full: bool
    # The first token of each chunk, and where its sequence ends.
    starts: Int[Tensor, " c"]
    ends: Int[Tensor, " c"]

    @property
    def size(self) -> int:
        return self.token_of_slot.shape[1]

    @classmethod
    def of(cls, lengths: Lengths, size: int) -> "ChunkLayout":
        """The chunks of these lengths, from memory if they were the last ones."""
        if torch.compiler.is_compiling():
            return cls._build(lengths, size)
        key = (lengths.each, lengths.offsets.device, size)
        layout = _LAST.pop(key, None)
        if layout is None:
            # What is remembered may be used by training later.
            with torch.inference_mode(False):
                layout = cls._build(Lengths.of(lengths.each, lengths.offsets.device), size)
        _LAST[key] = layout
        if len(_LAST) > REMEMBERED:
            _LAST.pop(next(iter(_LAST)), None)
        return layout

    @classmethod
    def _build(cls, lengths: Lengths, size: int) -> "ChunkLayout":
        device = lengths.offsets.device
        counts = Lengths.of([-(-length // size) for length in lengths.each], device)
        total, (chunks, ends) = lengths.total, (counts.positions, counts.offsets[1:].long())
        sequence = counts.sequence_of_token
        inside = chunks.unsqueeze(1) * size + torch.arange(size, device=device)
        length = lengths.offsets.diff().long()[sequence].unsqueeze(1)
        starts = lengths.offsets[:-1].long()[sequence].unsqueeze(1)
        token_of_slot = torch.where(inside < length, starts + inside, total)
        present = [index for index, count in enumerate(counts.each) if count]
        sequences = torch.tensor(present, dtype=torch.long, device=device)
        return cls(
            token_of_slot=token_of_slot,
            slot_of_token=counts.offsets[:-1].long()[lengths.sequence_of_token] * size
            + lengths.positions,
            counts=counts,
            sequence_of_first=sequences,
            first_of_sequence=counts.offsets[:-1].long()[sequences],
            last_of_sequence=ends[sequences] - 1,
            full=counts.total * size == total,
            starts=token_of_slot[:, 0].contiguous(),
            ends=lengths.offsets[1:].long()[sequence],
        )

    def cut(self, x: Float[Tensor, "n *rest"]) -> Float[Tensor, "c s *rest"]:
        """The values of every slot."""
        if self.full:
            return x.unflatten(0, tuple(self.token_of_slot.shape))
        # Copied to where they go: the gradient of reading many empty slots from one row is slow.
        slots = x.new_zeros(self.token_of_slot.numel(), *x.shape[1:])
        return slots.index_copy(0, self.slot_of_token, x).unflatten(0, self.token_of_slot.shape)

    def join(self, x: Float[Tensor, "c s *rest"]) -> Float[Tensor, "n *rest"]:
        """The values of every token; the reverse of `cut`."""
        whole = x.flatten(0, 1)
        return whole if self.full else whole.index_select(0, self.slot_of_token)

    def shifted(
        self, after: Float[Tensor, "c *rest"], at_start: Float[Tensor, "a *rest"]
    ) -> Float[Tensor, "c *rest"]:
        """What is there before each chunk, given what is there after each and before the first."""
        earlier = torch.cat([after[:1], after[:-1]])
        return earlier.index_copy(0, self.first_of_sequence, at_start)


# The last layouts, the newest at the end.
_LAST: dict[tuple[object, ...], ChunkLayout] = {}
