"""Transformer-XL (arXiv 1901.02860): attention to the own segment and the one kept before it."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers import mixer
from manyheads.mixers.head_weights import Vectors, Weights, watch_pattern
from manyheads.mixers.memory.recent_keys import RecentKeys
from manyheads.mixers.sparse import key_lists
from manyheads.parts.positions import Sinusoidal
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext

# Named, because torch.compile cannot trace a dataclass that is made inside the graph.
SINUSOID = Sinusoidal()


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class SegmentRecurrence(mixer.HeadSettings):
    """Texts in segments of `segment` tokens, each with a memory of the `memory` tokens before it.

    A token sees those before it in its segment, and the memory, into which no gradient flows.
    Scores depend on the distance of tokens: (q + u) k + (q + v) r, with r from a sinusoid of the
    distance and learned vectors u and v for each head.
    """

    causal = True

    segment: PositiveInt
    memory: NonNegativeInt
    dropout: DropoutRate = 0.0

    def __post_init__(self) -> None:
        mixer.HeadSettings.__post_init__(self)
        if self.width % 2:
            raise ConfigError(
                f"width must be even for the sinusoids of distances, got {self.width}"
            )


class SegmentRecurrenceLayer(mixer.Mixer):
    """Attention with relative positions to a segment and its memory."""

    has_pattern = True

    def __init__(self, config: SegmentRecurrence) -> None:
        super().__init__(config)
        width = config.width
        self.project_query = nn.Linear(width, width, bias=False)
        self.project = nn.Linear(width, 2 * width, bias=False)
        self.project_distance = nn.Linear(width, width, bias=False)
        self.content_bias = nn.Parameter(torch.zeros(config.heads, config.size))
        self.distance_bias = nn.Parameter(torch.zeros(config.heads, config.size))
        self.output = nn.Linear(width, width, bias=False)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        heads = self.config.heads
        query = mixer.by_head(self.project_query(x.values), heads)
        key, value = mixer.split_heads(self.project(x.values), heads, 2)
        query, key, value = mixer.observe_heads(context, x, query, key, value)
        fresh = cache is None or cache.state is None
        mixed = self._mix((query, key, value), x, cache, watched=context is not None)
        rows = partial(self._rows, query, key, x.lengths)
        weights = partial(key_lists.ListedWeights, x.lengths, heads, rows, causal=True)
        mixed = watch_pattern(context if fresh else None, weights, value, mixed)
        return self.write(mixed, x, context)

    def _mix(
        self, qkv: mixer.Heads, x: Ragged, cache: StateSlot | None, *, watched: bool
    ) -> Vectors:
        query, key, value = qkv
        config, scale = self.config, self.config.size**-0.5
        # A call may begin in the middle of a segment, up to this far from the end of its memory.
        reach = config.memory + config.segment - 1
        recent = RecentKeys.join(key, value, x.lengths, cache, reach)
        # Whole segments, or less where no text is as long.
        blocks = key_lists.QueryBlocks.of(x.lengths, min(config.segment, max(x.lengths.longest, 1)))
        behind = min(config.memory, x.lengths.longest) if cache is None else reach
        around = torch.arange(-behind, blocks.size, device=query.device)
        near = blocks.start.unsqueeze(1) + around
        rows, exists = recent.rows(blocks.text, near)
        keys, values = recent.k, recent.v
        if cache is None and torch.is_grad_enabled() and config.memory:
            # The memory of a segment is read from copies that let no gradient into the tokens; the
            # weights get theirs, unless a watcher may have replaced keys and values.
            still_key, still_value = key.detach(), value.detach()
            if not watched:
                still = self.project(x.values.detach())
                still_key, still_value = mixer.split_heads(still, config.heads, 2)
            keys, values = torch.cat([keys, still_key]), torch.cat([values, still_value])
            rows = torch.where(near < blocks.start.unsqueeze(1), rows + len(key), rows)
        before = recent.before[blocks.text].unsqueeze(1)
        position = blocks.position
        first = (before + position) // config.segment * config.segment - config.memory - before
        within = position < blocks.length()
        distances = self._distances(query)
        # From a query to the keys of its list; the same in every block.
        apart = torch.arange(blocks.size, device=query.device).unsqueeze(1) - around
        apart = apart.clamp(0, distances.shape[1] - 1)
        cut = blocks.chunks.cut(query).transpose(1, 2)

        def added(part: slice) -> Float[Tensor, "c h t s"]:
            key_at, query_at = near[part].unsqueeze(1), position[part].unsqueeze(2)
            visible = (key_at <= query_at) & (key_at >= first[part].unsqueeze(2))
            visible = (visible & exists[part].unsqueeze(1)).unsqueeze(1)
            towards = cut[part] + self.distance_bias.unsqueeze(1)
            scores = (towards @ distances.mT) * scale
            index = apart.expand(*scores.shape[:2], -1, -1)
            return scores.gather(3, index) + key_lists.hidden_where(visible, within[part])

        options = {"scale": scale, "dropout": config.dropout if self.training else 0.0}
        mixed = key_lists.attend_listed(
            query + self.content_bias, keys, values, blocks, rows.unsqueeze(1), added, **options
        )
        recent.keep(cache)
        return mixed

    def _rows(
        self, query: Vectors, key: Vectors, texts: Lengths, text: int, rows: range, heads: slice
    ) -> Weights:
        """The weights of some queries of a text."""
        config, start = self.config, texts.starts[text]
        scores = key_lists.products(query + self.content_bias, key, texts, text, rows, heads)
        queries = query[start + rows.start : start + rows.stop, heads] + self.distance_bias[heads]
        distances = self._distances(query)[heads].float()
        by_distance = (queries.float().transpose(0, 1) @ distances.mT) * config.size**-0.5
        at = torch.arange(texts.each[text], device=query.device)
        own = at[rows.start : rows.stop].unsqueeze(1)
        apart = own - at
        index = apart.clamp(0, distances.shape[1] - 1).expand(len(scores), -1, -1)
        first = own // config.segment * config.segment - config.memory
        return key_lists.softmax_where(
            scores + by_distance.gather(2, index), (apart >= 0) & (at >= first)
        )

    def _distances(self, like: Vectors) -> Float[Tensor, "h distances d"]:
        """A vector for every distance from 0 up to the largest that is seen."""
        count = self.config.memory + self.config.segment
        sinusoid = SINUSOID.vectors(torch.arange(count, device=like.device), self.config.width)
        projected = self.project_distance(sinusoid.to(like.dtype))
        return mixer.by_head(projected, self.config.heads).transpose(0, 1)
