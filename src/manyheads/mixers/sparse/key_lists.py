"""Attention of blocks of queries, each to its own list of keys, with memory linear in tokens."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.kernels.choose import attend
from manyheads.kernels.contract import Request, Want
from manyheads.kernels.reference import in_chunks
from manyheads.mixers.head_weights import HeadWeights, Vectors, Weights
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.parts.masks import Full, Mask
from manyheads.ragged import Lengths

# Numbers that are gathered at a time; what fits the caches of a CPU is too little for a GPU.
LARGEST_ON_CPU = 2**22
LARGEST_ON_GPU = 2**27

# Named, because torch.compile cannot trace a dataclass that is made inside the graph.
FULL, OUTPUT_ALONE = Full(), Want()


def attend_masked(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m h d"],
    v: Float[Tensor, "m h d"],
    lengths: tuple[Lengths, Lengths],
    mask: Mask = FULL,
    dropout: float = 0.0,
) -> Vectors:
    """Softmax attention by a kernel; `lengths` are those of queries and of keys."""
    queries, keys = lengths
    options: dict[str, Any] = {"mask": mask, "dropout": dropout, "want": OUTPUT_ALONE}
    request = Request(queries=queries, keys=keys, scale=q.shape[2] ** -0.5, **options)
    return attend(q, k, v, request).output


@dataclass(frozen=True, slots=True, eq=False)
class QueryBlocks:
    """The tokens of a batch in blocks of `size`; a block has tokens of one text only."""

    chunks: ChunkLayout
    lengths: Lengths
    size: int

    @classmethod
    def of(cls, lengths: Lengths, size: int) -> "QueryBlocks":
        return cls(ChunkLayout.of(lengths, size), lengths, size)

    @property
    def text(self) -> Int[Tensor, " c"]:
        """The text of each block."""
        return self.chunks.counts.sequence_of_token

    @property
    def start(self) -> Int[Tensor, " c"]:
        """The position of the first token of each block in its text."""
        return self.chunks.counts.positions * self.size

    @property
    def position(self) -> Int[Tensor, "c t"]:
        """The position of every query in its text, also beyond the end of the text."""
        return self.start.unsqueeze(1) + torch.arange(self.size, device=self.start.device)

    def length(self) -> Int[Tensor, "c 1"]:
        """The length of the text of each block."""
        return self.lengths.offsets.diff().long()[self.text].unsqueeze(1)

    def rows(self, position: Int[Tensor, "c s"]) -> Int[Tensor, "c s"]:
        """The rows of these positions of each block's text; those outside it give its first row."""
        first = self.lengths.offsets[:-1].long()[self.text].unsqueeze(1)
        inside = (position >= 0) & (position < self.length())
        return torch.where(inside, first + position, first)


# What is added to the scores of some blocks.
Added = Callable[[slice], Float[Tensor, "c #h t s"]]


def attend_listed(
    q: Float[Tensor, "n h d"],
    k: Float[Tensor, "m h d"],
    v: Float[Tensor, "m h e"],
    blocks: QueryBlocks,
    listed: Int[Tensor, "c #h s"],
    added: Added,
    *,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "n h e"]:
    """Each block of queries attends to the rows of `k` and `v` in its list, which may repeat.

    `added` gives what is added to the scores of some blocks, -inf where a key is not seen. Every
    query must see a key; empty slots may see any.
    """
    if not q.shape[0]:
        return v[:0]
    query = blocks.chunks.cut(q).transpose(1, 2)
    heads = torch.arange(q.shape[1], device=q.device)[:, None]

    def mix(part: slice) -> Float[Tensor, "c h t e"]:
        # Lists of all heads are gathered as whole rows.
        shared = listed.shape[1] == 1
        key, value = (
            x[listed[part, 0]].transpose(1, 2) if shared else x[listed[part], heads] for x in (k, v)
        )
        mask = added(part).to(q.dtype)
        return F.scaled_dot_product_attention(query[part], key, value, mask, dropout, scale=scale)

    count, per_block = listed.shape[0], listed.shape[2] * q.shape[1] * (q.shape[2] + blocks.size)
    step = blocks_at_once(per_block, q.device)
    grad = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    # Recomputed in the backward pass, so that the gathered keys are not stored.
    mixed = in_chunks(mix, count, step, recompute=grad and step < count)
    return blocks.chunks.join(torch.cat(mixed).transpose(1, 2))


def blocks_at_once(numbers_per_block: int, device: torch.device) -> int:
    """How many blocks are computed at a time, so that memory stays small."""
    largest = LARGEST_ON_CPU if device.type == "cpu" else LARGEST_ON_GPU
    return max(1, largest // max(numbers_per_block, 1))


def hidden_where(visible: Bool[Tensor, "c #h t s"], inside: Bool[Tensor, "c t"]) -> Tensor:
    """Zeros, and -inf where a key is not seen; queries outside the text see all of their list."""
    sees = visible | ~inside[:, None, :, None]
    return torch.zeros(sees.shape, device=sees.device).masked_fill(~sees, -torch.inf)


# The weights of some queries of a text on all its tokens, given the text, the queries and heads.
Rows = Callable[[int, range, slice], Weights]


class ListedWeights(HeadWeights):
    """The weights of heads with a softmax over few keys; all others have none."""

    def __init__(self, lengths: Lengths, heads: int, compute: Rows, *, causal: bool) -> None:
        super().__init__(lengths, heads, causal=causal)
        self.compute = compute

    def weigh(self, sequence: int, rows: range, heads: slice) -> Weights:
        weights = self.compute(sequence, rows, heads)
        return weights[..., : rows.stop] if self.causal else weights


def products(
    query: Vectors, key: Vectors, lengths: Lengths, sequence: int, rows: range, heads: slice
) -> Weights:
    """Scaled products of some queries of a text with all its keys, in float32."""
    start = lengths.starts[sequence]
    queries = query[start + rows.start : start + rows.stop, heads].float()
    own = key[start : start + lengths.each[sequence], heads].float()
    return torch.einsum("thd,shd->hts", queries, own) * query.shape[2] ** -0.5


def softmax_where(scores: Weights, visible: Bool[Tensor, "*h_or_none t s"]) -> Weights:
    """Zeros where nothing is seen."""
    hidden = scores.masked_fill(~visible, -torch.inf)
    return hidden.masked_fill(~visible.any(-1, keepdim=True), 0.0).softmax(-1).where(visible, 0.0)
