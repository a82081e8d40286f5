"""Gated delta net (arXiv 2412.06464), as in Qwen3-Next: a state that forgets and overwrites."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError, check_int
from manyheads.mixers.head_weights import DeltaWeights, watch_pattern
from manyheads.mixers.mixer import Mixer, by_head
from manyheads.mixers.recurrent.delta_recurrence import run_delta_rule
from manyheads.mixers.recurrent.head_norms import gated_norm, unit
from manyheads.mixers.recurrent.short_convolution import ShortConvolution
from manyheads.mixers.recurrent.time_step import draw_dt_bias
from manyheads.ragged import Ragged
from manyheads.taps import Tap, WatchContext, observe


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta:
    """The config of a gated delta net: `heads` of values that share `key_heads` of keys.

    With `negative_eigenvalues` what is under a key may be turned round, not only replaced: beta,
    the rate of writing, goes up to 2 (arXiv 2411.12537).
    """

    width: int
    heads: int
    head_size: int
    key_heads: int
    key_size: int
    convolution: int = 4
    eps: float = 1e-6
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        for name in ("width", "heads", "head_size", "key_heads", "key_size", "convolution"):
            check_int(name, getattr(self, name), minimum=1)
        if self.heads % self.key_heads:
            raise ConfigError(f"key_heads must divide heads={self.heads}, got {self.key_heads}")

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return True

    def rows(self) -> dict[str, int]:
        """The rows of both input projections."""
        keys, values = self.key_heads * self.key_size, self.heads * self.head_size
        return {
            "query": keys,
            "key": keys,
            "value": values,
            "gate": values,
            "beta": self.heads,
            "dt": self.heads,
        }


class GatedDeltaLayer(Mixer):
    """A gated delta net with its projections, convolution and output gate."""

    carries_state = True
    has_pattern = True

    def __init__(self, config: GatedDelta) -> None:
        super().__init__()
        self.config = config
        rows = config.rows()
        narrow = rows["beta"] + rows["dt"]
        self.project = nn.Linear(config.width, sum(rows.values()) - narrow, bias=False)
        self.rates = nn.Linear(config.width, narrow, bias=False)
        channels = rows["query"] + rows["key"] + rows["value"]
        self.convolution = ShortConvolution(channels, config.convolution, bias=False)
        self.dt_bias = nn.Parameter(draw_dt_bias(config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(0.01, 16).log())
        self.norm_weight = nn.Parameter(torch.ones(config.head_size))
        self.output = nn.Linear(rows["value"], config.width, bias=False)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, state = self.config, None if cache is None else cache.state
        rows = config.rows()
        mixed, gate = self.project(x.values).tensor_split([-rows["gate"]], dim=-1)
        beta, dt = self.rates(x.values).chunk(2, dim=-1)
        before = None if state is None else state[1]
        mixed, recent = self.convolution(x.with_values(mixed), before)
        query, key, value = mixed.split([rows["query"], rows["key"], rows["value"]], dim=-1)
        query = unit(by_head(query, config.key_heads), config.key_size**-0.5)
        key = unit(by_head(key, config.key_heads))
        repeats = config.heads // config.key_heads
        if repeats > 1:
            query, key = (part.repeat_interleave(repeats, dim=1) for part in (query, key))
        query, key = observe(context, Tap.QUERY, query, x), observe(context, Tap.KEY, key, x)
        value = observe(context, Tap.VALUE, by_head(value, config.heads), x)
        decay = -self.A_log.float().exp() * F.softplus(dt.float() + self.dt_bias.float())
        beta = beta.sigmoid() * (2.0 if config.negative_eigenvalues else 1.0)
        h0 = None if state is None else state[0]
        heads, ht = run_delta_rule(query, key, value, beta, decay, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        weights = partial(DeltaWeights, query, key, beta, decay, x.lengths)
        heads = watch_pattern(context if state is None else None, weights, value, heads)
        gated = gated_norm(heads, by_head(gate, config.heads), self.norm_weight, config.eps)
        gated = observe(context, Tap.HEAD_OUTPUT, gated, x)
        return x.with_values(self.output(gated.flatten(1)))
