"""The mixers, each a config and its layer: the one table that a new mixer is added to."""

from typing import TYPE_CHECKING, Union

from manyheads.mixers import (
    fourier,
    latent_queries,
    linear_attention,
    lsh_attention,
    mixture_of_heads,
    mlp_mixer,
    performer,
)
from manyheads.mixers.memory import knn_memory, segment_recurrence
from manyheads.mixers.mixer import Mixer, MixerSettings
from manyheads.mixers.recurrent import gated_delta, kimi_delta, lstm, mamba, mamba2, s4d
from manyheads.mixers.sparse import big_bird, longformer, routing_attention

MIXERS: dict[type[MixerSettings], type[Mixer]] = {
    big_bird.BigBird: big_bird.BigBirdLayer,
    fourier.Fourier: fourier.FourierLayer,
    gated_delta.GatedDelta: gated_delta.GatedDeltaLayer,
    kimi_delta.KimiDelta: kimi_delta.KimiDeltaLayer,
    knn_memory.KnnMemory: knn_memory.KnnMemoryLayer,
    latent_queries.LatentQueries: latent_queries.LatentQueriesLayer,
    linear_attention.LinearAttention: linear_attention.LinearAttentionLayer,
    longformer.Longformer: longformer.LongformerLayer,
    lsh_attention.LshAttention: lsh_attention.LshAttentionLayer,
    lstm.Lstm: lstm.LstmLayer,
    mamba.Mamba: mamba.MambaLayer,
    mamba2.Mamba2: mamba2.Mamba2Layer,
    mixture_of_heads.MixtureOfHeads: mixture_of_heads.MixtureOfHeadsLayer,
    mlp_mixer.MlpMixer: mlp_mixer.MlpMixerLayer,
    performer.Performer: performer.PerformerLayer,
    routing_attention.RoutingAttention: routing_attention.RoutingAttentionLayer,
    s4d.S4D: s4d.S4DLayer,
    segment_recurrence.SegmentRecurrence: segment_recurrence.SegmentRecurrenceLayer,
}

# A type checker cannot follow a table: to it, a config is whatever has their base.
if TYPE_CHECKING:
    MixerConfig = MixerSettings
else:
    MixerConfig = Union[tuple(MIXERS)]  # noqa: UP007


def make_mixer(config: MixerConfig) -> Mixer:
    return MIXERS[type(config)](config)
