"""A convolution of neighbouring tokens beside a layer, as in DeBERTa v2."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import DropoutRate, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.errors import ConfigError
from manyheads.parts.feedforward import ACTIVATIONS, Activation
from manyheads.parts.norms import LayerNorm, Norm, make_norm
from manyheads.ragged import Ragged


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class Convolution:
    """norm(y + act(convolution(x))) of the input x and the output y of a layer (arXiv 2006.03654).

    A token meets `size` tokens, itself in the middle; channels meet within `groups` of equal size.
    """

    width: PositiveInt
    size: PositiveInt = 3
    groups: PositiveInt = 1
    activation: Activation = "tanh"
    norm: Norm = LayerNorm()
    dropout: DropoutRate = 0.0

    def __post_init__(self) -> None:
        if self.size % 2 == 0:
            raise ConfigError(f"size must be odd, got {self.size}", "use 3 or 5")
        if self.width % self.groups:
            raise ConfigError(f"groups must divide width={self.width}, got {self.groups}")


class ConvolutionLayer(nn.Module):
    """The weights of a `Convolution`."""

    def __init__(self, config: Convolution) -> None:
        super().__init__()
        self.config = config
        self.convolve = nn.Conv1d(config.width, config.width, config.size, groups=config.groups)
        self.norm = make_norm(config.norm, config.width)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: Ragged, y: Float[Tensor, "n c"]) -> Float[Tensor, "n c"]:
        if not y.shape[0]:
            return y
        # Zeros before each sequence and after the last keep sequences apart.
        reach, lengths = self.config.size // 2, x.lengths
        row = torch.arange(y.shape[0], device=y.device) + reach * lengths.sequence_of_token
        rows = y.shape[0] + reach * (lengths.count + 1)
        spaced = x.values.new_zeros(rows, y.shape[1]).index_copy(0, row + reach, x.values)
        mixed = self.convolve(spaced.T.unsqueeze(0)).squeeze(0).T[row]
        written = ACTIVATIONS[self.config.activation](self.dropout(mixed))
        normed: Tensor = self.norm(y + written)
        return normed
