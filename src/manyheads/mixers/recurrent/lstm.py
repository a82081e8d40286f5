"""LSTM (Hochreiter and Schmidhuber 1997; forget gates: Gers et al. 2000), the baseline.

For every token, with the hidden state h and the cell c of the token before:

    i, f, g, o = W_ih x_t + b_ih + W_hh h_{t-1} + b_hh
    c_t = sigmoid(f) c_{t-1} + sigmoid(i) tanh(g)        h_t = sigmoid(o) tanh(c_t)

Tokens follow one another, as h enters the gates: unlike the other mixers, it cannot read a text in
parallel. PyTorch's own kernel computes it, on CUDA that of cuDNN; `torch.compile` breaks its graph
there.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.cache import StateSlot
from manyheads.devices import without_autocast
from manyheads.mixers.mixer import Mixer, MixerSettings, state_of
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import WatchContext

# W_ih, W_hh, b_ih and b_hh, with r rows: those of i, f, g and o.
Weights = tuple[
    Float[Tensor, "r c"], Float[Tensor, "r d"], Float[Tensor, " r"], Float[Tensor, " r"]
]
# The hidden states and the cells of b texts.
States = tuple[Float[Tensor, "b d"], Float[Tensor, "b d"]]


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Lstm(MixerSettings):
    """An LSTM with `inner` cells, and a projection of its hidden states.

    The bias of the forget gate starts at one, so that cells remember.
    """

    causal = True

    inner: PositiveInt | Literal["width"] = "width"

    @property
    def size(self) -> int:
        """The number of cells."""
        return self.width if self.inner == "width" else self.inner


class LstmLayer(Mixer):
    """An LSTM layer."""

    carries_state = True

    def __init__(self, config: Lstm) -> None:
        super().__init__(config)
        size = config.size
        self.lstm = nn.LSTM(config.width, size)
        with torch.no_grad():
            _, _, bias, second_bias = self.weights
            bias.zero_()[size : 2 * size] = 1.0
            second_bias.zero_()
        self.output = nn.Linear(size, config.width, bias=False)

    @property
    def weights(self) -> Weights:
        w_ih, w_hh, b_ih, b_hh = self.lstm.parameters()
        return w_ih, w_hh, b_ih, b_hh

    def forward(
        self, x: Ragged, *, cache: StateSlot | None = None, context: WatchContext | None = None
    ) -> Ragged:
        h0, c0 = state_of(cache, 2)
        states = None if h0 is None or c0 is None else (h0, c0)
        mixed, (ht, ct) = lstm_of_texts(x.values, self.weights, x.lengths, states)
        if cache is not None:
            cache.keep(ht, ct)
        return self.write(mixed.to(x.values.dtype).unsqueeze(1), x, context)


def naive_lstm(
    x: Float[Tensor, "t c"], weights: Weights, h: Float[Tensor, " d"], c: Float[Tensor, " d"]
) -> tuple[Float[Tensor, "t d"], Float[Tensor, " d"], Float[Tensor, " d"]]:
    """The formulas token by token, of one text: the oracle of the tests."""
    w_ih, w_hh, b_ih, b_hh = weights
    outputs = []
    for token in x:
        i, f, g, o = (w_ih @ token + b_ih + w_hh @ h + b_hh).chunk(4)
        c = f.sigmoid() * c + i.sigmoid() * g.tanh()
        h = o.sigmoid() * c.tanh()
        outputs.append(h)
    return torch.stack(outputs) if outputs else x.new_zeros(0, len(h)), h, c


@without_autocast
def lstm_of_texts(
    x: Float[Tensor, "n c"], weights: Weights, lengths: Lengths, states: States | None = None
) -> tuple[Float[Tensor, "n d"], States]:
    """The hidden state of every token, and the states after each text, at least in float32."""
    wide = torch.promote_types(x.dtype, torch.float32)
    x, size = x.to(wide), weights[1].shape[1]
    if states is None:
        states = x.new_zeros(lengths.count, size), x.new_zeros(lengths.count, size)
    if not x.shape[0]:
        return x.new_zeros(0, size), states
    flat = _in_one_buffer([weight.to(wide) for weight in weights])
    # cuDNN has gradients only in training, which without dropout is all that this changes.
    options = (flat, True, 1, 0.0, torch.is_grad_enabled(), False)
    if lengths.uniform:
        texts = x.unflatten(0, (lengths.count, lengths.longest)).transpose(0, 1).contiguous()
        output, ht, ct = torch.lstm(texts, [h.unsqueeze(0) for h in states], *options, False)
        return output.transpose(0, 1).flatten(0, 1), (ht[0], ct[0])
    # The first tokens of all texts, then their second ones, and so on, longest texts first.
    filled = [index for index, length in enumerate(lengths.each) if length]
    filled.sort(key=lambda index: -lengths.each[index])
    rank = lengths.offsets.diff().argsort(descending=True, stable=True).argsort()
    rows = (lengths.positions * lengths.count + rank[lengths.sequence_of_token]).argsort()
    sizes = torch.tensor([sum(n > t for n in lengths.each) for t in range(lengths.longest)])
    chosen = torch.tensor(filled, device=x.device)
    first = [h[chosen].unsqueeze(0) for h in states]
    output, ht, ct = torch.lstm(x[rows], sizes, first, *options)
    after = [h.index_copy(0, chosen, last[0]) for h, last in zip(states, (ht, ct), strict=True)]
    return torch.empty_like(output).index_copy(0, rows, output), (after[0], after[1])


def _in_one_buffer(weights: list[Tensor]) -> list[Tensor]:
    """The weights laid end to end, as cuDNN reads them; otherwise it copies them with a warning."""
    if not weights[0].is_cuda:
        return weights
    parts = torch.cat([weight.flatten() for weight in weights]).split(
        [weight.numel() for weight in weights]
    )
    return [part.view_as(weight) for part, weight in zip(parts, weights, strict=True)]
