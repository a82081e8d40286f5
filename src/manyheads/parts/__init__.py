"""The parts of a layer: masks, positions, norms, feed-forwards, experts and gates."""

from manyheads.parts.convolution import Convolution
from manyheads.parts.experts import ClampedSwiGLU, Experts
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.halting import Halting
from manyheads.parts.masks import Blocks, Causal, Full, GlobalTokens, Prefix, RandomBlocks, Window
from manyheads.parts.norms import (
    LayerNorm,
    NoNorm,
    OutputNorm,
    PostNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
    ScaledPreNorm,
)
from manyheads.parts.positions import (
    Alibi,
    Axial,
    Disentangled,
    Learned,
    LearnedGrid,
    NoPosition,
    Rotary,
    Shaw,
    Sinusoidal,
    T5Buckets,
)
from manyheads.parts.positions.rotary import (
    DynamicScaling,
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    NoScaling,
    NTKScaling,
    YarnScaling,
)

__all__ = [
    "Alibi",
    "Axial",
    "Blocks",
    "Causal",
    "ClampedSwiGLU",
    "Disentangled",
    "Convolution",
    "Experts",
    "Full",
    "Gate",
    "GeGLU",
    "GlobalTokens",
    "Halting",
    "LayerNorm",
    "Learned",
    "LearnedGrid",
    "DynamicScaling",
    "LinearScaling",
    "Llama3Scaling",
    "MLP",
    "LongRopeScaling",
    "NTKScaling",
    "NoNorm",
    "NoPosition",
    "NoScaling",
    "OutputNorm",
    "PostNorm",
    "PreNorm",
    "Prefix",
    "RMSNorm",
    "RandomBlocks",
    "Rotary",
    "SandwichNorm",
    "ScaledPreNorm",
    "Shaw",
    "Sinusoidal",
    "SwiGLU",
    "T5Buckets",
    "Window",
    "YarnScaling",
]
