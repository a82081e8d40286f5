"""Small models of every kind, and batches of mixed lengths for them."""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from manyheads.attention import AttentionConfig
from manyheads.models.build import Model, build
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.padding import Output
from manyheads.models.readout import ClassHead, LanguageHead, Readout, TokenHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2Seq, Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, Vision, VisionConfig
from manyheads.parts.experts import Experts
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.gates import Gate
from manyheads.parts.masks import Causal, GlobalTokens, Window
from manyheads.parts.norms import (
    LayerNorm,
    OutputNorm,
    Placement,
    PostNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
)
from manyheads.parts.positions import (
    Alibi,
    EmbeddingPosition,
    Learned,
    NoPosition,
    Rotary,
    Shaw,
    Sinusoidal,
    T5Buckets,
)
from manyheads.ragged import Ragged

__all__ = [
    "DECODERS",
    "ENCODERS",
    "EVERY_GATE",
    "EXPERTS",
    "HEADS",
    "LENGTHS",
    "MODELS",
    "POSITIONS",
    "SEQ2SEQS",
    "SIZE",
    "TARGETS",
    "VISIONS",
    "VOCABULARY",
    "WIDTH",
    "answer",
    "decoder",
    "encoder",
    "ids",
    "images",
    "layer",
    "own",
    "seq2seq",
    "small",
    "values",
    "vision",
]

VOCABULARY = 29
WIDTH, HEADS, SIZE = 32, 4, 8
POSITIONS = 64
LENGTHS = (5, 1, 12, 0, 7)
TARGETS = (3, 6, 1, 4, 0)

BIG = Initialization(std=0.25)
NOWHERE = NoPosition()
PRE = PreNorm()
WORDS = LanguageHead()
CLASSES = ClassHead(classes=5)
PLAIN = AttentionConfig(width=WIDTH, heads=HEADS)
TWO_STEPS = MLP(width=WIDTH, hidden=40)
EXPERTS = Experts(width=WIDTH, hidden=24, count=4, top_k=2)
EVERY_GATE = (
    Gate(at="query"),
    Gate(at="key", per="channel"),
    Gate(at="value", heads="shared"),
    Gate(at="output", per="channel"),
    Gate(at="final", operation="add", activation="silu"),
)
CONTROL_GATES = (
    Gate(at="query", per="channel", reads="nothing"),
    Gate(at="key", heads="shared", reads="nothing"),
    Gate(at="value", activation="raised_sigmoid"),
    Gate(at="output", per="channel", reads="itself"),
    Gate(at="final", per="channel", reads="nothing", activation="silu", operation="add"),
)


def ids(lengths: Sequence[int] = LENGTHS, *, seed: int = 0) -> Ragged:
    generator = torch.Generator().manual_seed(seed)
    return Ragged.from_list(
        [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths]
    )


def images(sides: Sequence[tuple[int, int]] = ((8, 8), (4, 12), (8, 8), (16, 4))) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(3, *side, generator=generator) for side in sides]


def own(**changes: Any) -> AttentionConfig:
    return replace(PLAIN, **changes)


def layer(
    attention: AttentionConfig | None = PLAIN,
    feedforward: FeedForwardConfig | None = TWO_STEPS,
    *,
    norm: Placement = PRE,
    cross: AttentionConfig | None = None,
    residual: Literal["serial", "parallel"] = "serial",
) -> LayerConfig:
    return LayerConfig(
        residual=residual,
        attention=None if attention is None else Branch(attention, norm),
        cross=None if cross is None else Branch(cross, norm),
        feedforward=None if feedforward is None else Branch(feedforward, norm),
    )


def stack(*layers: LayerConfig) -> StackConfig:
    return StackConfig(width=WIDTH, layers=layers, final_norm=LayerNorm())


def encoder(
    *layers: LayerConfig,
    position: EmbeddingPosition = NOWHERE,
    readout: Readout = WORDS,
    types: int = 0,
) -> EncoderConfig:
    embedding = Embedding(vocabulary=VOCABULARY, width=WIDTH, position=position, types=types)
    return EncoderConfig(embedding=embedding, stack=stack(*layers), readout=readout, init=BIG)


