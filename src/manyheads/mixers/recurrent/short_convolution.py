"""A short causal convolution of every channel, over the tokens of each sequence on its own."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.ragged import Ragged


class ShortConvolution(nn.Module):
    """Each channel mixes a token with the `size` - 1 before it, then SiLU."""

    def __init__(self, channels: int, size: int, *, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(channels, size))
        self.bias = nn.Parameter(torch.zeros(channels)) if bias else None
        nn.init.uniform_(self.weight, -(size**-0.5), size**-0.5)

    def forward(
        self, x: Ragged, before: Float[Tensor, "b k c"] | None = None
    ) -> tuple[Float[Tensor, "n c"], Float[Tensor, "b k c"]]:
        """The outputs, and the last tokens of each sequence, which the next token will need.

        `before` are those of the tokens that came before; without it there were none.
        """
        lengths, behind = x.lengths, self.weight.shape[1] - 1
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
