"""Longformer (arXiv 2004.05150): a window, and global tokens with projections of their own."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ArgumentError, InputError, short_repr
from manyheads.mixers import mixer
from manyheads.mixers.head_weights import Vectors, Weights, watch_pattern
from manyheads.mixers.sparse import key_lists
from manyheads.parts.masks import Window
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Tap, WatchContext

# Queries that share a list of keys, unless the window is wider.
SMALLEST_BLOCK = 32
# Queries, keys and values.
Parts = tuple[Float[Tensor, "_ h d"], Float[Tensor, "n h d"], Float[Tensor, "n h d"]]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Longformer(mixer.HeadSettings):
    """Every token sees `window` tokens on each side and the global tokens of its text.

    The tokens at `global_positions` see the whole text, with queries, keys and values of their own.
    Negative positions count from the end, and those beyond the end of a text are left out. With
    "given" they are named for every batch by `global_tokens`.
    """

    causal = False

    window: PositiveInt
    global_positions: tuple[int, ...] | Literal["given"] = (0,)
    bias: bool = True
    dropout: DropoutRate = 0.0


class LongformerLayer(mixer.Mixer):
    """Attention to a window and to global tokens."""

    has_pattern = True

    def __init__(self, config: Longformer) -> None:
        super().__init__(config)
        self.window = Window(config.window, config.window)
        width, bias = config.width, config.bias
        self.project = nn.Linear(width, 3 * width, bias=bias)
        self.project_global_query = nn.Linear(width, width, bias=bias)
        self.project_global = nn.Linear(width, 2 * width, bias=bias)
        self.output = nn.Linear(width, width, bias=bias)
        # The positions that `global_tokens` names for each text.
        self.batch_positions: tuple[tuple[int, ...], ...] | None = None

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        mixer.refuse_cache(cache)
        heads = mixer.split_heads(self.project(x.values), self.config.heads, 3)
        qkv = mixer.observe_heads(context, x, *heads)
        tokens = GlobalRows.of(self._positions(x.lengths), x.lengths)
        dropout = self.config.dropout if self.training else 0.0
        mixed = self._local(qkv, tokens, x.lengths, dropout)
        # The queries of the global tokens, and the keys and values that these read.
        wide = qkv[0][:0], *qkv[1:]
        if tokens.counts.total:
            key, value = mixer.split_heads(self.project_global(x.values), self.config.heads, 2)
            query = self.project_global_query(x.values[tokens.rows])
            wide = mixer.by_head(query, self.config.heads), key, value
            both = (tokens.counts, x.lengths)
            read = key_lists.attend_masked(*wide, both, dropout=dropout)
            mixed = mixed.index_copy(0, tokens.rows, read)
        if context is not None and context.wants(Tap.PATTERN):
            mixed = self._watched(context, qkv, wide, tokens, x.lengths, mixed)
        return self.write(mixed, x, context)

    def _positions(self, lengths: Lengths) -> tuple[tuple[int, ...], ...]:
        """The global positions of every text."""
        if self.batch_positions is not None:
            if len(self.batch_positions) != len(lengths):
                raise InputError(
                    f"global tokens are given for {len(self.batch_positions)} texts, and the "
                    f"batch has {len(lengths)}",
                    "give one list of positions per text",
                )
            return self.batch_positions
        if self.config.global_positions == "given":
            raise InputError(
                "the global tokens of this model depend on the text, and none are given",
                "name them: with global_tokens(model, [[0, 1, 2], ...]): model(batch)",
            )
        return (self.config.global_positions,) * len(lengths)

    def _local(self, qkv: Parts, tokens: "GlobalRows", lengths: Lengths, dropout: float) -> Vectors:
        """What all tokens read from their window and from the global tokens."""
        query, key, value = qkv
        if not tokens.counts.total:
            both = (lengths, lengths)
            return key_lists.attend_masked(query, key, value, both, self.window, dropout)
        # No list of keys need be longer than the texts.
        window, scale = min(self.config.window, lengths.longest), self.config.size**-0.5
        blocks = key_lists.QueryBlocks.of(
            lengths, min(max(window, SMALLEST_BLOCK), lengths.longest)
        )
        around = torch.arange(-window, blocks.size + window, device=query.device)
        near = blocks.start.unsqueeze(1) + around
        far, present = tokens.listed(blocks)
        listed = torch.cat([blocks.rows(near), blocks.rows(far)], dim=1)
        inside = (near >= 0) & (near < blocks.length()) & ~tokens.is_global[blocks.rows(near)]
        within = blocks.position < blocks.length()

        def added(part: slice) -> Float[Tensor, "c 1 t s"]:
            distance = near[part].unsqueeze(1) - blocks.position[part].unsqueeze(2)
            local = (distance.abs() <= window) & inside[part].unsqueeze(1)
            everywhere = present[part].unsqueeze(1).expand(-1, blocks.size, -1)
            return key_lists.hidden_where(
                torch.cat([local, everywhere], dim=2).unsqueeze(1), within[part]
            )

        return key_lists.attend_listed(
            query, key, value, blocks, listed.unsqueeze(1), added, scale=scale, dropout=dropout
        )

    def _watched(
        self,
        context: WatchContext,
        parts: Parts,
        wide: Parts,
        tokens: "GlobalRows",
        lengths: Lengths,
        mixed: Vectors,
    ) -> Vectors:
        """The outputs after a watcher has seen the pattern; global tokens have their own values."""

        def rows(sequence: int, queries: range, heads: slice) -> Weights:
            start = lengths.starts[sequence]
            scores = key_lists.products(parts[0], parts[1], lengths, sequence, queries, heads)
            at = torch.arange(lengths.each[sequence], device=mixed.device)
            apart = at[queries.start : queries.stop].unsqueeze(1) - at
            everywhere = tokens.is_global[start : start + lengths.each[sequence]]
            weights = key_lists.softmax_where(
                scores, (apart.abs() <= self.config.window) | everywhere
            )
            query = parts[0].index_copy(0, tokens.rows, wide[0])
            scores = key_lists.products(query, wide[1], lengths, sequence, queries, heads)
            return torch.where(
                everywhere[queries.start : queries.stop, None], scores.softmax(-1), weights
            )

        weights = partial(key_lists.ListedWeights, lengths, self.config.heads, rows, causal=False)
        both = torch.cat([parts[2], wide[2]], dim=-1)
        local, by_global = watch_pattern(context, weights, both, mixed.repeat(1, 1, 2)).chunk(2, -1)
        return torch.where(tokens.is_global[:, None, None], by_global, local)


@dataclass(frozen=True, slots=True, eq=False)
class GlobalRows:
    """The global tokens of a batch, text by text."""

    rows: Int[Tensor, " m"]
    position: Int[Tensor, " m"]
    is_global: Bool[Tensor, " n"]
    counts: Lengths

    @classmethod
    def of(cls, positions: Sequence[Sequence[int]], lengths: Lengths) -> "GlobalRows":
        device = lengths.offsets.device
        places = [
            sorted({place + length * (place < 0) for place in listed if -length <= place < length})
            for listed, length in zip(positions, lengths.each, strict=True)
        ]
        counts = Lengths.of([len(listed) for listed in places], device)
        position = torch.tensor([place for listed in places for place in listed], dtype=torch.long)
        position = position.to(device)
        rows = position + lengths.offsets[:-1].long()[counts.sequence_of_token]
        is_global = torch.zeros(lengths.total, dtype=torch.bool, device=device)
        return cls(rows, position, is_global.index_fill(0, rows, True), counts)

    def listed(
        self, blocks: key_lists.QueryBlocks
    ) -> tuple[Int[Tensor, "c g"], Bool[Tensor, "c g"]]:
        """The global positions of each block's text, and which of these are present."""
        places = torch.arange(self.counts.longest, device=self.rows.device)
        present = places < self.counts.offsets.diff()[blocks.text].unsqueeze(1)
        index = self.counts.offsets[:-1].long()[blocks.text].unsqueeze(1) + places
        return self.position[index.clamp(max=len(self.position) - 1)], present


@contextmanager
def global_tokens(model: nn.Module, positions: Sequence[Sequence[int]]) -> Iterator[None]:
    """Name the global tokens of each text of a batch for the Longformer layers of a model.

    They replace those of the config: with global_tokens(model, [[0, 1, 2], [0]]): model(batch)
    """
    lists = isinstance(positions, Sequence) and all(
        isinstance(listed, Sequence) for listed in positions
    )
    if not lists or not all(isinstance(place, int) for listed in positions for place in listed):
        raise ArgumentError(
            f"positions must be one list of integers per text, got {short_repr(positions)}",
            "for example [[0, 1, 2], [0]]",
        )
    layers = [module for module in model.modules() if isinstance(module, LongformerLayer)]
    if not layers:
        raise InputError(
            "the model has no Longformer layer", "use a model whose layers have global tokens"
        )
    before = [layer.batch_positions for layer in layers]
    for layer in layers:
        layer.batch_positions = tuple(tuple(int(place) for place in listed) for listed in positions)
    try:
        yield
    finally:
        for layer, old in zip(layers, before, strict=True):
            layer.batch_positions = old
