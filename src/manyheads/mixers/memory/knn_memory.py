"""Memorizing Transformer (arXiv 2203.08913): a window, and the best keys of a long memory."""

from dataclasses import dataclass
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.kernels.reference import in_chunks
from manyheads.mixers.head_weights import Vectors, Weights
from manyheads.mixers.memory.recent_keys import RecentKeys
from manyheads.mixers.mixer import HeadMixer, Heads, HeadSettings, Mixed
from manyheads.mixers.sparse import key_lists
from manyheads.ragged import Lengths, Ragged

# Queries that share a list of keys, unless the window is wider.
SMALLEST_BLOCK = 64


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class KnnMemory(HeadSettings):
    """Attention to the last `window` tokens, and to the `top_k` best of `memory` tokens before.

    The memory of a text holds its own tokens only and no gradient flows into it. A learned gate for
    each head weighs what is read from it against what is read from the window.
    """

    causal = True

    window: PositiveInt
    memory: PositiveInt
    top_k: PositiveInt = 32
    bias: bool = False


class KnnMemoryLayer(HeadMixer):
    """Attention to a window and to the nearest keys of a memory."""

    def __init__(self, config: KnnMemory) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.width, 3 * config.width, bias=config.bias)
        self.memory_gate = nn.Parameter(torch.zeros(config.heads))
        self.output = nn.Linear(config.width, config.width, bias=config.bias)

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:
        query, key, value = qkv
        config, longest = self.config, max(x.lengths.longest, 1)
        recent = RecentKeys.join(key, value, x.lengths, cache, config.window + config.memory - 1)
        blocks = key_lists.QueryBlocks.of(
            x.lengths, min(max(config.window, SMALLEST_BLOCK), longest)
        )
        local = self._local(query, recent, blocks)
        remembered, has_memory = self._remember(query, recent, blocks)
        gate = torch.sigmoid(self.memory_gate.float()).to(local.dtype).unsqueeze(1)
        # Where nothing is remembered yet, the window is all there is.
        gate = gate * has_memory[:, None, None]
        recent.keep(cache)
        rows = partial(self._rows, query, key, x.lengths)
        weights = partial(key_lists.ListedWeights, x.lengths, config.heads, rows, causal=True)
        return gate * remembered + (1 - gate) * local, weights

    def _local(self, query: Vectors, recent: RecentKeys, blocks: key_lists.QueryBlocks) -> Vectors:
        window = self.config.window
        if not recent.limit:
            window = min(window, max(blocks.lengths.longest, 1))
        around = torch.arange(1 - window, blocks.size, device=query.device)
        near = blocks.start.unsqueeze(1) + around
        rows, exists = recent.rows(blocks.text, near)
        within = blocks.position < blocks.length()

        def added(part: slice) -> Float[Tensor, "c 1 t s"]:
            apart = blocks.position[part].unsqueeze(2) - near[part].unsqueeze(1)
            visible = (apart >= 0) & (apart < window) & exists[part].unsqueeze(1)
            return key_lists.hidden_where(visible.unsqueeze(1), within[part])

        scale, tensors = self.config.size**-0.5, (query, recent.k, recent.v)
        return key_lists.attend_listed(*tensors, blocks, rows.unsqueeze(1), added, scale=scale)

    def _rows(
        self, query: Vectors, key: Vectors, texts: Lengths, text: int, rows: range, heads: slice
    ) -> Weights:
        """The weights of some queries of a text, of the window and the memory together."""
        config = self.config
        scores = key_lists.products(query, key, texts, text, rows, heads)
        at = torch.arange(texts.each[text], device=query.device)
        apart = at[rows.start : rows.stop].unsqueeze(1) - at
        local = key_lists.softmax_where(scores, (apart >= 0) & (apart < config.window))
        old = (apart >= config.window) & (apart < config.window + config.memory)
        hidden = scores.masked_fill(~old, -torch.inf)
        best = hidden.topk(min(config.top_k, len(at))).indices
        chosen = torch.zeros_like(hidden, dtype=torch.bool).scatter(2, best, True) & old
        gate = torch.sigmoid(self.memory_gate[heads].float())[:, None, None]
        gate = gate * old.any(-1, keepdim=True)
        return gate * key_lists.softmax_where(hidden, chosen) + (1 - gate) * local

    def _remember(
        self, query: Vectors, recent: RecentKeys, blocks: key_lists.QueryBlocks
    ) -> tuple[Vectors, Float[Tensor, " n"]]:
        """What every token reads from its memory, and whether it has one."""
        config, key, value = self.config, recent.k.detach(), recent.v.detach()
        reach = config.window + config.memory - 1
        # Without a cache no list of keys need be longer than the texts.
        behind = reach if recent.limit else min(reach, blocks.lengths.longest)
        around = torch.arange(
            -behind, max(blocks.size - config.window, -behind), device=query.device
        )
        if not query.shape[0] or not around.shape[0]:
            return torch.zeros_like(query), query.new_zeros(query.shape[0])
        far = blocks.start.unsqueeze(1) + around
        rows, exists = recent.rows(blocks.text, far)
        cut = blocks.chunks.cut(query).transpose(1, 2)
        top_k = min(config.top_k, around.shape[0])
        heads = torch.arange(config.heads, device=query.device)[:, None, None]

        def read(part: slice) -> tuple[Float[Tensor, "c h t d"], Float[Tensor, "c t"]]:
            apart = blocks.position[part].unsqueeze(2) - far[part].unsqueeze(1)
            visible = (apart >= config.window) & (apart <= reach) & exists[part].unsqueeze(1)
            scores = (cut[part] @ key[rows[part]].permute(0, 2, 3, 1)).float() * config.size**-0.5
            best, index = scores.masked_fill(~visible.unsqueeze(1), -torch.inf).topk(top_k)
            has_memory = visible.any(-1)
            weights = best.masked_fill(~has_memory[:, None, :, None], 0.0).softmax(-1)
            chosen = rows[part][:, None, None].expand(*index.shape[:3], -1).gather(3, index)
            read = (weights.to(value.dtype).unsqueeze(3) @ value[chosen, heads]).squeeze(3)
            return read, has_memory.to(value.dtype)

        count = cut.shape[0]
        sizes = around.shape[0] + top_k * config.size
        step = key_lists.blocks_at_once(config.heads * blocks.size * sizes, query.device)
        grad = torch.is_grad_enabled() and query.requires_grad
        # Recomputed in the backward pass, so that the scores of the memory are not stored.
        parts = in_chunks(read, count, step, recompute=grad and step < count)
        mixed, has_memory = (torch.cat(part) for part in zip(*parts, strict=True))
        return blocks.chunks.join(mixed.transpose(1, 2)), blocks.chunks.join(has_memory)
