"""Gated delta net (arXiv 2412.06464), as in Qwen3-Next: a state that forgets and overwrites."""

from dataclasses import dataclass
from functools import partial
from typing import ClassVar, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.head_weights import DeltaWeights, watch_pattern
from manyheads.mixers.mixer import Mixer, MixerSettings, by_head, observe_heads, state_of
from manyheads.mixers.recurrent import head_norms, time_step
from manyheads.mixers.recurrent.delta_recurrence import Decay, run_delta_rule
from manyheads.mixers.recurrent.short_convolution import ShortConvolution
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class GatedDelta(MixerSettings):
    """The config of a gated delta net: `heads` of values that share `key_heads` of keys.

    With `negative_eigenvalues` what is under a key may be turned round, not only replaced: beta,
    the rate of writing, goes up to 2 (arXiv 2411.12537).
    """

    causal = True

    heads: PositiveInt
    head_size: PositiveInt
    key_heads: PositiveInt
    key_size: PositiveInt
    convolution: PositiveInt = 4
    eps: float = 1e-6
    negative_eigenvalues: bool = False

    def __post_init__(self) -> None:
        if self.heads % self.key_heads:
            raise ConfigError(f"key_heads must divide heads={self.heads}, got {self.key_heads}")

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


class DeltaMixer(Mixer):
    """A mixer on the delta rule; its cache has the state of the rule and that of a convolution."""

    carries_state = True
    has_pattern = True
    gate_activation: ClassVar[Literal["silu", "sigmoid"]] = "silu"

    norm_weight: nn.Parameter

    def run(
        self,
        heads: tuple[Float[Tensor, "n _ _"], ...],
        beta: Float[Tensor, "n h"],
        log_decay: Decay,
        gate: Float[Tensor, "n c"],
        x: Ragged,
        cache: StateSlot | None,
        recent: Float[Tensor, "b k _"],
        context: WatchContext | None,
    ) -> Ragged:
        """The output for queries, keys and values, from the rule to the output projection."""
        query, key, value = observe_heads(context, x, *heads)
        h0, _ = state_of(cache, 2)
        mixed, ht = run_delta_rule(query, key, value, beta, log_decay, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        weights = partial(DeltaWeights, query, key, beta, log_decay, x.lengths)
        mixed = watch_pattern(context if h0 is None else None, weights, value, mixed)
        gate, eps = by_head(gate, self.config.heads), self.config.eps
        gated = head_norms.gated_norm(mixed, gate, self.norm_weight, eps, self.gate_activation)
        return self.write(gated, x, context)


class GatedDeltaLayer(DeltaMixer):
    """A gated delta net with its projections, convolution and output gate."""

    def __init__(self, config: GatedDelta) -> None:
        super().__init__(config)
        rows = config.rows()
        narrow = rows["beta"] + rows["dt"]
        self.project = nn.Linear(config.width, sum(rows.values()) - narrow, bias=False)
        self.rates = nn.Linear(config.width, narrow, bias=False)
        channels = rows["query"] + rows["key"] + rows["value"]
        self.convolution = ShortConvolution(channels, config.convolution, bias=False)
        self.dt_bias = nn.Parameter(time_step.draw_dt_bias(config.heads))
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(0.01, 16).log())
        self.norm_weight = nn.Parameter(torch.ones(config.head_size))
        self.output = nn.Linear(rows["value"], config.width, bias=False)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, rows = self.config, self.config.rows()
        mixed, gate = self.project(x.values).tensor_split([-rows["gate"]], dim=-1)
        beta, dt = self.rates(x.values).chunk(2, dim=-1)
        mixed, recent = self.convolution(x.with_values(mixed), state_of(cache, 2)[1])
        query, key, value = mixed.split([rows["query"], rows["key"], rows["value"]], dim=-1)
        query = head_norms.unit(by_head(query, config.key_heads), config.key_size**-0.5)
        key = head_norms.unit(by_head(key, config.key_heads))
        repeats = config.heads // config.key_heads
        if repeats > 1 and context is not None:
            query, key = (part.repeat_interleave(repeats, dim=1) for part in (query, key))
        decay = time_step.log_decay(dt, self.dt_bias, self.A_log)
        beta = beta.sigmoid() * (2.0 if config.negative_eigenvalues else 1.0)
        heads = (query, key, by_head(value, config.heads))
        return self.run(heads, beta, decay, gate, x, cache, recent, context)
