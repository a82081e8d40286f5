"""Masks turned into what kernels read: a table of booleans, or the word "all" or "causal"."""

from typing import Literal

import torch
from jaxtyping import Bool
from torch import Tensor

from manyheads.parts.masks.rules import Band, Mask

__all__ = ["Simple", "exact_band", "simple_form", "visible"]

Simple = Literal["all", "causal", "other"]


def visible(
    mask: Mask, rows: range, queries: int, keys: int, device: torch.device
) -> Bool[Tensor, "t s"]:
    """Which keys the given rows of queries see, the last query standing at the last key.

    >>> from manyheads.parts.masks import Causal
    >>> visible(Causal(), range(2), 2, 3, torch.device("cpu")).int().tolist()
    [[1, 1, 0], [1, 1, 1]]
    """
    query = torch.arange(rows.start, rows.stop, device=device) + (keys - queries)
    key = torch.arange(keys, device=device)
    length = torch.full((1, 1), keys, device=device)
    return mask.allows(query[:, None], key[None, :], length)


def exact_band(mask: Mask) -> Band | None:
    """The band the mask is, if it is one."""
    return mask.reach if mask.fills_reach else None


def simple_form(mask: Mask, queries: int, keys: int) -> Simple:
    """Whether for these lengths the mask hides nothing, hides only the future, or is its own.

    >>> from manyheads.parts.masks import Window
    >>> simple_form(Window(64, 64), 50, 50), simple_form(Window(64), 50, 50)
    ('all', 'causal')
    """
    band = exact_band(mask)
    if band is None or band.before < keys - 1:
        return "other"
    # The last query stands at the last key, so the first has queries - 1 keys ahead of it.
    if band.after >= queries - 1:
        return "all"
    return "causal" if band.after == 0 and queries == keys else "other"
