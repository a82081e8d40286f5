"""Configs of known models, one function per architecture."""

from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from manyheads.attention import AttentionConfig
from manyheads.models import decoder, initialization, seq2seq, vision
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, Readout, ReadoutTransform
from manyheads.models.stack import StackConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal, Full, Window
from manyheads.parts.norms import LayerNorm, NoNorm, Placement, PostNorm, PreNorm, RMSNorm
from manyheads.parts.positions import Learned, NoPosition, Rotary, Sinusoidal

ModelConfig = EncoderConfig | decoder.DecoderConfig | seq2seq.Seq2SeqConfig | vision.VisionConfig


def _layer(
    attention: AttentionConfig,
    feedforward: FeedForwardConfig,
    norm: Placement,
    dropout: float = 0.0,
) -> LayerConfig:
    """A layer whose two branches have the same norm and dropout."""
    return LayerConfig(
        attention=Branch(attention, norm, dropout), feedforward=Branch(feedforward, norm, dropout)
    )


def tiny_encoder(
    *, width: int = 128, heads: int = 8, hidden: int = 512, layers: int = 1, vocabulary: int = 4096
) -> EncoderConfig:
    """One encoder layer of the 2017 Transformer, small enough to read number by number."""
    attention = AttentionConfig(width=width, heads=heads, bias="all")
    feedforward = MLP(width=width, hidden=hidden, activation="relu")
    layer = _layer(attention, feedforward, PostNorm(LayerNorm()))
    return EncoderConfig(
        embedding=Embedding(
            vocabulary=vocabulary, width=width, position=Sinusoidal(), scale=width**0.5
        ),
        stack=StackConfig(width=width, layers=(layer,) * layers),
        init=initialization.Initialization(draw="xavier"),
    )


def transformer(
    *,
    width: int,
    heads: int,
    hidden: int,
    layers: int,
    vocabulary: int,
    dropout: float = 0.1,
    layout: Literal["interleaved", "halves"] = "interleaved",
) -> seq2seq.Seq2SeqConfig:
    """The encoder-decoder of "Attention is all you need" (arXiv 1706.03762)."""

    norm = PostNorm(LayerNorm())
    feedforward = MLP(width=width, hidden=hidden, activation="relu")
    own = AttentionConfig(width=width, heads=heads, mask=Full())
    cross = AttentionConfig(width=width, heads=heads, keys_from="memory")
    encodes = _layer(own, feedforward, norm, dropout)
    decodes = _layer(replace(own, mask=Causal()), feedforward, norm, dropout)
    decodes = replace(decodes, cross=Branch(cross, norm, dropout))
    return seq2seq.Seq2SeqConfig(
        embedding=Embedding(
            vocabulary=vocabulary,
            width=width,
            position=Sinusoidal(layout=layout),
            scale=width**0.5,
            dropout=dropout,
        ),
        encoder=StackConfig(width=width, layers=(encodes,) * layers),
        decoder=StackConfig(width=width, layers=(decodes,) * layers),
        readout=LanguageHead(tied=True),
        init=initialization.Initialization(draw="xavier"),
    )


def bert(
    *,
    width: int,
    heads: int,
    hidden: int,
    layers: int,
    vocabulary: int = 30522,
    positions: int = 512,
    dropout: float = 0.1,
    readout: Readout | None = None,
) -> EncoderConfig:
    """BERT (arXiv 1810.04805), by default with its masked-language head."""
    norm = LayerNorm(eps=1e-12)
    attention = AttentionConfig(width=width, heads=heads, bias="all", dropout=dropout)
    layer = _layer(attention, MLP(width=width, hidden=hidden), PostNorm(norm), dropout)
    head = LanguageHead(tied=True, transform=ReadoutTransform(norm=norm), bias=True)
    return EncoderConfig(
        embedding=Embedding(
            vocabulary=vocabulary,
            width=width,
            position=Learned(count=positions),
            types=2,
            norm=norm,
            dropout=dropout,
        ),
        stack=StackConfig(width=width, layers=(layer,) * layers),
        readout=head if readout is None else readout,
    )


