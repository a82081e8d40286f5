"""Kimi delta attention (arXiv 2510.26692): every channel forgets at its own rate."""

from dataclasses import dataclass

import torch
from torch import nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.mixers.mixer import MixerSettings, by_head, split_heads, state_of
from manyheads.mixers.recurrent import gated_delta, head_norms, short_convolution, time_step
from manyheads.ragged import Ragged
from manyheads.taps import WatchContext


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class KimiDelta(MixerSettings):
    """The config of Kimi delta attention: keys and values of every head have `head_size` channels.

    Forgetting and the output gate are projected through `head_size` channels.
    """

    causal = True

    heads: PositiveInt
    head_size: PositiveInt
    convolution: PositiveInt = 4
    eps: float = 1e-5

    @property
    def inner(self) -> int:
        return self.heads * self.head_size


class KimiDeltaLayer(gated_delta.DeltaMixer):
    """Kimi delta attention with its projections, convolution and output gate."""

    gate_activation = "sigmoid"

    def __init__(self, config: KimiDelta) -> None:
        super().__init__(config)
        width, inner, rank = config.width, config.inner, config.head_size
        self.project = nn.Linear(width, 3 * inner, bias=False)
        self.convolution = short_convolution.ShortConvolution(
            3 * inner, config.convolution, bias=False
        )
        # Of dt and of the output gate, which have their rank; then beta, the rate of writing.
        self.narrow = nn.Linear(width, 2 * rank + config.heads, bias=False)
        self.widen_dt = nn.Linear(rank, inner, bias=False)
        self.widen_gate = nn.Linear(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(time_step.draw_dt_bias(inner))
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(1, 16).log())
        self.norm_weight = nn.Parameter(torch.ones(config.head_size))
        self.output = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, rank = self.config, self.config.head_size
        mixed = x.with_values(self.project(x.values))
        mixed, recent = self.convolution(mixed, state_of(cache, 2)[1])
        query, key, value = split_heads(mixed, config.heads, 3)
        dt, gate, beta = self.narrow(x.values).split([rank, rank, config.heads], dim=-1)
        decay = time_step.log_decay(self.widen_dt(dt), self.dt_bias, self.A_log)
        heads = (head_norms.unit(query, rank**-0.5), head_norms.unit(key), value)
        gate = self.widen_gate(gate)
        decay = by_head(decay, config.heads)
        return self.run(heads, beta.sigmoid(), decay, gate, x, cache, recent, context)
