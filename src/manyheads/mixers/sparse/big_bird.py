"""BigBird (arXiv 2007.14062): blocks that see their neighbors, both ends and a few at random."""

from dataclasses import dataclass
from functools import cache as memoised
from functools import partial
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.mixers.head_weights import Vectors, Weights
from manyheads.mixers.mixer import HeadMixer, Heads, HeadSettings, Mixed
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.mixers.sparse import key_lists
from manyheads.ragged import Lengths, Ragged

# Texts of these lengths, filled up to whole blocks, draw as in the paper's code: of the first 1,024
# tokens only.
PAPER_LENGTHS = (1024, 3072, 4096)
PAPER_REACH = 1024


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class BigBird(HeadSettings):
    """Blocks of `block` tokens; each sees itself, its two neighbors, and the first and last block.

    The first and the last block see the whole text, and so does every token of a text of up to
    5 + 2 `random_blocks` blocks. Each head of each block also sees `random_blocks` others, drawn by
    `seed` and the length of the text. With `draw="training"`, as in `transformers`, they are drawn
    in training only: otherwise the first block takes their places and counts that much more.
    Texts of 1,024, 3,072 and 4,096 tokens draw for a text of `max_length` tokens, as published.
    """

    causal = False

    block: PositiveInt = 64
    random_blocks: NonNegativeInt = 3
    seed: NonNegativeInt = 0
    draw: Literal["always", "training"] = "always"
    max_length: PositiveInt = 4096
    bias: Literal["none", "inputs", "output", "all"] = "all"
    dropout: DropoutRate = 0.0

    @property
    def full_up_to(self) -> int:
        """The length up to which all tokens of a text see each other."""
        return (5 + 2 * self.random_blocks) * self.block


class BigBirdLayer(HeadMixer):
    """Block-sparse attention."""

    def __init__(self, config: BigBird) -> None:
        super().__init__(config)
        width = config.width
        self.project = nn.Linear(width, 3 * width, bias=config.bias in ("inputs", "all"))
        self.output = nn.Linear(width, width, bias=config.bias in ("output", "all"))

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:  # noqa: ARG002
        rows = partial(self._rows, *qkv[:2], x.lengths)
        weights = partial(key_lists.ListedWeights, x.lengths, self.config.heads, rows, causal=False)
        return self._mix(*qkv, x.lengths), weights

    def _mix(self, query: Vectors, key: Vectors, value: Vectors, lengths: Lengths) -> Vectors:
        config, device = self.config, query.device
        # All blocks of a long text but its first and last, which are never cut short.
        middle = Lengths.of([middle_tokens(config, length) for length in lengths.each], device)
        dropout = config.dropout if self.training else 0.0
        if not middle.total:
            return key_lists.attend_masked(query, key, value, (lengths, lengths), dropout=dropout)
        first = lengths.offsets[:-1].long()[middle.sequence_of_token]
        rows = first + config.block + middle.positions
        pairs = zip(lengths.each, middle.each, strict=True)
        ends = Lengths.of([whole - inner for whole, inner in pairs], device)
        text, behind = ends.sequence_of_token, ends.positions >= config.block
        others = lengths.offsets[:-1].long()[text] + ends.positions
        others = others + behind * middle.offsets.diff()[text]
        full = key_lists.attend_masked(query[others], key, value, (ends, lengths), dropout=dropout)
        blocks = key_lists.QueryBlocks(ChunkLayout.of(middle, config.block), lengths, config.block)
        listed, added = self._lists(blocks)

        def added_to(part: slice) -> Float[Tensor, "c #h t s"]:
            return added[part].expand(-1, -1, config.block, -1)

        sparse = key_lists.attend_listed(
            query[rows],
            key,
            value,
            blocks,
            listed,
            added_to,
            scale=config.size**-0.5,
            dropout=dropout,
        )
        joined = torch.empty_like(value).index_copy(0, others, full)
        return joined.index_copy(0, rows, sparse)

    def _lists(
        self, blocks: key_lists.QueryBlocks
    ) -> tuple[Int[Tensor, "c #h s"], Float[Tensor, "c #h 1 s"]]:
        """The keys of every block of queries, and what is added to their scores."""
        config = self.config
        own = blocks.chunks.counts.positions + 1
        last = blocks.chunks.counts.offsets.diff().long()[blocks.text] + 1
        start = torch.zeros_like(own)
        # Where a neighbor is the first or the last block, it is listed as such.
        numbers = torch.stack([start, own, own - 1, own + 1, last], dim=1)
        once = torch.ones_like(numbers, dtype=torch.bool)
        once[:, 2], once[:, 3] = own > 1, own + 1 < last
        bias = torch.zeros(numbers.shape, device=own.device)
        numbers, once, bias = (table.unsqueeze(1) for table in (numbers, once, bias))
        if config.random_blocks and (self.training or config.draw == "always"):
            counts = [count + 2 for count in blocks.chunks.counts.each if count]
            drawn = torch.cat([draw_blocks(config, count).transpose(0, 1) for count in counts])
            drawn = drawn.to(own.device)
            more = (
                drawn,
                torch.ones_like(drawn, dtype=torch.bool),
                torch.zeros_like(drawn).float(),
            )
            numbers, once, bias = (
                torch.cat([table.expand(-1, config.heads, -1), columns], dim=2)
                for table, columns in zip((numbers, once, bias), more, strict=True)
            )
        else:
            bias[..., 0] = float(np.log1p(config.random_blocks))
        inside = torch.arange(config.block, device=own.device)
        position = (numbers.unsqueeze(3) * config.block + inside).flatten(2)
        shape = position.shape
        listed = blocks.rows(position.flatten(1)).view(shape)
        visible = once.repeat_interleave(config.block, 2)
        visible = visible & (position < blocks.length().unsqueeze(2))
        added = bias.repeat_interleave(config.block, 2).masked_fill(~visible, -torch.inf)
        return listed, added.unsqueeze(2)

    def _rows(
        self, query: Vectors, key: Vectors, texts: Lengths, text: int, rows: range, heads: slice
    ) -> Weights:
        """The weights of some queries of a text, from how often they see each block."""
        config, length = self.config, texts.each[text]
        scores = key_lists.products(query, key, texts, text, rows, heads)
        middle = middle_tokens(config, length)
        if not middle:
            return scores.softmax(-1)
        alone = Lengths.of([middle], query.device)
        blocks = key_lists.QueryBlocks(
            ChunkLayout.of(alone, config.block), Lengths.of([length], query.device), config.block
        )
        listed, added = self._lists(blocks)
        shape = (listed.shape[0], config.heads, -1)
        # exp turns -inf into nothing and the bias of a block into how often it counts.
        often = torch.zeros(*shape[:2], length, device=query.device).scatter_add(
            2, listed.expand(*shape), added.squeeze(2).exp().expand(*shape)
        )
        ends = torch.ones_like(often[:1])
        often = torch.cat([ends, often, ends])[:, heads].transpose(0, 1)
        block = torch.arange(rows.start, rows.stop, device=query.device) // config.block
        counts = often[:, block]
        return key_lists.softmax_where(scores + counts.log(), counts > 0)