def modernbert(
    *,
    width: int,
    heads: int,
    hidden: int,
    layers: int,
    vocabulary: int = 50368,
    window: int = 128,
    global_every: int = 3,
    global_theta: float = 160_000.0,
    local_theta: float = 10_000.0,
    readout: Readout | None = None,
) -> EncoderConfig:
    """ModernBERT (arXiv 2412.13663): full attention in every third layer, windows in the others."""
    norm = LayerNorm(bias=False)

    def layer(index: int) -> LayerConfig:
        full = index % global_every == 0
        attention = AttentionConfig(
            width=width,
            heads=heads,
            position=Rotary(theta=global_theta if full else local_theta),
            mask=Full() if full else Window(window // 2, window // 2),
        )
        # The embedding is already normed, so the first attention has no norm.
        before = PreNorm(NoNorm()) if index == 0 else PreNorm(norm)
        feedforward = GeGLU(width=width, hidden=hidden)
        return LayerConfig(
            attention=Branch(attention, before), feedforward=Branch(feedforward, PreNorm(norm))
        )

    head = LanguageHead(tied=True, transform=ReadoutTransform(norm=norm, bias=False), bias=True)
    return EncoderConfig(
        embedding=Embedding(vocabulary=vocabulary, width=width, norm=norm),
        stack=StackConfig(
            width=width, layers=tuple(layer(index) for index in range(layers)), final_norm=norm
        ),
        readout=head if readout is None else readout,
        init=initialization.Initialization(draw="truncated", scaled_outputs=True),
    )


def gpt2(
    *,
    width: int,
    heads: int,
    layers: int,
    vocabulary: int = 50257,
    positions: int = 1024,
    dropout: float = 0.1,
    hidden: int | Literal["four"] = "four",
    eps: float = 1e-5,
) -> decoder.DecoderConfig:
    """GPT-2: norms before the sublayers, learned positions, a tied head.

    `hidden="four"` makes the feed-forward four times as wide as the model.
    """
    norm = LayerNorm(eps=eps)
    attention = AttentionConfig(
        width=width, heads=heads, mask=Causal(), bias="all", dropout=dropout
    )
    inner = 4 * width if hidden == "four" else hidden
    feedforward = MLP(width=width, hidden=inner, activation="gelu_tanh")
    layer = _layer(attention, feedforward, PreNorm(norm), dropout)
    return decoder.DecoderConfig(
        embedding=Embedding(
            vocabulary=vocabulary, width=width, position=Learned(count=positions), dropout=dropout
        ),
        stack=StackConfig(width=width, layers=(layer,) * layers, final_norm=norm),
        readout=LanguageHead(tied=True),
        init=initialization.Initialization(scaled_outputs=True),
    )


def llama(
    *,
    width: int,
    heads: int,
    kv_heads: int,
    head_size: int,
    hidden: int,
    layers: int,
    vocabulary: int,
    theta: float = 500_000.0,
    eps: float = 1e-5,
    tied: bool = True,
    norm_heads: bool = False,
    gate: Literal["none", "head", "channel"] = "none",
    experts: int = 0,
    top_k: int = 0,
) -> decoder.DecoderConfig:
    """Llama and Qwen3: rotary positions, RMS norms, SwiGLU; optionally output gates and experts."""
    norm = RMSNorm(eps=eps)
    attention = AttentionConfig(
        width=width,
        heads=heads,
        kv_heads=kv_heads,
        head_size=head_size,
        position=Rotary(theta=theta),
        mask=Causal(),
        gates=() if gate == "none" else (Gate(at="output", per=gate),),
        query_norm=norm if norm_heads else NoNorm(),
        key_norm=norm if norm_heads else NoNorm(),
    )
    feedforward: FeedForwardConfig = SwiGLU(width=width, hidden=hidden)
    if experts:
        feedforward = Experts(width=width, hidden=hidden, count=experts, top_k=top_k)
    layer = _layer(attention, feedforward, PreNorm(norm))
    return decoder.DecoderConfig(
        embedding=Embedding(vocabulary=vocabulary, width=width, position=NoPosition()),
        stack=StackConfig(width=width, layers=(layer,) * layers, final_norm=norm),
        readout=LanguageHead(tied=tied),
    )


def vit(
    *,
    width: int,
    heads: int,
    hidden: int,
    layers: int,
    image: int = 224,
    patch: int = 16,
    channels: int = 3,
    classes: int = 1000,
) -> vision.VisionConfig:
    """The vision transformer (arXiv 2010.11929) with its classification head."""
    norm = LayerNorm(eps=1e-12)
    attention = AttentionConfig(width=width, heads=heads, bias="all")
    layer = _layer(attention, MLP(width=width, hidden=hidden), PreNorm(norm))
    return vision.VisionConfig(
        patches=vision.Patches(width=width, image=image, size=patch, channels=channels),
        stack=StackConfig(width=width, layers=(layer,) * layers, final_norm=norm),
        readout=ClassHead(classes=classes) if classes else NoReadout(),
    )


RECIPES: dict[str, Callable[..., ModelConfig]] = {
    "tiny_encoder": tiny_encoder,
    "transformer": transformer,
    "bert": bert,
    "modernbert": modernbert,
    "gpt2": gpt2,
    "llama": llama,
    "vit": vit,
}
