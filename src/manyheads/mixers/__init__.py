"""What can stand where attention stood in a layer: a state of fixed size in place of a cache."""

from manyheads.mixers.fourier import Fourier
from manyheads.mixers.latent_queries import LatentQueries
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.lsh_attention import LshAttention
from manyheads.mixers.memory.knn_memory import KnnMemory
from manyheads.mixers.memory.segment_recurrence import SegmentRecurrence
from manyheads.mixers.mixture_of_heads import MixtureOfHeads
from manyheads.mixers.mlp_mixer import MlpMixer
from manyheads.mixers.performer import Performer
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.mixers.recurrent.kimi_delta import KimiDelta
from manyheads.mixers.recurrent.lstm import Lstm
from manyheads.mixers.recurrent.mamba import Mamba
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.mixers.recurrent.s4d import S4D
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.mixers.sparse.longformer import Longformer, global_tokens
from manyheads.mixers.sparse.routing_attention import RoutingAttention

__all__ = [
    "BigBird",
    "Fourier",
    "GatedDelta",
    "KimiDelta",
    "KnnMemory",
    "LatentQueries",
    "LinearAttention",
    "Longformer",
    "LshAttention",
    "Lstm",
    "Mamba",
    "Mamba2",
    "MixtureOfHeads",
    "MlpMixer",
    "Performer",
    "RoutingAttention",
    "S4D",
    "SegmentRecurrence",
    "global_tokens",
]
