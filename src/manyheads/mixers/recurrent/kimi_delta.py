"""Kimi delta attention (arXiv 2510.26692): every channel forgets at its own rate."""

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import nn

from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import check_int
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
class KimiDelta:
    """The config of Kimi delta attention: keys and values of every head have `head_size` channels.

    Forgetting and the output gate are projected through `head_size` channels.
    """

    width: int
    heads: int
    head_size: int
    convolution: int = 4
    eps: float = 1e-5

    def __post_init__(self) -> None:
        for name in ("width", "heads", "head_size", "convolution"):
            check_int(name, getattr(self, name), minimum=1)

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it."""
        return True

    @property
    def inner(self) -> int:
        return self.heads * self.head_size


class KimiDeltaLayer(Mixer):
    """Kimi delta attention with its projections, convolution and output gate."""

    carries_state = True
    has_pattern = True

    def __init__(self, config: KimiDelta) -> None:
        super().__init__()
        self.config = config
        width, inner, rank = config.width, config.inner, config.head_size
        self.project = nn.Linear(width, 3 * inner, bias=False)
        self.convolution = ShortConvolution(3 * inner, config.convolution, bias=False)
        # Of dt and of the output gate, which have their rank; then beta, the rate of writing.
        self.narrow = nn.Linear(width, 2 * rank + config.heads, bias=False)
        self.widen_dt = nn.Linear(rank, inner, bias=False)
        self.widen_gate = nn.Linear(rank, inner, bias=False)
        self.dt_bias = nn.Parameter(draw_dt_bias(inner))
        self.A_log = nn.Parameter(torch.empty(config.heads).uniform_(1, 16).log())
        self.norm_weight = nn.Parameter(torch.ones(config.head_size))
        self.output = nn.Linear(inner, width, bias=False)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        config, state = self.config, None if cache is None else cache.state
        before = None if state is None else state[1]
        mixed, recent = self.convolution(x.with_values(self.project(x.values)), before)
        query, key, value = (by_head(part, config.heads) for part in mixed.chunk(3, dim=-1))
        query = observe(context, Tap.QUERY, unit(query, config.head_size**-0.5), x)
        key = observe(context, Tap.KEY, unit(key), x)
        value = observe(context, Tap.VALUE, value, x)
        rank = config.head_size
        dt, gate, beta = self.narrow(x.values).split([rank, rank, config.heads], dim=-1)
        dt = F.softplus(self.widen_dt(dt).float() + self.dt_bias.float())
        decay = -self.A_log.float().exp().unsqueeze(-1) * by_head(dt, config.heads)
        beta = beta.sigmoid()
        h0 = None if state is None else state[0]
        heads, ht = run_delta_rule(query, key, value, beta, decay, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        weights = partial(DeltaWeights, query, key, beta, decay, x.lengths)
        heads = watch_pattern(context if state is None else None, weights, value, heads)
        gate = by_head(self.widen_gate(gate), config.heads)
        gated = gated_norm(heads, gate, self.norm_weight, config.eps, "sigmoid")
        gated = observe(context, Tap.HEAD_OUTPUT, gated, x)
        return x.with_values(self.output(gated.flatten(1)))
