"""Mamba-2 (arXiv 2405.21060): a state-space layer whose heads decay at their own, learned rate.

    h_t = exp(dt_t A) h_{t-1} + dt_t B_t x_t^T        y_t = C_t^T h_t + D x_t

B, C and x are the keys, queries and values of heads; A = -exp(A_log) and D are learned.
"""

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.head_weights import DecayWeights, watch_pattern
from manyheads.mixers.mixer import Mixer, MixerSettings, by_head, observe_heads, state_of
from manyheads.mixers.recurrent import head_norms, short_convolution, time_step
from manyheads.mixers.recurrent.decay_recurrence import run_decay_recurrence
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2(MixerSettings):
    """A Mamba-2 layer of `heads` with `head_size` channels and `state_size` states each.

    Heads of one of the `groups` share B and C, the counterparts of keys and queries. dt is limited
    to the range `time_step`.
    """

    causal = True

    heads: PositiveInt
    head_size: PositiveInt
    state_size: PositiveInt
    groups: PositiveInt = 1
    convolution: PositiveInt = 4
    time_step: tuple[float, float] | Literal["any"] = "any"
    eps: float = 1e-5
    bias: bool = False
    convolution_bias: bool = True

    def __post_init__(self) -> None:
        if self.heads % self.groups:
            raise ConfigError(f"groups must divide heads={self.heads}, got {self.groups}")

    @property
    def inner(self) -> int:
        return self.heads * self.head_size

    @property
    def channels(self) -> int:
        """Those of the convolution: values, and B and C of every group."""
        return self.inner + 2 * self.groups * self.state_size


class Mamba2Layer(Mixer):
    """A Mamba-2 layer."""

    carries_state = True
    has_pattern = True

    def __init__(self, config: Mamba2) -> None:
        super().__init__(config)
        self.sizes = (config.inner, config.channels, config.heads)
        self.project = nn.Linear(config.width, sum(self.sizes), bias=config.bias)
        self.convolution = short_convolution.ShortConvolution(
            self.sizes[1], config.convolution, bias=config.convolution_bias
        )
        self.dt_bias = nn.Parameter(time_step.draw_dt_bias(config.heads))
        self.A_log = nn.Parameter(torch.arange(1.0, config.heads + 1).log())
        self.D = nn.Parameter(torch.ones(config.heads))
        self.norm_weight = nn.Parameter(torch.ones(config.inner))
        self.output = nn.Linear(config.inner, config.width, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, (h0, before) = self.config, state_of(cache, 2)
        gate, mixed, dt = self.project(x.values).split(self.sizes, dim=-1)
        mixed, recent = self.convolution(x.with_values(mixed), before)
        shared = config.groups * config.state_size
        value, key, query = mixed.split([config.inner, shared, shared], dim=-1)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        dt = dt if config.time_step == "any" else dt.clamp(*config.time_step)
        value = by_head(value, config.heads)
        key, query = (by_head(part, config.groups) for part in (key, query))
        if context is not None:
            repeats = config.heads // config.groups
            key, query = (part.repeat_interleave(repeats, dim=1) for part in (key, query))
        query, key, value = observe_heads(context, x, query, key, value)
        decay = -self.A_log.float().exp() * dt
        # dt k v^T: with dt at the values, heads of a group have the same keys.
        value_dt = value.float() * dt.unsqueeze(-1)
        heads, ht = run_decay_recurrence(query, key, value_dt, decay, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        heads = heads.to(value.dtype)
        if context is not None and h0 is None:
            weights = partial(DecayWeights, query, key * dt.unsqueeze(-1), decay, x.lengths)
            heads = watch_pattern(context, weights, value, heads)
        heads = heads + value * self.D.to(value.dtype)[:, None]
        # All heads together are gated, then normed; the gated delta net does it in the other order.
        together, gate = by_head(heads.flatten(1), 1), by_head(gate, 1)
        gated = head_norms.gated_norm(together, gate, self.norm_weight, config.eps, gate_first=True)
        return self.write(by_head(gated.flatten(1), config.heads), x, context)