def middle_tokens(config: BigBird, length: int) -> int:
    """The tokens of a text that see only some blocks."""
    blocks = -(-length // config.block)
    return (blocks - 2) * config.block if length > config.full_up_to else 0


def draw_blocks(config: BigBird, blocks: int) -> Int[Tensor, "h blocks_less_2 r"]:
    """The random blocks of all blocks but the first and last, the same as in `transformers`."""
    return _draw(config, blocks)


# torch.compiler.assume_constant_result without loading the compiler.
draw_blocks._dynamo_marked_constant = True  # type: ignore[attr-defined]


@memoised
def _draw(config: BigBird, blocks: int) -> Int[Tensor, "h blocks_less_2 r"]:
    generator = np.random.RandomState(config.seed)
    if blocks * config.block in PAPER_LENGTHS:
        whole = max(config.max_length // config.block, blocks)
        heads = [_draw_published(config, whole, generator) for _ in range(config.heads)]
        return torch.from_numpy(np.stack(heads)[:, : blocks - 2]).long()
    reach = 2 * config.random_blocks + 5
    # They also draw for the last block, which does not use it.
    rows = [
        [_draw_row(row, reach, config.random_blocks, generator) for _ in range(config.heads)]
        for row in range(1, blocks)
    ]
    return torch.from_numpy(np.array(rows[:-1])).transpose(0, 1).long()


def _draw_row(
    row: int, reach: int, count: int, generator: np.random.RandomState
) -> Int[np.ndarray, " r"]:
    """Among the first blocks, without those that are seen anyway."""
    seen_anyway = {row - 1, row, row + 1, 0, reach - 1}
    if row == 1:
        seen_anyway.add(reach - 2)
    if row == reach - 2:
        seen_anyway.add(1)
    drawn = generator.permutation(np.arange(reach, dtype=np.int32))
    return drawn[~np.isin(drawn, list(seen_anyway))][:count]


def _draw_published(
    config: BigBird, blocks: int, generator: np.random.RandomState
) -> Int[np.ndarray, "blocks_less_2 r"]:
    """For one head; the last blocks may draw what they see anyway."""
    middle = np.arange(1, blocks - 1, dtype=np.int32)
    near = 2 * config.block < PAPER_REACH
    last = (PAPER_REACH // config.block if near else blocks) - 1
    rows = []
    for row in range(1, blocks - 1):
        before, after = max(row - 2, 0), row + 1
        if row <= 2:
            candidates = middle[row + 1 : last]
        elif row >= blocks - 3 or before > last:
            candidates = middle[:last]
        elif after == last:
            candidates = middle[:before]
        else:
            candidates = np.concatenate((middle[:before], middle[after:last]))
        rows.append(generator.permutation(candidates)[: config.random_blocks])
    return np.stack(rows)
