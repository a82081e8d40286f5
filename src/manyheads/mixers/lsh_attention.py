"""LSH attention of the Reformer (arXiv 2001.04451): each query sees keys that hash as it does."""

from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from manyheads.annotations import DropoutRate, NonNegativeInt, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.kernels.reference import in_chunks
from manyheads.mixers import growing_cache, mixer
from manyheads.mixers.sparse.key_lists import ListedWeights
from manyheads.ragged import Lengths, Ragged

# A token attends to itself only where it sees no other.
ITSELF = -1e5
EPS = 1e-6
# Numbers of scores at a time.
LARGEST = 2**24
# Layouts of texts, and rotations of layers.
REMEMBERED = 16

# A vector per token and head, of the new tokens or of all; by head, with one for empty slots.
Vectors = Float[Tensor, "n h d"]
AllVectors = Float[Tensor, "m h d"]
ByHead = Float[Tensor, "h m d"]
# Lists of queries, and for each list the tokens that its queries may see.
Asking = Int[Tensor, "h x t"]
Listed = Int[Tensor, "h x s"]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LshAttention(mixer.SizedHeadSettings):
    """Attention within buckets of similar tokens, whose queries are their keys.

    Random rotations put every token into one of `buckets`, or of the product of several numbers of
    them. Sorted by bucket, the tokens are cut into chunks of `chunk`, and each sees its own chunk,
    `before` and `after` it. This is done in several `rounds`. With buckets="auto" their number
    grows with the text. With seed="random" training draws other rotations at every step.

    The tokens of a text and round fill up a multiple of `round_to` slots.
    """

    causal: bool = True
    chunk: PositiveInt = 64
    before: NonNegativeInt = 1
    after: NonNegativeInt = 0
    rounds: PositiveInt = 1
    buckets: tuple[int, ...] | Literal["auto"] = "auto"
    seed: int | Literal["random"] = 0
    dropout: DropoutRate = 0.0
    round_to: PositiveInt | Literal["chunk"] = "chunk"

    def __post_init__(self) -> None:
        mixer.SizedHeadSettings.__post_init__(self)
        if self.buckets != "auto" and (
            not self.buckets or any(count < 2 or count % 2 for count in self.buckets)
        ):
            raise ConfigError(f"buckets must be even and at least 2, got {self.buckets}")
        if self.slots < self.chunk or self.slots % self.chunk:
            raise ConfigError(
                f"round_to must be a multiple of chunk={self.chunk}, got {self.round_to}"
            )

    @property
    def slots(self) -> int:
        """Of whose number every text and round fills a multiple."""
        return self.chunk if self.round_to == "chunk" else self.round_to

    def buckets_for(self, length: int) -> tuple[int, ...]:
        """The numbers of buckets for a text of this length; none if it has a single chunk."""
        if length <= self.chunk:
            return ()
        if self.buckets != "auto":
            return self.buckets
        # About two buckets per chunk.
        chunks = -(-length // self.slots) * self.slots // self.chunk
        power = (2 * chunks).bit_length() - 1
        if 2**power <= 2 * self.chunk:
            return (2**power,)
        return 2 ** (power // 2), 2 ** (power - power // 2)


class LshAttentionLayer(mixer.HeadMixer):
    """LSH attention with its projections.

    A cache keeps the queries and values of all tokens. A token that comes later can move the
    others to other chunks; what they saw when they came is not computed anew.
    """

    def __init__(self, config: LshAttention) -> None:
        super().__init__(config)
        inner = config.heads * config.size
        self.project = nn.Linear(config.width, 2 * inner, bias=False)
        self.output = nn.Linear(inner, config.width, bias=False)

    def mix(self, qkv: mixer.Heads, x: Ragged, cache: StateSlot | None) -> mixer.Mixed:
        query, _, value = qkv
        config, before = self.config, () if cache is None else cache.state or ()
        (queries, values), lengths = growing_cache.continue_texts((query, value), x.lengths, before)
        if cache is not None:
            cache.keep(*growing_cache.padded_texts((queries, values), lengths))
        if not x.lengths.total:
            return value, None
        seed = config.seed
        if seed == "random":
            seed = int(torch.randint(2**31, ())) if self.training else 0
        chunks = SortedChunks.of(queries, lengths, config, seed)
        rows = partial(_pattern_rows, query, chunks, lengths, config)
        weights = partial(ListedWeights, lengths, config.heads, rows, causal=config.causal)
        return self._mix(queries, values, chunks, lengths, x.lengths), weights

    def _mix(
        self,
        query: AllVectors,
        value: AllVectors,
        chunks: "SortedChunks",
        lengths: Lengths,
        new: Lengths,
    ) -> Vectors:
        """The outputs of the last, new tokens of every text."""
        config = self.config
        ends = lengths.offsets[1:].long()[new.sequence_of_token]
        counts = new.offsets.diff().long()[new.sequence_of_token]
        tokens = ends - counts + new.positions
        whole = new.total == lengths.total
        listed = chunks.listed() if whole else chunks.listed_for(tokens)
        out, lse = (part.flatten(1, 2) for part in self._attend(query, value, listed, lengths))
        if whole:
            slots = chunks.slot_of.flatten(1)
            lse = lse.gather(1, slots)
            out = out.gather(1, slots.unsqueeze(-1).expand(-1, -1, out.shape[2]))
        out, lse = (part.unflatten(1, (config.rounds, -1)) for part in (out, lse))
        weights = _round_weights(lse, chunks.short[new.sequence_of_token])
        mixed = (out * weights.unsqueeze(-1)).sum(1)
        return mixed.transpose(0, 1).to(value.dtype)

    def _attend(
        self, query: AllVectors, value: AllVectors, listed: tuple[Asking, Listed], lengths: Lengths
    ) -> tuple[Float[Tensor, "h x t d"], Float[Tensor, "h x t"]]:
        """Lists of queries, each with its list of keys: their outputs and log-sum-exps."""
        # An empty slot is token number m.
        parts = (query.float(), _keys(query), value.float())
        queries, keys, values = (_with_empty(part).transpose(0, 1) for part in parts)
        places = F.pad(lengths.positions, (0, 1), value=-1)
        dropout = self.config.dropout if self.training else 0.0

        def attend(lists: slice) -> tuple[Float[Tensor, "h x t d"], Float[Tensor, "h x t"]]:
            asking, visible = (tokens[:, lists] for tokens in listed)
            scores = _scores(queries, keys, asking, visible, places, causal=self.config.causal)
            lse = scores.logsumexp(-1)
            weights = F.dropout((scores - lse.unsqueeze(-1)).exp(), dropout)
            return weights @ _take(values, visible), lse

        count = listed[0].shape[1]
        step = max(1, LARGEST // (listed[0][:, 0].numel() * listed[1].shape[2]))
        # Recomputed in the backward pass, so that the scores are not stored.
        grad = torch.is_grad_enabled() and step < count
        outputs = in_chunks(attend, count, step, recompute=grad)
        mixed, lse = (torch.cat(pieces, 1) for pieces in zip(*outputs, strict=True))
        return mixed, lse


class _SlotLayout(NamedTuple):
    """What is known of the slots of sorted tokens from the lengths of the texts alone."""

    # Which of the sorted tokens of all texts and rounds is in a slot, their number in empty ones.
    rank_of_slot: Int[Tensor, " m"]
    slot_of_rank: Int[Tensor, " n"]
    neighbors: Int[Tensor, "c k"]
    short: Bool[Tensor, " b"]


@lru_cache(maxsize=REMEMBERED)
def _slot_layout(sizes: tuple[int, ...], device: torch.device, config: LshAttention) -> _SlotLayout:
    """The layers of a stack have the same texts."""
    # What is remembered may be used by training later.
    with torch.inference_mode(False):
        rounds, padded = config.rounds, [-(-size // config.slots) * config.slots for size in sizes]
        slots = Lengths.of([size for size in padded for _ in range(rounds)])
        lengths = torch.tensor(sizes, dtype=torch.long).repeat_interleave(rounds)
        rank = (lengths.cumsum(0) - lengths)[slots.sequence_of_token] + slots.positions
        filled = slots.positions < lengths[slots.sequence_of_token]
        counts = Lengths.of([rounds * size // config.chunk for size in padded])
        # A single chunk has no neighbors but an empty one behind all others.
        alone = torch.tensor([size <= config.chunk for size in padded])
        alone = alone[counts.sequence_of_token].unsqueeze(1)
        ring = torch.tensor(counts.each)[counts.sequence_of_token].unsqueeze(1)
        first = counts.offsets[:-1].long()[counts.sequence_of_token].unsqueeze(1)
        shift = torch.arange(-config.before, config.after + 1)
        neighbors = first + (counts.positions.unsqueeze(1) + shift) % ring
        layout = _SlotLayout(
            rank_of_slot=torch.where(filled, rank, rounds * sum(sizes)),
            slot_of_rank=filled.nonzero().squeeze(1),
            neighbors=neighbors.masked_fill(alone & (shift != 0), counts.total),
            short=torch.tensor([size <= config.chunk for size in sizes]),
        )
        return _SlotLayout(*(part.to(device) for part in layout))


@dataclass(frozen=True, slots=True, eq=False)
class SortedChunks:
    """The tokens of every text sorted by bucket in each round, and cut into chunks."""

    # The token in every slot of the chunks, n where it is empty; all are in the last chunk.
    tokens: Int[Tensor, "h m s"]
    # The chunks that each chunk sees; those of a text are a ring, round after round.
    neighbors: Int[Tensor, "c k"]
    # The slot of every token in every round.
    slot_of: Int[Tensor, "h r n"]
    # The texts of one chunk, for which one round is enough.
    short: Bool[Tensor, " b"]

    @classmethod
    @torch.no_grad()
    @_disable_dynamo  # torch.compiler.disable without loading the compiler
    def of(
        cls, query: Vectors, lengths: Lengths, config: LshAttention, seed: int
    ) -> "SortedChunks":
        rounds, total = config.rounds, lengths.total
        layout = _slot_layout(lengths.each, query.device, config)
        buckets = hash_tokens(query, lengths, config, seed)
        number = torch.arange(rounds, device=query.device)[:, None]
        owner = lengths.sequence_of_token * rounds + number
        keys = (owner * (buckets.max() + 1) + buckets).flatten(1)
        order = keys.sort(dim=1, stable=True).indices
        tokens = F.pad(order % total, (0, 1), value=total)[:, layout.rank_of_slot]
        tokens = F.pad(tokens, (0, config.chunk), value=total)
        slot_of = torch.empty_like(order).scatter_(1, order, layout.slot_of_rank.expand_as(order))
        return cls(
            tokens=tokens.unflatten(1, (-1, config.chunk)),
            neighbors=layout.neighbors,
            slot_of=slot_of.unflatten(1, (rounds, total)),
            short=layout.short,
        )

    def listed(self) -> tuple[Int[Tensor, "h c t"], Int[Tensor, "h c s"]]:
        """The queries of every chunk, and the keys that they may see."""
        return self.tokens[:, :-1], self.tokens[:, self.neighbors].flatten(2)

    def listed_for(
        self, queries: Int[Tensor, " x"]
    ) -> tuple[Int[Tensor, "h y 1"], Int[Tensor, "h y s"]]:
        """The same for some queries alone, in every round."""
        chunk = self.slot_of[:, :, queries].flatten(1) // self.tokens.shape[2]
        heads = torch.arange(chunk.shape[0], device=chunk.device)[:, None, None]
        keys = self.tokens[heads, self.neighbors[chunk]].flatten(2)
        return queries.repeat(self.slot_of.shape[1]).expand(*chunk.shape).unsqueeze(2), keys


def hash_tokens(
    query: Vectors, lengths: Lengths, config: LshAttention, seed: int
) -> Int[Tensor, "h r n"]:
    """The bucket of every token in every round."""
    wide = query.detach().float()
    result = torch.zeros(
        config.heads, config.rounds, len(query), dtype=torch.long, device=query.device
    )
    kinds = [config.buckets_for(length) for length in lengths.each]
    for buckets in dict.fromkeys(kinds):
        if not buckets:
            continue
        tokens: Any = slice(None)
        if len(set(kinds)) > 1:
            chosen = torch.tensor([kind == buckets for kind in kinds], device=query.device)
            tokens = chosen[lengths.sequence_of_token].nonzero().squeeze(1)
        rotations = _rotations(config, buckets, seed, query.device)
        rotated = torch.einsum("nhd,hdrk->hrnk", wide[tokens], rotations)
        bucket, product = torch.zeros_like(result[..., tokens]), 1
        for part, count in zip(rotated.split([b // 2 for b in buckets], -1), buckets, strict=True):
            bucket += product * torch.cat([part, -part], dim=-1).argmax(-1)
            product *= count
        result[..., tokens] = bucket
    return result


@lru_cache(maxsize=REMEMBERED)
def _rotations(
    config: LshAttention, buckets: tuple[int, ...], seed: int, device: torch.device
) -> Float[Tensor, "h d r k"]:
    """Drawn on the host, so that they are the same on every device."""
    with torch.inference_mode(False):
        generator = torch.Generator().manual_seed(seed)
        shape = (config.heads, config.size, config.rounds, sum(buckets) // 2)
        return torch.randn(shape, generator=generator).to(device)


def _keys(query: Vectors) -> Vectors:
    """The queries, made equally long, and scaled as scores are."""
    wide = query.float()
    unit = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt()
    return unit * query.shape[-1] ** -0.5


def _scores(
    query: ByHead,
    key: ByHead,
    asking: Asking,
    listed: Listed,
    places: Int[Tensor, " m"],
    *,
    causal: bool,
) -> Float[Tensor, "h x t s"]:
    scores = _take(query, asking) @ _take(key, listed).transpose(2, 3)
    position = places[listed].unsqueeze(-2)
    visible = position >= 0
    if causal:
        visible = visible & (position <= places[asking].unsqueeze(-1))
    scores = scores.masked_fill(~visible, -torch.inf)
    return scores.masked_fill(asking.unsqueeze(-1) == listed.unsqueeze(-2), ITSELF)


def _take(x: ByHead, tokens: Listed) -> Float[Tensor, "h x s d"]:
    """The vectors of listed tokens; the last of every head stands for empty slots.

    An embedding: its gradient is fast also where many lists name a token, and leaves out `empty`.
    """
    heads, empty = torch.arange(x.shape[0], device=x.device)[:, None, None], x.shape[1] - 1
    rows = torch.where(tokens == empty, empty, heads * x.shape[1] + tokens)
    return F.embedding(rows, x.flatten(0, 1), padding_idx=empty)


def _round_weights(
    lse: Float[Tensor, "h r n"], short: Bool[Tensor, "*tokens"]
) -> Float[Tensor, "h r n"]:
    """The weight of every round; a text of one chunk, a `short` one, needs one round."""
    further = torch.arange(lse.shape[1], device=lse.device).unsqueeze(1) > 0
    lse = lse.masked_fill(further & short, -torch.inf)
    # Where a token sees only itself, this rounds as the Reformer of `transformers` does.
    return (lse - lse.logsumexp(1, keepdim=True)).exp()


def _pattern_rows(
    query: Vectors,
    chunks: SortedChunks,
    lengths: Lengths,
    config: LshAttention,
    sequence: int,
    rows: range,
    heads: slice,
) -> Float[Tensor, "h t s"]:
    """The weights of some queries of a text on all its tokens, those of all rounds together."""
    start, length = lengths.starts[sequence], lengths.each[sequence]
    if not rows:
        return query.new_zeros(len(range(config.heads)[heads]), 0, length, dtype=torch.float32)
    tokens = torch.arange(start + rows.start, start + rows.stop, device=query.device)
    asking, listed = (lists[heads] for lists in chunks.listed_for(tokens))
    own, keys = (
        _with_empty(part)[:, heads].transpose(0, 1) for part in (query.float(), _keys(query))
    )
    places = F.pad(lengths.positions, (0, 1), value=-1)
    scores = _scores(own, keys, asking, listed, places, causal=config.causal).squeeze(2)
    lse = scores.logsumexp(-1)
    short = torch.tensor(length <= config.chunk, device=query.device)
    by_round = _round_weights(lse.unflatten(1, (config.rounds, -1)), short).flatten(1)
    weights = (scores - lse.unsqueeze(-1)).exp() * by_round.unsqueeze(-1)
    # An empty slot is behind the last token.
    columns = (listed - start).clamp(max=length)
    whole = weights.new_zeros(len(weights), len(rows), length + 1)
    for part, at in zip(weights.split(len(rows), 1), columns.split(len(rows), 1), strict=True):
        whole = whole.scatter_add(2, at, part)
    return whole[..., :length]


def _with_empty(x: Float[Tensor, "n *rest"]) -> Float[Tensor, "m *rest"]:
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


@torch.no_grad()
def missed_mass(query: Vectors, config: LshAttention, seed: int = 0) -> Float[Tensor, "h n"]:
    """The share of the softmax weights of one text on keys that a query sees in no round.

    The softmax is that of the same queries and keys over all tokens but itself.
    """
    total = query.shape[0]
    lengths = Lengths.of([total], query.device)
    asking, listed = SortedChunks.of(query, lengths, config, seed).listed()
    visible = torch.zeros(config.heads, total + 1, total + 1, dtype=torch.bool, device=query.device)
    heads = torch.arange(config.heads, device=query.device)[:, None, None, None]
    visible[heads, asking.unsqueeze(-1), listed.unsqueeze(-2)] = True
    scores = torch.einsum("nhd,mhd->hnm", query.float(), _keys(query))
    if config.causal:
        later = torch.ones_like(scores[0], dtype=torch.bool).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    scores.diagonal(dim1=1, dim2=2).fill_(ITSELF)
    return (scores.softmax(-1) * ~visible[:, :total, :total]).sum(-1)
