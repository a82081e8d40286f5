"""Position schemes, one per file."""

from manyheads.parts.positions.absolute import Axial, Learned, LearnedGrid, NoPosition, Sinusoidal
from manyheads.parts.positions.alibi import Alibi
from manyheads.parts.positions.disentangled import Disentangled
from manyheads.parts.positions.relative import Shaw, T5Buckets
from manyheads.parts.positions.rotary import Rotary

__all__ = [
    "AttentionPosition",
    "EmbeddingPosition",
    "Alibi",
    "Axial",
    "Disentangled",
    "LearnedGrid",
    "Learned",
    "NoPosition",
    "Rotary",
    "Shaw",
    "Sinusoidal",
    "T5Buckets",
]

EmbeddingPosition = NoPosition | Sinusoidal | Learned | Axial
AttentionPosition = NoPosition | Rotary | Alibi | T5Buckets | Shaw | Disentangled
