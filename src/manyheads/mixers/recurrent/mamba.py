"""Mamba (arXiv 2312.00752): a state-space layer whose channels forget as the token decides.

For every channel, with a state h of `state_size` numbers:

    h_t = exp(dt_t A) h_{t-1} + dt_t x_t B_t        y_t = C_t h_t + D x_t

dt, B and C are computed from the token by `x_proj`; A = -exp(A_log) and D are learned.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.devices import runs_triton, without_autocast
from manyheads.kernels.reference import in_chunks
from manyheads.mixers.mixer import Mixer, MixerSettings, state_of
from manyheads.mixers.recurrent import chunk_layout, time_step
from manyheads.mixers.recurrent.diagonal_scan import diagonal_scan, naive_diagonal_scan
from manyheads.mixers.recurrent.short_convolution import ShortConvolution
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext

# Numbers in the states of the channels that are computed at once.
BLOCK = {"cpu": 2**20, "cuda": 2**27}
# Tokens whose decays are computed at once where a loop visits every token.
WALKED = 16
# State per channel that the kernels take.
LARGEST_OF_TRITON = 64

# Of n tokens: c channels, each with s states; a state for each of b sequences.
Channels = Float[Tensor, "n c"]
Rates = Float[Tensor, "c s"]
Mixing = Float[Tensor, "n s"]
State = Float[Tensor, "b c s"]
# The outputs of all tokens, and the states after each sequence.
Scanned = tuple[Channels, State]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Mamba(MixerSettings):
    """A Mamba layer of `inner` channels with `state_size` states each.

    The time step dt of all channels is computed from `dt_rank` numbers per token. With `inner_eps`
    dt, B and C are normed by their root mean square, as in Falcon-Mamba.
    """

    causal = True

    inner: PositiveInt
    state_size: PositiveInt = 16
    dt_rank: PositiveInt
    convolution: PositiveInt = 4
    bias: bool = False
    convolution_bias: bool = True
    inner_eps: float | Literal["none"] = "none"


class MambaLayer(Mixer):
    """A Mamba layer."""

    carries_state = True

    def __init__(self, config: Mamba) -> None:
        super().__init__(config)
        inner, rank = config.inner, config.dt_rank
        self.sizes = (rank, config.state_size, config.state_size)
        self.project = nn.Linear(config.width, 2 * inner, bias=config.bias)
        self.convolution = ShortConvolution(inner, config.convolution, bias=config.convolution_bias)
        self.x_proj = nn.Linear(inner, sum(self.sizes), bias=False)
        self.dt_weight = nn.Parameter(torch.empty(inner, rank).uniform_(-1, 1) * rank**-0.5)
        self.dt_bias = nn.Parameter(time_step.draw_dt_bias(inner))
        rates = torch.arange(1.0, config.state_size + 1).log()
        self.A_log = nn.Parameter(rates.repeat(inner, 1))
        self.D = nn.Parameter(torch.ones(inner))
        self.output = nn.Linear(inner, config.width, bias=config.bias)

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        h0, before = state_of(cache, 2)
        mixed, gate = self.project(x.values).chunk(2, dim=-1)
        mixed, recent = self.convolution(x.with_values(mixed), before)
        dt, B, C = (self._normed(part) for part in self.x_proj(mixed).split(self.sizes, dim=-1))
        dt = F.softplus(F.linear(dt, self.dt_weight).float() + self.dt_bias.float())
        scanned, ht = scan_channels(mixed, dt, -self.A_log.float().exp(), B, C, x.lengths, h0)
        if cache is not None:
            cache.keep(ht, recent)
        scanned = scanned + mixed * self.D.float()
        gated = (scanned * F.silu(gate.float())).to(mixed.dtype)
        return self.write(gated.unsqueeze(1), x, context)

    def _normed(self, part: Float[Tensor, "n d"]) -> Float[Tensor, "n d"]:
        eps = self.config.inner_eps
        if eps == "none":
            return part
        return F.rms_norm(part.float(), part.shape[-1:], eps=eps).to(part.dtype)


def naive_selective_scan(
    x: Channels, dt: Channels, A: Rates, B: Mixing, C: Mixing, lengths: Lengths, state: State
) -> Scanned:
    """The formula token by token, without D: the oracle of the tests."""
    decay = (dt.unsqueeze(-1) * A).exp()
    added = (dt * x).unsqueeze(-1) * B.unsqueeze(1)
    states, ends = naive_diagonal_scan(decay, added, lengths, state)
    return (states @ C.unsqueeze(-1)).squeeze(-1), ends


@without_autocast
def scan_channels(
    x: Channels,
    dt: Channels,
    A: Rates,
    B: Mixing,
    C: Mixing,
    lengths: Lengths,
    state: State | None = None,
    *,
    by_triton: bool | None = None,
) -> Scanned:
    """The output of every channel, and the states after each sequence, in the dtype of `dt`.

    All states of all tokens would need `s` times the memory of the outputs, so that some channels
    are computed after others, and anew for gradients. On CUDA the kernels of `triton_scan` compute
    it, where they can, unless `by_triton` says otherwise.
    """
    single = lengths.longest <= 1 or torch.compiler.is_compiling()
    if by_triton is None:
        by_triton = runs_triton(dt) and not single and A.shape[1] <= LARGEST_OF_TRITON
    if by_triton and lengths.total:
        from manyheads.mixers.kernels.triton_scan import CHUNK, scan_by_triton

        h0 = dt.new_zeros(lengths.count, *A.shape) if state is None else state
        return scan_by_triton(x, dt, A, B, C, h0, chunk_layout.ChunkLayout.of(lengths, CHUNK))
    x, B, C = x.to(dt.dtype), B.to(dt.dtype), C.to(dt.dtype)
    inputs = (x, dt, A, B, C)
    grad = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
    if x.device.type == "cpu" and not grad and not single:
        return _walk(x, dt, A, B, C, lengths, state)
    limit = BLOCK.get(x.device.type, BLOCK["cpu"])
    block = max(1, limit // max(1, x.shape[0] * A.shape[1]))
    if block >= x.shape[1]:
        return _scan_block(x, dt, A, B, C, lengths, state)

    def scan_some(part: slice) -> Scanned:
        of_state = None if state is None else state[:, part]
        return _scan_block(x[:, part], dt[:, part], A[part], B, C, lengths, of_state)

    pieces = in_chunks(scan_some, x.shape[1], block, recompute=grad)
    outputs, states = zip(*pieces, strict=True)
    return torch.cat(outputs, 1), torch.cat(states, 1)


def _scan_block(
    x: Channels, dt: Channels, A: Rates, B: Mixing, C: Mixing, lengths: Lengths, state: State | None
) -> Scanned:
    decay = (dt.unsqueeze(-1) * A).exp()
    added = (dt * x).unsqueeze(-1) * B.unsqueeze(1)
    states, after = diagonal_scan(decay, added, lengths, state)
    return (states @ C.unsqueeze(-1)).squeeze(-1), after


def _walk(
    x: Channels, dt: Channels, A: Rates, B: Mixing, C: Mixing, lengths: Lengths, state: State | None
) -> Scanned:
    """Token by token, which is fastest on a CPU: the states of a token stay in its caches."""
    after = x.new_zeros(lengths.count, *A.shape) if state is None else state.clone()
    outputs = torch.empty_like(x)
    for index, where in enumerate(lengths.slices()):
        h = after[index]
        for start in range(where.start, where.stop, WALKED):
            tokens = slice(start, min(start + WALKED, where.stop))
            decays = (dt[tokens].unsqueeze(-1) * A).exp_()
            states = (dt[tokens] * x[tokens]).unsqueeze(-1) * B[tokens].unsqueeze(1)
            for decay, h_next in zip(decays, states, strict=True):
                h = h_next.addcmul_(decay, h)
            outputs[tokens] = (states @ C[tokens].unsqueeze(-1)).squeeze(-1)
        after[index] = h
    return outputs, after
