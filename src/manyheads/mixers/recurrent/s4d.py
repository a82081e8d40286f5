"""S4D (arXiv 2206.11893): every channel passes through a linear system with diagonal states.

    h_t = P h_{t-1} + u_t        y_t = 2 Re(C h_t) + D u_t        P = exp(dt A)

A = -exp(A_log) + i A_imag, dt, C and D are learned for every channel; none depends on the token.
Whole texts are convolved with the answer of the system to a single one, K_l = 2 Re(C P^l), by a
Fourier transform; generation follows the recurrence.
"""

from dataclasses import dataclass
from math import isqrt

import torch
import torch.nn.functional as F
from jaxtyping import Complex, Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.errors import ConfigError
from manyheads.mixers.mixer import Mixer, MixerSettings, refuse_cache, state_of
from manyheads.mixers.recurrent import chunk_layout, time_step
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext

# Numbers of s states for each of c channels, and the states after each of b texts.
System = Complex[Tensor, "c s"]
States = Complex[Tensor, "b c s"]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class S4D(MixerSettings):
    """An S4D layer with `state_size` states per channel, half of them conjugates of the others.

    With causal=False a second system reads every text from its end.
    """

    state_size: PositiveInt = 64
    causal: bool = True

    def __post_init__(self) -> None:
        if self.state_size % 2:
            raise ConfigError(f"state_size must be even, got {self.state_size}")


def naive_s4d(
    u: Float[Tensor, "t c"], step: System, C: System, state: System
) -> tuple[Float[Tensor, "t c"], System]:
    """The formula token by token, of one text, without D and with dt A in `step`: the oracle."""
    outputs, h = torch.zeros_like(u), state
    for t in range(len(u)):
        h = step.exp() * h + u[t].unsqueeze(-1)
        outputs[t] = 2 * (C * h).sum(-1).real
    return outputs, h


class S4DLayer(Mixer):
    """The system of every channel, then GELU and a gated projection."""

    carries_state = True

    def __init__(self, config: S4D) -> None:
        super().__init__(config)
        width, states = config.width, config.state_size // 2
        ways = 1 if config.causal else 2
        # S4D-Lin: A_n = -1/2 + i pi n.
        self.A_log = nn.Parameter(torch.full((width, states), 0.5).log())
        self.A_imag = nn.Parameter(torch.pi * torch.arange(states).float().repeat(width, 1))
        self.dt_bias = nn.Parameter(time_step.draw_dt_bias(width))
        self.C = nn.Parameter(torch.randn(ways, width, states, 2) * 0.5**0.5)
        self.D = nn.Parameter(torch.randn(width))
        self.gate = nn.Linear(width, width)
        self.output = nn.Linear(width, width)

    def system(self) -> tuple[Complex[Tensor, "c s"], Complex[Tensor, "w c s"]]:
        """dt A, and C of each direction, discretized by a zero-order hold."""
        a = torch.complex(-self.A_log.float().exp(), self.A_imag.float())
        step = a * F.softplus(self.dt_bias.float()).unsqueeze(1)
        return step, torch.view_as_complex(self.C.float()) * (step.exp() - 1) / a

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        del context  # it has no heads
        step, C = self.system()
        u, lengths = x.values.float(), x.lengths
        if not self.config.causal:
            refuse_cache(cache)
        (state,) = state_of(cache, 1)
        if state is not None and lengths.longest == 1 and lengths.uniform:
            ht = step.exp() * state + u.unsqueeze(-1)
            mixed = 2 * (C[0] * ht).sum(-1).real
        else:
            # A convolution fills up texts to a power of two.
            powers = Powers.of(step, 1 << max(lengths.longest - 1, 0).bit_length())
            mixed = convolve_texts(u, powers, C, lengths, state)
            ht = u[:0] if cache is None else last_states(u, powers, lengths, state)
        if cache is not None:
            cache.keep(ht)
        mixed = F.gelu(mixed + u * self.D.float()).to(x.values.dtype)
        return x.with_values(self.output(mixed) * self.gate(mixed).sigmoid())


