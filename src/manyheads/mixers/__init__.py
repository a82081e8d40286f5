"""What can stand where attention stood in a layer: a state of fixed size in place of a cache."""

from manyheads.mixers.fourier import Fourier
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.performer import Performer
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.mixers.recurrent.kimi_delta import KimiDelta
from manyheads.mixers.recurrent.mamba import Mamba
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.mixers.sparse.longformer import Longformer, global_tokens

__all__ = [
    "Fourier",
    "GatedDelta",
    "KimiDelta",
    "LinearAttention",
    "Longformer",
    "Mamba",
    "Mamba2",
    "Performer",
    "global_tokens",
]
