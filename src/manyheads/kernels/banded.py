"""Windows on the CPU in O(n * window): blocks of queries with the strip of keys they can see."""

from dataclasses import dataclass
from itertools import accumulate

import torch
import torch.nn.functional as F
from einops import rearrange
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.kernels.contract import AttentionResult, Keys, Queries, Request, TensorFacts
from manyheads.kernels.fused import cannot as fused_cannot
from manyheads.kernels.fused import flash_cpu, result_of
from manyheads.ragged import Lengths

# Queries that share a strip of keys; the fastest of 8 to 256 on two cores for all windows.
BLOCK = 32


def cannot(request: Request, facts: TensorFacts) -> str | None:
    reach = request.mask.reach
    if facts.device != "cpu":
        return f"banded runs on the CPU, not on {facts.device}"
    if not reach.before + reach.after < float("inf"):
        return "the mask is not limited on both sides"
    if not (request.keys.tight and request.queries.each == request.keys.each):
        return "queries and keys are not the same tokens"
    if facts.size != facts.value_size:
        return f"the values have size {facts.value_size}, and the keys {facts.size}"
    return fused_cannot(request, facts)


def attend(q: Queries, k: Keys, v: Keys, request: Request) -> AttentionResult:
    """All sequences at once, with gaps between them, so that no strip reaches into another."""
    lengths = request.queries
    if q.shape[0] == 0:
        return AttentionResult(q, q.new_zeros(0, q.shape[1]).float() if request.want.lse else None)
    reach = request.mask.reach
    before, after = (min(int(side), lengths.longest) for side in (reach.before, reach.after))
    layout = _Layout.of(lengths, before, after)
    queries = rearrange(layout.spread(q), "(b t) h d -> b h t d", t=BLOCK)
    keys, values = layout.strips(layout.spread(k)), layout.strips(layout.spread(v))
    seen = layout.visible(request)
    added = torch.zeros(seen.shape).masked_fill(~seen, -torch.inf)
    if request.bias is not None:
        added = added + layout.bias(request, q.shape[1])
    output, lse = flash_cpu(queries, keys, values, False, added, request.scale)
    lse = lse.masked_fill(~seen.any(-1), -torch.inf)
    output = rearrange(output, "b h t d -> (b t) h d")[layout.slots]
    lse = rearrange(lse, "b h t -> (b t) h")[layout.slots]
    return result_of(output, lse, request)


@dataclass(frozen=True, slots=True, eq=False)
class _Layout:
    """Sequences divided into blocks, with empty blocks between them as wide as the window."""

    before: int
    after: int
    slots: Int[Tensor, " n"]
    sequence: Int[Tensor, " b"]
    start: Int[Tensor, " b"]

    @classmethod
    def of(cls, lengths: Lengths, before: int, after: int) -> "_Layout":
        gap = -(-max(before, after) // BLOCK)
        blocks = [-(-length // BLOCK) + gap for length in lengths.each]
        blocks[-1] -= gap
        first = torch.tensor([0, *accumulate(blocks)])
        sequence = torch.arange(len(blocks)).repeat_interleave(
            first.diff(), output_size=sum(blocks)
        )
        start = (torch.arange(sum(blocks)) - first[sequence]) * BLOCK
        slots = first[lengths.sequence_of_token] * BLOCK + lengths.positions
        return cls(before, after, slots, sequence, start)

    def spread(self, x: Float[Tensor, "n h d"]) -> Float[Tensor, "m h d"]:
        """The tokens in their slots, with zeros in the gaps."""
        spread = x.new_zeros(len(self.start) * BLOCK, *x.shape[1:])
        return spread.index_copy(0, self.slots, x)

    def strips(self, x: Float[Tensor, "m g d"]) -> Float[Tensor, "b g s d"]:
        """Overlapping views of the keys that each block can see; only the ends are copied."""
        padded = F.pad(x, (0, 0, 0, 0, self.before, self.after))
        width = BLOCK + self.before + self.after
        return rearrange(padded.unfold(0, width, BLOCK), "b g d s -> b g s d")

    def positions(self) -> tuple[Int[Tensor, "b t 1"], Int[Tensor, "b 1 s"]]:
        """The position of every query and key of a block in its sequence, also beyond its end."""
        start = self.start[:, None, None]
        query = start + torch.arange(BLOCK)[:, None]
        return query, start + torch.arange(-self.before, BLOCK + self.after)

    def visible(self, request: Request) -> Bool[Tensor, "b 1 t s"]:
        query, key = self.positions()
        length = torch.tensor(request.queries.each)[self.sequence][:, None, None]
        inside = (key >= 0) & (key < length)
        if request.mask.fills_reach:
            # A band is the same everywhere, so one block represents all.
            query, key, length = query[:1], key[:1], length[:1]
        return (request.mask.allows(query, key, length) & inside).unsqueeze(1)

    def bias(self, request: Request, heads: int) -> Float[Tensor, "b h t s"]:
        assert request.bias is not None
        query, key = (positions.unsqueeze(1) for positions in self.positions())
        first = torch.tensor(request.queries.starts)[self.sequence][:, None, None, None]
        # Slots behind the last token have no row; their values are masked.
        row = (first + query).clamp(max=request.queries.total - 1)
        return request.bias.score(torch.arange(heads)[:, None, None], row, query, key)
