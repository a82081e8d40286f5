"""Routing attention (arXiv 2003.05997): a token sees the last tokens of its own cluster."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.annotations import PositiveInt, Probability
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import InputError
from manyheads.mixers.mixer import HeadMixer, Heads, HeadSettings, Mixed
from manyheads.mixers.sparse import key_lists
from manyheads.ragged import Lengths, Ragged

# The cluster of a slot that holds no token.
EMPTY = -1


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingAttention(HeadSettings):
    """Each head assigns tokens to the nearest of `clusters` centroids, learned by k-means.

    A token sees the last `window` tokens of its cluster, itself included. Queries are also the
    keys, normed. In training the centroids follow the means of their tokens: a step keeps `decay`
    of each. The paper gives every cluster equally many tokens instead, which later ones decide.
    """

    causal = True

    clusters: PositiveInt
    window: PositiveInt
    decay: Probability = 0.999
    bias: bool = False


class RoutingAttentionLayer(HeadMixer):
    """Attention within clusters. A cache keeps the last tokens of every cluster."""

    def __init__(self, config: RoutingAttention) -> None:
        super().__init__(config)
        self.project = nn.Linear(config.width, 2 * config.width, bias=config.bias)
        self.output = nn.Linear(config.width, config.width, bias=config.bias)
        self.centroids: Tensor
        start = torch.randn(config.heads, config.clusters, config.size)
        self.register_buffer("centroids", F.normalize(start, dim=-1))

    def heads_of(self, x: Ragged) -> tuple[Float[Tensor, "n h d"], ...]:
        query, value = HeadMixer.heads_of(self, x)
        return F.layer_norm(query, (self.config.size,)), value

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:
        query, _, value = qkv
        config = self.config
        tokens = ClusteredTokens(query, value, self.assign(query), x.lengths)
        if self.training:
            self._follow(tokens)
        earlier = self._earlier(cache, tokens)
        if earlier is not None and x.lengths.longest == 1 and x.lengths.uniform:
            mixed = self._one_token(tokens, earlier)
        else:
            joined = tokens.behind(earlier)
            mixed = self._mix(joined)
            mixed = mixed if earlier is None else mixed[joined.new_rows(x.lengths)]
        if cache is not None:
            last = tokens.behind(earlier).last(config.clusters, config.window - 1)
            parts = (last.key, last.value, last.cluster)
            cache.keep(*(part.unflatten(0, (x.lengths.count, -1)) for part in parts))
        rows = partial(self._rows, tokens)
        return mixed, partial(key_lists.ListedWeights, x.lengths, config.heads, rows, causal=True)

    @torch.no_grad()
    def assign(self, query: Float[Tensor, "n h d"]) -> Int[Tensor, "n h"]:
        """The cluster of every token in every head."""
        return torch.einsum("nhd,hcd->nhc", query.float(), self.centroids.float()).argmax(-1)

    @torch.no_grad()
    def _follow(self, tokens: "ClusteredTokens") -> None:
        """Move the centroids towards the means of their tokens."""
        chosen = F.one_hot(tokens.cluster, self.config.clusters).float()
        sums = torch.einsum("nhc,nhd->hcd", chosen, F.normalize(tokens.key.float(), dim=-1))
        counts = chosen.sum(0).unsqueeze(-1)
        decay = self.config.decay
        moved = decay * self.centroids + (1 - decay) * sums / counts.clamp(min=1)
        moved = torch.where(counts > 0, F.normalize(moved, dim=-1), self.centroids)
        self.centroids.copy_(moved)

    def _earlier(
        self, cache: StateSlot | None, tokens: "ClusteredTokens"
    ) -> "ClusteredTokens | None":
        if cache is None or cache.state is None:
            return None
        key, value, cluster = cache.state
        slots = self.config.clusters * (self.config.window - 1)
        if key.shape[1:] != (slots, *tokens.key.shape[1:]):
            raise InputError(
                f"the cache keeps keys of shape {tuple(key.shape[1:])}, and this layer needs "
                f"{(slots, *tokens.key.shape[1:])}",
                "use a cache of this model: model.new_cache()",
            )
        lengths = Lengths.of([slots] * len(key), key.device)
        return ClusteredTokens(
            key.flatten(0, 1), value.flatten(0, 1), cluster.flatten(0, 1), lengths
        )

    def _mix(self, tokens: "ClusteredTokens") -> Float[Tensor, "n h d"]:
        """Tokens in the order of their clusters, and of these the last few before each."""
        window, lengths, order = (
            self.config.window,
            tokens.lengths,
            tokens.order(self.config.clusters),
        )
        key, value, cluster = (
            part.gather(0, _like(order, part))
            for part in (tokens.key, tokens.value, tokens.cluster)
        )
        blocks = key_lists.QueryBlocks.of(lengths, min(window, max(lengths.longest, 1)))
        near = blocks.start.unsqueeze(1) + torch.arange(1 - window, blocks.size, device=key.device)
        exists = (near >= 0) & (near < blocks.length())
        rows, within = blocks.rows(near), blocks.position < blocks.length()
        own = blocks.rows(blocks.position)

        def added(part: slice) -> Float[Tensor, "c h t s"]:
            apart = blocks.position[part].unsqueeze(2) - near[part].unsqueeze(1)
            visible = (apart >= 0) & (apart < window) & exists[part].unsqueeze(1)
            key_cluster, query_cluster = (
                cluster[index[part]].transpose(1, 2) for index in (rows, own)
            )
            same = query_cluster.unsqueeze(3) == key_cluster.unsqueeze(2)
            return key_lists.hidden_where(visible.unsqueeze(1) & same, within[part])

        scale = self.config.size**-0.5
        mixed = key_lists.attend_listed(
            key, key, value, blocks, rows.unsqueeze(1), added, scale=scale
        )
        return torch.empty_like(mixed).scatter(0, _like(order, mixed), mixed)

    def _one_token(
        self, tokens: "ClusteredTokens", earlier: "ClusteredTokens"
    ) -> Float[Tensor, "b h d"]:
        """One more token of every text, which sees those of its cluster that were kept."""
        joined = tokens.behind(earlier)
        count = tokens.lengths.count
        key, value, cluster = (
            part.unflatten(0, (count, -1)).transpose(1, 2)
            for part in (joined.key, joined.value, joined.cluster)
        )
        scores = (key.float() @ tokens.key.float().unsqueeze(-1)).squeeze(-1)
        hidden = cluster != tokens.cluster.unsqueeze(-1)
        weights = (scores * self.config.size**-0.5).masked_fill(hidden, -torch.inf).softmax(-1)
        return (weights.unsqueeze(2) @ value.float()).squeeze(2).to(value.dtype)

    def _rows(
        self, tokens: "ClusteredTokens", sequence: int, rows: range, heads: slice
    ) -> Float[Tensor, "h t s"]:
        """The weights of some queries of a text on its tokens."""
        scores = key_lists.products(tokens.key, tokens.key, tokens.lengths, sequence, rows, heads)
        start, stop = tokens.lengths.starts[sequence], tokens.lengths.each[sequence]
        cluster = tokens.cluster[start : start + stop, heads].T
        same = cluster[:, rows.start : rows.stop, None] == cluster[:, None]
        same = same & torch.ones_like(same[0]).tril(rows.start)
        # How many tokens of the cluster lie between, itself included.
        until = same.flip(-1).cumsum(-1).flip(-1)
        return key_lists.softmax_where(scores, same & (until <= self.config.window))


@dataclass(frozen=True, slots=True, eq=False)
class ClusteredTokens:
    """Keys and values of tokens, text after text in the order of time, and their clusters."""

    key: Float[Tensor, "n h d"]
    value: Float[Tensor, "n h d"]
    cluster: Int[Tensor, "n h"]
    lengths: Lengths

    def behind(self, earlier: "ClusteredTokens | None") -> "ClusteredTokens":
        """With the tokens of each text that were kept in front."""
        if earlier is None:
            return self
        slots, device = earlier.lengths.longest, self.key.device
        lengths = Lengths.of([slots + length for length in self.lengths.each], device)
        text, place = lengths.sequence_of_token, lengths.positions
        new = len(earlier.key) + self.lengths.offsets[:-1].long()[text] + place - slots
        rows = torch.where(place < slots, text * slots + place, new)
        pairs = (
            (earlier.key, self.key),
            (earlier.value, self.value),
            (earlier.cluster, self.cluster),
        )
        key, value, cluster = (torch.cat(pair)[rows] for pair in pairs)
        return ClusteredTokens(key, value, cluster, lengths)

    def new_rows(self, new: Lengths) -> Int[Tensor, " n"]:
        """The rows of the last tokens of each text."""
        ends, counts = self.lengths.offsets[1:].long(), new.offsets.diff().long()
        return (ends - counts)[new.sequence_of_token] + new.positions

    def order(self, clusters: int) -> Int[Tensor, "n h"]:
        """The tokens of each text sorted by cluster, those of a cluster by time."""
        return self._groups(clusters).argsort(dim=0, stable=True)

    def _groups(self, clusters: int) -> Int[Tensor, "n h"]:
        text = self.lengths.sequence_of_token.unsqueeze(1)
        return text * (clusters + 1) + self.cluster + 1

    def last(self, clusters: int, window: int) -> "ClusteredTokens":
        """The last tokens of every cluster of each text, in as many slots."""
        count, heads = self.lengths.count, self.cluster.shape[1]
        groups, order = self._groups(clusters), self.order(clusters)
        sizes = groups.new_zeros(count * (clusters + 1), heads)
        ends = sizes.scatter_add(0, groups, torch.ones_like(groups)).cumsum(0)
        groups, cluster = groups.gather(0, order), self.cluster.gather(0, order)
        place = torch.arange(len(groups), device=groups.device).unsqueeze(1)
        later = ends.gather(0, groups) - 1 - place
        text = groups // (clusters + 1)
        slot = (text * clusters + cluster) * window + window - 1 - later
        # What is not kept goes to one slot more.
        total = count * clusters * window
        slot = torch.where((cluster >= 0) & (later < window), slot, total)
        parts = []
        for part, empty in ((self.key, 0.0), (self.value, 0.0), (self.cluster, EMPTY)):
            room = part.new_full((total + 1, *part.shape[1:]), empty)
            moved = part.gather(0, _like(order, part))
            parts.append(room.scatter(0, _like(slot, part), moved)[:total])
        slots = Lengths.of([clusters * window] * count, groups.device)
        return ClusteredTokens(parts[0], parts[1], parts[2], slots)


def _like(index: Int[Tensor, "n h"], part: Tensor) -> Int[Tensor, "n h *d"]:
    return index if part.ndim == 2 else index.unsqueeze(-1).expand(-1, -1, part.shape[2])
