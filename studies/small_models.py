"""Decoders of bytes that studies train: Llama's parts at a few million weights."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from manyheads import AttentionConfig, build
from manyheads.models import (
    Branch,
    Decoder,
    DecoderConfig,
    Embedding,
    LanguageHead,
    LayerConfig,
    StackConfig,
)
from manyheads.parts import Causal, NoPosition, PreNorm, RMSNorm, Rotary, SwiGLU

VOCABULARY = 256


def language_model(
    *,
    width: int,
    layers: int,
    heads: int,
    hidden: int | None = None,
    vocabulary: int = VOCABULARY,
    attention: dict[str, Any] | None = None,
    feedforward: Any = None,
    norm: Any = None,
    mixers: Sequence[Any] = (),
    seed: int = 0,
) -> Decoder:
    """A decoder with rotary positions, RMS norms before each branch and SwiGLU.

    `attention` changes fields of the attention config, `feedforward` is the config of all
    feed-forwards, `norm` where branches are normed; `mixers` stand where attention stood, one for
    each layer. By default feed-forwards are 8/3 as wide as the model, in multiples of 8.
    """
    base = AttentionConfig(width=width, heads=heads, mask=Causal(), position=Rotary())
    mix = list(mixers) or [replace(base, **(attention or {}))] * layers
    inner = feedforward or SwiGLU(width=width, hidden=hidden or default_hidden(width))
    around = {"norm": norm or PreNorm(RMSNorm())}
    config = DecoderConfig(
        embedding=Embedding(vocabulary=vocabulary, width=width, position=NoPosition()),
        stack=StackConfig(
            width=width,
            layers=tuple(
                LayerConfig(
                    attention=Branch(one, **around) if isinstance(one, AttentionConfig) else None,
                    mixer=None if isinstance(one, AttentionConfig) else Branch(one, **around),
                    feedforward=Branch(inner, **around),
                )
                for one in mix
            ),
            final_norm=RMSNorm(),
        ),
        readout=LanguageHead(),
    )
    model = build(config, seed=seed)
    assert isinstance(model, Decoder)
    return model


def default_hidden(width: int) -> int:
    return width * 8 // 3 // 8 * 8


def matched_model(weights: int, *, width: int, layers: int, **shape: Any) -> Decoder:
    """A language model whose feed-forwards are as wide as makes `weights` of them in all."""
    spare = weights - count_parameters(language_model(width=width, layers=layers, **shape))
    hidden = max(1, default_hidden(width) + round(spare / (3 * width * layers)))
    return language_model(width=width, layers=layers, hidden=hidden, **shape)


def count_parameters(model: Any) -> int:
    """Weights outside the embedding and the readout."""
    return sum(each.numel() for each in model.stack.parameters())
