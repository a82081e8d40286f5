"""What can stand where attention stood in a layer: a state of fixed size in place of a cache."""

from manyheads.mixers.fourier import Fourier
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.mixers.recurrent.mamba import Mamba
from manyheads.mixers.recurrent.mamba2 import Mamba2

__all__ = ["Fourier", "GatedDelta", "LinearAttention", "Mamba", "Mamba2"]
