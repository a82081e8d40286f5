"""A short causal convolution of every channel, over the tokens of each sequence on its own."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.devices import runs_triton
from manyheads.ragged import Ragged

# Tokens of a window that the kernels take: they repeat their code for each.
LARGEST_OF_TRITON = 16


def naive_short_convolution(
    x: Ragged,
    weight: Float[Tensor, "c size"],
    bias: Float[Tensor, " c"] | None,
    before: Float[Tensor, "b k c"],
) -> Float[Tensor, "n c"]:
    """y_t = silu(bias + sum_d w_d x_{t-d}) token by token: the oracle of the tests."""
    outputs = torch.zeros_like(x.values)
    for front, tokens in zip(before, x.lengths.slices(), strict=True):
        text = torch.cat([front, x.values[tokens]])
        for t in range(tokens.start, tokens.stop):
            window = text[t - tokens.start :][: weight.shape[1]]
            total = (weight.T * window).sum(0)
            outputs[t] = F.silu(total if bias is None else total + bias)
    return outputs


class ShortConvolution(nn.Module):
    """Each channel mixes a token with the `size` - 1 before it, then SiLU."""

    def __init__(self, channels: int, size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def forward(
        self,
        x: Ragged,
        before: Float[Tensor, "b k c"] | None = None,
        *,
        by_triton: bool | None = None,
    ) -> tuple[Float[Tensor, "n c"], Float[Tensor, "b k c"]]:
        """The outputs, and the last tokens of each sequence, which the next token will need.

        `before` are those of the tokens that came before; without it there were none.
        On CUDA the kernels of `triton_convolution` compute it, where they can, unless `by_triton`
        says otherwise. They give the outputs in the precision of `x`, also under autocast.
        """
        lengths, behind = x.lengths, self.weight.shape[1] - 1
        if by_triton is None:
            by_triton = runs_triton(x.values) and behind < LARGEST_OF_TRITON
        # The kernels have no gradient of `before`.
        learned = before is not None and before.requires_grad
        if by_triton and not learned and x.values.shape[0]:
            from manyheads.mixers.kernels.triton_convolution import convolve

            output = convolve(x.values, self.weight, self.bias, before, lengths)
            return output, _last_tokens(x, before, behind)
        # Every sequence gets `behind` rows in front of it.
        row = torch.arange(x.values.shape[0], device=x.values.device)
        row = row + behind * (lengths.sequence_of_token + 1)
        longer = x.values.new_zeros(x.values.shape[0] + behind * lengths.count, x.values.shape[1])
        longer = longer.index_copy(0, row, x.values)
        offsets = lengths.offsets.long()
        back = torch.arange(behind, device=row.device)
        if before is not None:
            starts = offsets[:-1] + behind * torch.arange(lengths.count, device=row.device)
            front = (starts.unsqueeze(1) + back).flatten()
            longer = longer.index_copy(0, front, before.flatten(0, 1).to(longer.dtype))
        # The rows in front of later sequences are computed as well, and left out after.
        rows = longer.shape[0] - behind
        output = longer[behind:] * self.weight[:, -1]
        for distance in range(1, behind + 1):
            shifted = longer[behind - distance :][:rows]
            output = torch.addcmul(output, shifted, self.weight[:, -1 - distance])
        output = output[row - behind] if lengths.count > 1 else output
        output = output if self.bias is None else output + self.bias
        ends = offsets[1:] + behind * torch.arange(lengths.count, device=row.device)
        return F.silu(output), longer[ends.unsqueeze(1) + back]


def _last_tokens(
    x: Ragged, before: Float[Tensor, "b k c"] | None, count: int
) -> Float[Tensor, "b k c"]:
    """The last `count` tokens of each sequence; a shorter one has those of `before`, or zeros."""
    if before is not None and count and x.lengths.longest == 1 and x.lengths.uniform:
        # A step of generation mostly waits for kernels to start.
        new = x.values.unsqueeze(1)
        return torch.cat((before[:, 1:].to(new.dtype), new), dim=1)
    offsets = x.lengths.offsets.long().unsqueeze(1)
    starts, ends = offsets[:-1], offsets[1:]
    back = torch.arange(count, device=offsets.device)
    row = ends - count + back
    missing = (row < starts).unsqueeze(2)
    last = x.values[row.clamp(min=0)]
    if before is None:
        return last.masked_fill(missing, 0)
    sequence = torch.arange(x.lengths.count, device=offsets.device).unsqueeze(1)
    # A row before the start of its sequence is that of `before` as far from its end.
    slot = (row - starts + count).clamp(max=count - 1)
    return torch.where(missing, before[sequence, slot].to(last.dtype), last)