def decoder(
    *layers: LayerConfig, position: EmbeddingPosition = NOWHERE, readout: LanguageHead = WORDS
) -> DecoderConfig:
    embedding = Embedding(vocabulary=VOCABULARY, width=WIDTH, position=position)
    return DecoderConfig(embedding=embedding, stack=stack(*layers), readout=readout, init=BIG)


def seq2seq(
    reads: Sequence[LayerConfig],
    writes: Sequence[LayerConfig],
    *,
    position: EmbeddingPosition = NOWHERE,
    shared: bool = True,
) -> Seq2SeqConfig:
    return Seq2SeqConfig(
        embedding=Embedding(vocabulary=VOCABULARY, width=WIDTH, position=position),
        encoder=stack(*reads),
        decoder=stack(*writes),
        shared=shared,
        init=BIG,
    )


def vision(*layers: LayerConfig, readout: Readout = CLASSES) -> VisionConfig:
    patches = Patches(width=WIDTH, image=8, size=4)
    return VisionConfig(patches=patches, stack=stack(*layers), readout=readout, init=BIG)


CROSS = own(keys_from="memory")
SWIGLU = SwiGLU(width=WIDTH, hidden=40)
GEGLU = GeGLU(width=WIDTH, hidden=40)
ROTARY = own(position=Rotary())
LOCAL = own(position=Rotary(theta=100.0), mask=Window(2, 2))
LEARNED = Learned(count=POSITIONS)


def writes(**changes: Any) -> LayerConfig:
    return layer(own(**{"mask": Causal()} | changes))


ENCODERS: dict[str, EncoderConfig] = {
    "bert": encoder(
        *[layer(own(bias="all"), norm=PostNorm(LayerNorm()))] * 2, position=LEARNED, types=2
    ),
    "modernbert": encoder(layer(ROTARY, GEGLU), layer(LOCAL, GEGLU), layer(LOCAL, GEGLU)),
    "longformer": encoder(
        *[layer(own(mask=Window(2, 2) | GlobalTokens((0,))))] * 2, position=Sinusoidal()
    ),
    "t5": encoder(*[layer(own(position=T5Buckets(buckets=8, reach=10), scale=1.0))] * 2),
    "shaw": encoder(*[layer(own(position=Shaw(reach=3, values=True)))] * 2),
    "tags": encoder(layer(ROTARY), layer(ROTARY), readout=TokenHead(classes=3)),
    "classes": encoder(layer(ROTARY), layer(ROTARY), readout=ClassHead(classes=3, pool="mean")),
}

