"""The mixers, each a config and its layer: the one table that a new mixer is added to."""

from typing import TYPE_CHECKING, Union

from manyheads.mixers.fourier import Fourier, FourierLayer
from manyheads.mixers.latent_queries import LatentQueries, LatentQueriesLayer
from manyheads.mixers.linear_attention import LinearAttention, LinearAttentionLayer
from manyheads.mixers.lsh_attention import LshAttention, LshAttentionLayer
from manyheads.mixers.memory.knn_memory import KnnMemory, KnnMemoryLayer
from manyheads.mixers.memory.segment_recurrence import SegmentRecurrence, SegmentRecurrenceLayer
from manyheads.mixers.mixer import Mixer, MixerSettings
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

MIXERS: dict[type[MixerSettings], type[Mixer]] = {
    BigBird: BigBirdLayer,
    Fourier: FourierLayer,
    GatedDelta: GatedDeltaLayer,
    KimiDelta: KimiDeltaLayer,
    KnnMemory: KnnMemoryLayer,
    LatentQueries: LatentQueriesLayer,
    LinearAttention: LinearAttentionLayer,
    Longformer: LongformerLayer,
    LshAttention: LshAttentionLayer,
    Mamba: MambaLayer,
    Mamba2: Mamba2Layer,
    MixtureOfHeads: MixtureOfHeadsLayer,
    MlpMixer: MlpMixerLayer,
    Performer: PerformerLayer,
    RoutingAttention: RoutingAttentionLayer,
    S4D: S4DLayer,
    SegmentRecurrence: SegmentRecurrenceLayer,
}

# A type checker cannot follow a table: to it, a config is whatever has their base.
if TYPE_CHECKING:
    MixerConfig = MixerSettings
else:
    MixerConfig = Union[tuple(MIXERS)]  # noqa: UP007


def make_mixer(config: MixerConfig) -> Mixer:
    return MIXERS[type(config)](config)
