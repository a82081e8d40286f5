"""Linear attention and retention: scores without a softmax, summed up in a state."""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.devices import without_autocast
from manyheads.errors import ConfigError, check_int
from manyheads.mixers.head_weights import DecayWeights, watch_pattern
from manyheads.mixers.mixer import Mixer, by_head, refuse_cache
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.mixers.recurrent.decay_recurrence import recur_in_chunks, recur_one_token
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Tap, WatchContext, observe

# Of the norm after retention.
EPS = 1e-6


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention:
    """Attention with f(q) f(k)^T in place of the softmax, f = elu + 1 (arXiv 2006.16236).

    `decay="heads"` multiplies the weight of a key by a constant of the head for every token that
    lies between, as in retention (arXiv 2307.08621): then nothing is divided by the sum of the
    weights, q and k stay as they are, and each head's output is normed.
    """

    width: int
    heads: int
    head_size: int | Literal["even"] = "even"
    causal: bool = True
    decay: Literal["none", "heads"] = "none"
    bias: bool = False

    def __post_init__(self) -> None:
        check_int("width", self.width, minimum=1)
        check_int("heads", self.heads, minimum=1)
        if self.head_size == "even" and self.width % self.heads:
            raise ConfigError(
                f"heads must divide width={self.width}, got {self.heads}", "or set head_size"
            )
        if self.decay == "heads" and not self.causal:
            raise ConfigError("a decay needs an order of tokens", "use causal=True")

    @property
    def size(self) -> int:
        """Channels of a head."""
        return self.width // self.heads if self.head_size == "even" else self.head_size


class LinearAttentionLayer(Mixer):
    """Linear attention with its projections."""

    carries_state = True
    has_pattern = True

    def __init__(self, config: LinearAttention) -> None:
        super().__init__()
        self.config = config
        inner = config.heads * config.size
        self.project = nn.Linear(config.width, 3 * inner, bias=config.bias)
        self.output = nn.Linear(inner, config.width, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        query, key, value = (
            by_head(part, self.config.heads) for part in self.project(x.values).chunk(3, dim=-1)
        )
        decay = self._log_decay(x)
        if decay is None:
            query, key = F.elu(query) + 1, F.elu(key) + 1
        else:
            query = query * self.config.size**-0.5
        query = observe(context, Tap.QUERY, query, x)
        key = observe(context, Tap.KEY, key, x)
        value = observe(context, Tap.VALUE, value, x)
        fresh = cache is None or cache.state is None
        if decay is None:
            # The sum of the weights is one more channel.
            wider = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
            mixed = self._mix(query, key, wider, decay, x.lengths, cache)
            mixed = mixed[..., :-1] / mixed[..., -1:].clamp(min=1e-6)
        else:
            mixed = self._mix(query, key, value, decay, x.lengths, cache)
        options = {"causal": self.config.causal, "normalized": decay is None}
        weights = partial(DecayWeights, query, key, decay, x.lengths, **options)
        mixed = watch_pattern(context if fresh else None, weights, value, mixed)
        if decay is not None:
            mixed = F.rms_norm(mixed.float(), (self.config.size,), eps=EPS).to(mixed.dtype)
        mixed = observe(context, Tap.HEAD_OUTPUT, mixed, x)
        return x.with_values(self.output(mixed.flatten(1)))

    def _mix(
        self,
        query: Float[Tensor, "n h d"],
        key: Float[Tensor, "n h d"],
        value: Float[Tensor, "n h e"],
        decay: Float[Tensor, "n h"] | None,
        lengths: Lengths,
        cache: StateSlot | None,
    ) -> Float[Tensor, "n h e"]:
        if not self.config.causal:
            refuse_cache(cache)
            return mix_both_ways(query, key, value, lengths)
        state = None if cache is None else cache.state
        if state is not None and lengths.longest == 1 and lengths.uniform:
            mixed, after = recur_one_token(query, key, value, decay, state[0])
        else:
            given = None if state is None else state[0]
            mixed, after = recur_in_chunks(query, key, value, decay, lengths, given)
        if cache is not None:
            cache.keep(after)
        return mixed

    def _log_decay(self, x: Ragged) -> Float[Tensor, "n h"] | None:
        """From 1 - 1/32 for the first head on, each next one forgets half as fast."""
        if self.config.decay == "none":
            return None
        heads = torch.arange(self.config.heads, device=x.values.device)
        return torch.log1p(-(2.0 ** (-5.0 - heads))).expand(x.values.shape[0], -1)


@without_autocast
def mix_both_ways(
    query: Float[Tensor, "n h d"],
    key: Float[Tensor, "n h d"],
    value: Float[Tensor, "n h e"],
    lengths: Lengths,
) -> Float[Tensor, "n h e"]:
    """Every token sees all tokens of its sequence."""
    if not lengths.total:
        return value
    chunks = ChunkLayout.of(lengths, min(lengths.longest, 256))
    q, k, v = (chunks.cut(x).float().transpose(1, 2) for x in (query, key, value))
    added = k.transpose(2, 3) @ v
    sequence = chunks.counts.sequence_of_token
    state = added.new_zeros(lengths.count, *added.shape[1:]).index_add(0, sequence, added)
    return chunks.join((q @ state[sequence]).transpose(1, 2)).to(value.dtype)
