"""How a model knows where a token stands, one scheme a file."""

from manyheads.parts.positions.alibi import Alibi
from manyheads.parts.positions.grid import Grid
from manyheads.parts.positions.learned import Learned
from manyheads.parts.positions.nowhere import NoPosition
from manyheads.parts.positions.relative import Shaw, T5Buckets
from manyheads.parts.positions.rotary import Rotary
from manyheads.parts.positions.sinusoidal import Sinusoidal

__all__ = [
    "AttentionPosition",
    "EmbeddingPosition",
    "Alibi",
    "Grid",
    "Learned",
    "NoPosition",
    "Rotary",
    "Shaw",
    "Sinusoidal",
    "T5Buckets",
]

EmbeddingPosition = NoPosition | Sinusoidal | Learned
AttentionPosition = NoPosition | Rotary | Alibi | T5Buckets | Shaw
