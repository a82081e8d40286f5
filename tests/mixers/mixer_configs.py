"""One small config of every mixer, for the tests that all of them must pass."""

from manyheads.mixers.build import MixerConfig
from manyheads.mixers.fourier import Fourier
from manyheads.mixers.latent_queries import LatentQueries
from manyheads.mixers.linear_attention import LinearAttention
from manyheads.mixers.lsh_attention import LshAttention
from manyheads.mixers.memory.knn_memory import KnnMemory
from manyheads.mixers.memory.segment_recurrence import SegmentRecurrence
from manyheads.mixers.mixture_of_heads import MixtureOfHeads
from manyheads.mixers.performer import Performer
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.mixers.recurrent.kimi_delta import KimiDelta
from manyheads.mixers.recurrent.lstm import Lstm
from manyheads.mixers.recurrent.mamba import Mamba
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.mixers.recurrent.s4d import S4D
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.mixers.sparse.longformer import Longformer
from manyheads.mixers.sparse.routing_attention import RoutingAttention
from manyheads.models.build import build
from manyheads.models.decoder import Decoder, DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import Encoder, EncoderConfig
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig
from manyheads.parts import SwiGLU

WIDTH, VOCABULARY = 16, 50
CAUSAL: dict[str, MixerConfig] = {
    "routing": RoutingAttention(width=WIDTH, heads=2, clusters=3, window=5),
    "heads": MixtureOfHeads(width=WIDTH, heads=4, top_k=2, shared=1),
    "segments": SegmentRecurrence(width=WIDTH, heads=2, segment=8, memory=11),
    "knn": KnnMemory(width=WIDTH, heads=2, window=5, memory=20, top_k=3),
    "kimi delta": KimiDelta(width=WIDTH, heads=2, head_size=6),
    "linear": LinearAttention(width=WIDTH, heads=2),
    "retention": LinearAttention(width=WIDTH, heads=2, decay="heads"),
    "lsh": LshAttention(width=WIDTH, heads=2, chunk=128, rounds=2),
    "s4d": S4D(width=WIDTH, state_size=8),
    "lstm": Lstm(width=WIDTH, inner=24),
    "mamba": Mamba(width=WIDTH, inner=24, state_size=5, dt_rank=3),
    "performer": Performer(width=WIDTH, heads=2, features=12),
    "mamba2": Mamba2(width=WIDTH, heads=4, head_size=8, state_size=6, groups=2),
    "delta": GatedDelta(width=WIDTH, heads=4, head_size=8, key_heads=2, key_size=6),
}
# Those that keep every token.
GROWING = {"heads", "lsh"}
BOTH_WAYS: dict[str, MixerConfig] = {
    "latents": LatentQueries(width=WIDTH, heads=2, latents=3),
    "s4d": S4D(width=WIDTH, state_size=8, causal=False),
    "lsh": LshAttention(width=WIDTH, heads=2, causal=False, chunk=16, rounds=2),
    "performer": Performer(width=WIDTH, heads=2, features=12, causal=False),
    "fourier": Fourier(width=WIDTH),
    "big_bird": BigBird(width=WIDTH, heads=2, block=3, random_blocks=2),
    "longformer": Longformer(width=WIDTH, heads=2, window=3, global_positions=(0, -1)),
    "linear": LinearAttention(width=WIDTH, heads=2, causal=False),
}


def small_model(*mixers: MixerConfig) -> Decoder | Encoder:
    """A decoder of causal mixers or an encoder of others, one layer for each, weights random."""
    layers = tuple(
        LayerConfig(
            attention=None,
            mixer=Branch(mixer),
            feedforward=Branch(SwiGLU(width=WIDTH, hidden=20)),
        )
        for mixer in mixers
    )
    config = (DecoderConfig if mixers[0].causal else EncoderConfig)(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH),
        stack=StackConfig(width=WIDTH, layers=layers),
        readout=LanguageHead(),
    )
    model = build(config, seed=0)
    assert isinstance(model, Decoder | Encoder)
    return model.eval()
