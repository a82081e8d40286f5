"""DropHead (arXiv 2004.13342): in training a sequence goes without some heads."""

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.ragged import Lengths

__all__ = ["drop_heads"]


def drop_heads(
    read: Float[Tensor, "n h d"], lengths: Lengths, share: float
) -> Float[Tensor, "n h d"]:
    """Each sequence loses some heads; the others are scaled up to make good for them."""
    heads = read.shape[1]
    kept = torch.rand(lengths.count, heads, device=read.device)
    kept = (kept >= share).to(read.dtype)
    kept = kept * (heads / kept.sum(1, keepdim=True).clamp(min=1))
    return read * kept[lengths.sequence_of_token].unsqueeze(-1)
