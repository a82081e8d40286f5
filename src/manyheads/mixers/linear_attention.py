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
from manyheads.errors import ConfigError
from manyheads.mixers.head_weights import DecayWeights
from manyheads.mixers.mixer import HeadMixer, Heads, Mixed, SizedHeadSettings, state_of
from manyheads.mixers.recurrent.chunk_layout import ChunkLayout
from manyheads.mixers.recurrent.decay_recurrence import Keys, Values, run_decay_recurrence
from manyheads.ragged import Lengths, Ragged

# Of the norm after retention.
EPS = 1e-6


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class LinearAttention(SizedHeadSettings):
    """Attention with f(q) f(k)^T in place of the softmax, f = elu + 1 (arXiv 2006.16236).

    `decay="heads"` multiplies the weight of a key by a constant of the head for every token that
    lies between, as in retention (arXiv 2307.08621): then nothing is divided by the sum of the
    weights, q and k stay as they are, and each head's output is normed.
    """

    causal: bool = True
    decay: Literal["none", "heads"] = "none"
    bias: bool = False

    def __post_init__(self) -> None:
        SizedHeadSettings.__post_init__(self)
        if self.decay == "heads" and not self.causal:
            raise ConfigError("a decay needs an order of tokens", "use causal=True")


class LinearAttentionLayer(HeadMixer):
    """Linear attention with its projections."""

    carries_state = True

    def __init__(self, config: LinearAttention) -> None:
        super().__init__(config)
        inner = config.heads * config.size
        self.project = nn.Linear(config.width, 3 * inner, bias=config.bias)
        self.output = nn.Linear(inner, config.width, bias=config.bias)

    def heads_of(self, x: Ragged) -> tuple[Float[Tensor, "n h d"], ...]:
        query, key, value = HeadMixer.heads_of(self, x)
        if self.config.decay == "none":
            return F.elu(query) + 1, F.elu(key) + 1, value
        return query * self.config.size**-0.5, key, value

    def mix(self, qkv: Heads, x: Ragged, cache: StateSlot | None) -> Mixed:
        query, key, value = qkv
        decay = self._log_decay(x)
        options = {"causal": self.config.causal, "normalized": decay is None}
        weights = partial(DecayWeights, query, key, decay, x.lengths, **options)
        if decay is None:
            # The sum of the weights is one more channel.
            value = torch.cat([value, torch.ones_like(value[..., :1])], dim=-1)
        if self.config.causal:
            (h0,) = state_of(cache, 1)
            mixed, ht = run_decay_recurrence(query, key, value, decay, x.lengths, h0)
            if cache is not None:
                cache.keep(ht)
        else:
            mixed = mix_both_ways(query, key, value, x.lengths)
        if decay is None:
            mixed = mixed[..., :-1] / mixed[..., -1:].clamp(min=1e-6)
        return mixed, weights

    def finish(self, mixed: Float[Tensor, "n h d"], x: Ragged) -> Float[Tensor, "n h d"]:  # noqa: ARG002
        if self.config.decay == "none":
            return mixed
        return F.rms_norm(mixed.float(), (self.config.size,), eps=EPS).to(mixed.dtype)

    def _log_decay(self, x: Ragged) -> Float[Tensor, "n h"] | None:
        """From 1 - 1/32 for the first head on, each next one forgets half as fast."""
        if self.config.decay == "none":
            return None
        heads = torch.arange(self.config.heads, device=x.values.device)
        return torch.log1p(-(2.0 ** (-5.0 - heads))).expand(x.values.shape[0], -1)


@without_autocast
def mix_both_ways(query: Keys, key: Keys, value: Values, lengths: Lengths) -> Values:
    """Every token sees all tokens of its sequence."""
    if not lengths.total:
        return value
    chunks = ChunkLayout.of(lengths, min(lengths.longest, 256))
    q, k, v = (chunks.cut(x).float().transpose(1, 2) for x in (query, key, value))
    added = k.transpose(2, 3) @ v
    sequence = chunks.counts.sequence_of_token
    state = added.new_zeros(lengths.count, *added.shape[1:]).index_add(0, sequence, added)
    return chunks.join((q @ state[sequence]).transpose(1, 2)).to(value.dtype)
