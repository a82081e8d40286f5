"""A mixer from its config."""

from manyheads.mixers.fourier import Fourier, FourierLayer
from manyheads.mixers.latent_queries import LatentQueries, LatentQueriesLayer
from manyheads.mixers.linear_attention import LinearAttention, LinearAttentionLayer
from manyheads.mixers.lsh_attention import LshAttention, LshAttentionLayer
from manyheads.mixers.memory.knn_memory import KnnMemory, KnnMemoryLayer
from manyheads.mixers.memory.segment_recurrence import (
    SegmentRecurrence,
    SegmentRecurrenceLayer,
)
from manyheads.mixers.mixer import Mixer
from manyheads.mixers.mixture_of_heads import MixtureOfHeads, MixtureOfHeadsLayer
from manyheads.mixers.mlp_mixer import MlpMixer, MlpMixerLayer
from manyheads.mixers.performer import Performer, PerformerLayer
from manyheads.mixers.recurrent.gated_delta import GatedDelta, GatedDeltaLayer
from manyheads.mixers.recurrent.kimi_delta import KimiDelta, KimiDeltaLayer
from manyheads.mixers.recurrent.mamba import Mamba, MambaLayer
from manyheads.mixers.recurrent.mamba2 import Mamba2, Mamba2Layer
from manyheads.mixers.recurrent.s4d import S4D, S4DLayer
from manyheads.mixers.sparse.big_bird import BigBird, BigBirdLayer
from manyheads.mixers.sparse.longformer import Longformer, LongformerLayer
from manyheads.mixers.sparse.routing_attention import RoutingAttention, RoutingAttentionLayer

MixerConfig = (
    RoutingAttention
    | LatentQueries
    | MixtureOfHeads
    | KimiDelta
    | Fourier
    | KnnMemory
    | MlpMixer
    | SegmentRecurrence
    | BigBird
    | Longformer
    | LinearAttention
    | LshAttention
    | Mamba
    | Mamba2
    | Performer
    | S4D
    | GatedDelta
)


def make_mixer(config: MixerConfig) -> Mixer:
    match config:
        case KnnMemory():
            return KnnMemoryLayer(config)
        case MlpMixer():
            return MlpMixerLayer(config)
        case SegmentRecurrence():
            return SegmentRecurrenceLayer(config)
        case BigBird():
            return BigBirdLayer(config)
        case Longformer():
            return LongformerLayer(config)
        case Fourier():
            return FourierLayer(config)
        case LinearAttention():
            return LinearAttentionLayer(config)
        case LshAttention():
            return LshAttentionLayer(config)
        case Mamba():
            return MambaLayer(config)
        case Performer():
            return PerformerLayer(config)
        case S4D():
            return S4DLayer(config)
        case Mamba2():
            return Mamba2Layer(config)
        case GatedDelta():
            return GatedDeltaLayer(config)
        case KimiDelta():
            return KimiDeltaLayer(config)
        case MixtureOfHeads():
            return MixtureOfHeadsLayer(config)
        case LatentQueries():
            return LatentQueriesLayer(config)
        case RoutingAttention():
            return RoutingAttentionLayer(config)
