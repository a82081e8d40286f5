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

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError, check_int
from manyheads.mixers.head_weights import DecayWeights, watch_pattern
from manyheads.mixers.mixer import Mixer, by_head
from manyheads.mixers.recurrent.decay_recurrence import recur_in_chunks, recur_one_token
from manyheads.mixers.recurrent.head_norms import gated_norm
from manyheads.mixers.recurrent.short_convolution import ShortConvolution
from manyheads.mixers.recurrent.time_step import draw_dt_bias
from manyheads.ragged import Ragged
from manyheads.taps import Tap, WatchContext, observe


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba2:
    """A Mamba-2 layer of `heads` with `head_size` channels and `state_size` states each.

    Heads of one of the `groups` share B and C, the counterparts of keys and queries. dt is limited
    to the range `time_step`.
    """

    width: int
    heads: int
    head_size: int
    state_size: int
    groups: int = 1
    convolution: int = 4
    time_step: tuple[float, float] | Literal["any"] = "any"
    eps: float = 1e-5
    bias: bool = False
    convolution_bias: bool = True

    def __post_init__(self) -> None:
        for name in ("width", "heads", "head_size", "state_size", "groups", "convolution"):
            check_int(name, getattr(self, name), minimum=1)
        if self.heads % self.groups:
            raise ConfigError(f"groups must divide heads={self.heads}, got {self.groups}")

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return True

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
        super().__init__()
        self.config = config
        self.sizes = (config.inner, config.channels, config.heads)
        self.project = nn.Linear(config.width, sum(self.sizes), bias=config.bias)
        self.convolution = ShortConvolution(
            self.sizes[1], config.convolution, bias=config.convolution_bias
        )
        self.dt_bias = nn.Parameter(draw_dt_bias(config.heads))
        self.A_log = nn.Parameter(torch.arange(1.0, config.heads + 1).log())
        self.D = nn.Parameter(torch.ones(config.heads))
        self.norm_weight = nn.Parameter(torch.ones(config.inner))
        self.output = nn.Linear(config.inner, config.width, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, state = self.config, None if cache is None else cache.state
        gate, mixed, dt = self.project(x.values).split(self.sizes, dim=-1)
        before = None if state is None else state[1]
        mixed, recent = self.convolution(x.with_values(mixed), before)
        shared = config.groups * config.state_size
        value, key, query = mixed.split([config.inner, shared, shared], dim=-1)
        dt = F.softplus(dt.float() + self.dt_bias.float())
        dt = dt if config.time_step == "any" else dt.clamp(*config.time_step)
        value = by_head(value, config.heads)
        steps = state is not None and x.lengths.longest == 1 and x.lengths.uniform
        key, query = (by_head(part, config.groups) for part in (key, query))
        if context is not None or steps:
            repeats = config.heads // config.groups
            key, query = (part.repeat_interleave(repeats, dim=1) for part in (key, query))
        query = observe(context, Tap.QUERY, query, x)
        key = observe(context, Tap.KEY, key, x)
        value = observe(context, Tap.VALUE, value, x)
        decay = -self.A_log.float().exp() * dt
        # dt k v^T: with dt at the values, heads of a group have the same keys.
        value_dt = value.float() * dt.unsqueeze(-1)
        if state is not None and steps:
            heads, ht = recur_one_token(query, key, value_dt, decay, state[0])
        else:
            h0 = None if state is None else state[0]
            heads, ht = recur_in_chunks(query, key, value_dt, decay, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        heads = heads.to(value.dtype)
        if context is not None and state is None:
            weights = partial(DecayWeights, query, key * dt.unsqueeze(-1), decay, x.lengths)
            heads = watch_pattern(context, weights, value, heads)
        heads = heads + value * self.D.to(value.dtype)[:, None]
        # All heads together are gated, then normed; the gated delta net does it in the other order.
        whole, gate = by_head(heads.flatten(1), 1), by_head(gate, 1)
        gated = gated_norm(whole, gate, self.norm_weight, config.eps, gate_first=True)
        gated = observe(context, Tap.HEAD_OUTPUT, by_head(gated.flatten(1), config.heads), x)
        return x.with_values(self.output(gated.flatten(1)))