DECODERS: dict[str, DecoderConfig] = {
    "gpt2": decoder(*[writes(bias="all")] * 2, position=LEARNED),
    "sinusoidal": decoder(*[writes()] * 2, position=Sinusoidal()),
    "llama": decoder(*[layer(own(mask=Causal(), position=Rotary(), kv_heads=2), SWIGLU)] * 2),
    "one key head": decoder(*[writes(position=Rotary(), kv_heads=1)] * 2),
    "window": decoder(*[writes(position=Rotary(), mask=Window(3))] * 2),
    "windows and whole": decoder(
        writes(position=Rotary(), mask=Window(2)),
        writes(position=Rotary()),
        writes(position=Rotary(), mask=Window(4)),
    ),
    "alibi": decoder(*[writes(position=Alibi())] * 2),
    "alibi in a window": decoder(*[writes(position=Alibi(), mask=Window(3))] * 2),
    "t5": decoder(
        *[writes(position=T5Buckets(buckets=8, reach=10, bidirectional=False), scale=1.0)] * 2
    ),
    "t5 in a window": decoder(
        *[writes(position=T5Buckets(buckets=8, bidirectional=False), mask=Window(3))] * 2
    ),
    "shaw": decoder(*[writes(position=Shaw(reach=3))] * 2),
    "gates": decoder(*[writes(position=Rotary(), kv_heads=2, gates=EVERY_GATE)] * 2),
    "control gates": decoder(
        writes(position=Rotary(), kv_heads=2, gates=CONTROL_GATES, output_norm=RMSNorm()),
        writes(gates=(Gate(at="output", reads="nothing"),)),
    ),
    "normed heads": decoder(
        *[writes(position=Rotary(), query_norm=RMSNorm(), key_norm=RMSNorm(), head_size=10)] * 2
    ),
    "sinks": decoder(*[writes(position=Rotary(), sink="learned", head_scale="learned")] * 2),
    "experts": decoder(*[layer(own(mask=Causal(), position=Rotary()), EXPERTS)] * 2),
    "both norms": decoder(
        *[layer(own(mask=Causal(), position=Rotary()), SWIGLU, norm=SandwichNorm(RMSNorm()))] * 2
    ),
    "parallel": decoder(
        *[layer(own(mask=Causal(), position=Rotary(fraction=0.5), bias="all"), residual="parallel")]
        * 2
    ),
    "normed outputs": decoder(
        *[
            layer(
                own(
                    mask=Causal(),
                    position=Rotary(),
                    kv_heads=2,
                    query_norm=RMSNorm(),
                    key_norm=RMSNorm(),
                    norm_span="heads",
                ),
                SWIGLU,
                norm=OutputNorm(RMSNorm()),
            )
        ]
        * 2
    ),
    "capped": decoder(
        *[writes(position=Rotary(), softcap=2.0)] * 2, readout=LanguageHead(softcap=3.0)
    ),
    "uneven": decoder(
        writes(heads=8, position=Rotary()),
        layer(None),
        layer(own(mask=Causal(), heads=3, head_size=6, kv_heads=1), None),
        writes(heads=2),
    ),
}

READS_T5 = layer(own(position=T5Buckets(buckets=8, reach=10), scale=1.0))
WRITES_T5 = layer(
    own(position=T5Buckets(buckets=8, bidirectional=False), mask=Causal(), scale=1.0), cross=CROSS
)
SEQ2SEQS: dict[str, Seq2SeqConfig] = {
    "2017": seq2seq(
        [layer(norm=PostNorm())] * 2,
        [layer(own(mask=Causal()), cross=CROSS, norm=PostNorm())] * 2,
        position=Sinusoidal(),
    ),
    "t5": seq2seq([READS_T5] * 2, [WRITES_T5] * 2),
    "window": seq2seq(
        [layer(LOCAL)] * 2,
        [layer(own(mask=Window(3), position=Rotary()), cross=own(keys_from="memory", kv_heads=2))]
        * 2,
        shared=False,
    ),
    "one layer looks back": seq2seq(
        [layer(ROTARY)], [writes(position=Alibi()), layer(None, cross=CROSS), writes()]
    ),
}

VISIONS: dict[str, VisionConfig] = {
    "vit": vision(*[layer(own(bias="all"))] * 2),
    "mean": vision(
        *[layer(own(kv_heads=2), EXPERTS)] * 2, readout=ClassHead(classes=5, pool="mean")
    ),
}

MODELS: dict[str, ModelConfig] = {
    f"{kind} {name}": config
    for kind, group in (
        ("encoder", ENCODERS),
        ("decoder", DECODERS),
        ("seq2seq", SEQ2SEQS),
        ("vision", VISIONS),
    )
    for name, config in group.items()
}


@cache
def small(config: ModelConfig) -> Any:
    """The model of a config with its weights of seed 0, made once; not to be changed."""
    return build(config, seed=0)


def answer(model: Model, **more: Any) -> Output:
    """What a model of any kind says to a batch of mixed lengths."""
    if isinstance(model, Vision):
        return model(images(), **more)
    if isinstance(model, Seq2Seq):
        return model(ids(), ids(TARGETS, seed=1), **more)
    return model(ids(), **more)


def values(inputs: Ragged | Tensor | None) -> Tensor:
    """The numbers themselves, whatever the layout."""
    assert inputs is not None
    return inputs.values if isinstance(inputs, Ragged) else inputs
