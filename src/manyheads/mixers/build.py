"""A mixer from its config."""

from manyheads.mixers.gated_delta import GatedDelta, GatedDeltaLayer
from manyheads.mixers.linear_attention import LinearAttention, LinearAttentionLayer
from manyheads.mixers.mamba2 import Mamba2, Mamba2Layer
from manyheads.mixers.mixer import Mixer

MixerConfig = LinearAttention | Mamba2 | GatedDelta


def make_mixer(config: MixerConfig) -> Mixer:
    match config:
        case LinearAttention():
            return LinearAttentionLayer(config)
        case Mamba2():
            return Mamba2Layer(config)
        case GatedDelta():
            return GatedDeltaLayer(config)
