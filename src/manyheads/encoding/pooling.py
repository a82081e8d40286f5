"""The tokens of a text to one vector."""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from manyheads.models.provenance import Pooling
from manyheads.ragged import Ragged

POOLINGS: tuple[Pooling, ...] = ("mean", "cls", "last")


def pool(hidden: Ragged, pooling: Pooling, normalise: bool) -> Float[Tensor, "b c"]:
    """One vector a sequence, in float32 at least: the mean of its tokens, the first or the last."""
    values, lengths = hidden.values, hidden.lengths
    wide = torch.promote_types(values.dtype, torch.float32)
    match pooling:
        case "mean":
            summed = torch.zeros(
                lengths.count, values.shape[1], dtype=wide, device=values.device
            ).index_add_(0, lengths.sequence_of_token, values.to(wide))
            vectors = summed / lengths.offsets.diff().unsqueeze(1)
        case "cls":
            vectors = values[lengths.offsets[:-1].long()].to(wide)
        case "last":
            vectors = values[lengths.offsets[1:].long() - 1].to(wide)
    return F.normalize(vectors, dim=-1) if normalise else vectors
