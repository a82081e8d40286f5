"""Which keys a query may see."""

from manyheads.parts.masks.rules import (
    All,
    Blocks,
    Causal,
    GlobalTokens,
    Mask,
    Prefix,
    RandomBlocks,
    Window,
)

__all__ = [
    "All",
    "Blocks",
    "Causal",
    "GlobalTokens",
    "Mask",
    "Prefix",
    "RandomBlocks",
    "Window",
]