@dataclass(frozen=True, slots=True, eq=False)
class Powers:
    """P^l for every l = i m + j, a product of P^(i m), in `high`, and P^j, in `low`."""

    step: System
    low: Complex[Tensor, "c s m"]
    high: Complex[Tensor, "c s i"]

    @classmethod
    def of(cls, step: System, longest: int) -> "Powers":
        m = isqrt(max(longest - 1, 0)) + 1
        return cls(step, _raised(step, m), _raised(step * m, -(-longest // m)))

    def weighted(self, weights: Complex[Tensor, "*b c s"], length: int) -> Float[Tensor, "*b c l"]:
        """2 Re of the sum over states of weights times P^l, for every l below `length`."""
        high = self.high[..., : -(-length // self.low.shape[-1])]
        products = (weights.unsqueeze(-1) * high).transpose(-2, -1) @ self.low
        return 2 * products.real.flatten(-2)[..., :length]

    def summed(self, u: Float[Tensor, "c l"]) -> System:
        """The states after a text that starts without any."""
        m = self.low.shape[-1]
        blocks = -(-u.shape[1] // m)
        # Zeros in front change nothing, and make blocks of m.
        cut = F.pad(u, (blocks * m - u.shape[1], 0)).unflatten(1, (blocks, m))
        inner = self.low.flip(-1) @ cut.transpose(1, 2).to(self.low.dtype)
        return (inner * self.high[..., :blocks].flip(-1)).sum(-1)


def _raised(step: System, count: int) -> Complex[Tensor, "c s n"]:
    """P^0 to P^(count - 1); phases of many turns need float64."""
    exponent = torch.arange(count, device=step.device, dtype=torch.float64)
    size = (step.real.unsqueeze(-1) * exponent.float()).exp()
    phase = (step.imag.double().unsqueeze(-1) * exponent).remainder(2 * torch.pi).float()
    return torch.complex(size * phase.cos(), size * phase.sin())


def convolve_texts(
    u: Float[Tensor, "n c"],
    powers: Powers,
    C: Complex[Tensor, "w c s"],
    lengths: Lengths,
    state: States | None = None,
) -> Float[Tensor, "n c"]:
    """The outputs of every text, those of about the same length in one Fourier transform."""
    output = torch.zeros_like(u)
    sizes = [1 << max(length - 1, 0).bit_length() for length in lengths.each]
    for size in dict.fromkeys(sizes):
        alike = (index for index, text_size in enumerate(sizes) if text_size == size)
        chosen = [index for index in alike if lengths.each[index]]
        if not chosen:
            continue
        rows, group_lengths = None, lengths
        if len(chosen) < lengths.count:
            group_lengths = Lengths.of([lengths.each[index] for index in chosen], u.device)
            first = torch.tensor([lengths.starts[index] for index in chosen], device=u.device)
            rows = first[group_lengths.sequence_of_token] + group_lengths.positions
        chunks = chunk_layout.ChunkLayout.of(group_lengths, size)
        texts = chunks.cut(u if rows is None else u[rows]).transpose(1, 2)
        kernel = powers.weighted(C, size)
        whole = F.pad(kernel[0], (0, size))
        if len(kernel) > 1:
            whole = torch.cat([kernel[0], kernel[1].flip(-1)], dim=-1)
        spectrum = torch.fft.rfft(texts, 2 * size) * torch.fft.rfft(whole)
        mixed = torch.fft.irfft(spectrum, 2 * size)[..., :size]
        if state is not None:
            # What the state before the text still gives.
            earlier = state[torch.tensor(chosen, device=u.device)] * powers.step.exp()
            mixed = mixed + powers.weighted(C[0] * earlier, size)
        joined = chunks.join(mixed.transpose(1, 2))
        output = joined if rows is None else output.index_copy(0, rows, joined)
    return output


def last_states(
    u: Float[Tensor, "n c"], powers: Powers, lengths: Lengths, state: States | None = None
) -> States:
    """The states after every text."""
    states = []
    for index, tokens in enumerate(lengths.slices()):
        after = powers.summed(u[tokens].T)
        if state is not None:
            after = after + (powers.step * (tokens.stop - tokens.start)).exp() * state[index]
        states.append(after)
    return torch.stack(states) if states else powers.step.new_zeros(0, *powers.step.shape)
