"""The twelve models of the study: equal in size, different in what stands where attention stood."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from manyheads import AttentionConfig, build
from manyheads.mixers import (
    S4D,
    GatedDelta,
    KimiDelta,
    LinearAttention,
    LshAttention,
    Mamba,
    Mamba2,
    Performer,
)
from manyheads.models import (
    Branch,
    Decoder,
    DecoderConfig,
    Embedding,
    Initialization,
    LanguageHead,
    LayerConfig,
    StackConfig,
)
from manyheads.parts import Causal, NoPosition, RMSNorm, Rotary, Sinusoidal, SwiGLU, Window

# Between them, tokens of a hybrid meet in every fourth layer.
ATTENDS_EVERY = 4
Make = Callable[[int, int], Any]


def attention(mask: Any) -> Make:
    """With norms of queries and keys, as in Qwen3; without them recall is learned much later."""
    return lambda width, heads: AttentionConfig(
        width=width,
        heads=heads,
        mask=mask,
        position=Rotary(),
        query_norm=RMSNorm(),
        key_norm=RMSNorm(),
    )


def delta(width: int, heads: int) -> GatedDelta:
    size = width // heads
    return GatedDelta(width=width, heads=heads, head_size=size, key_heads=heads, key_size=size)


def mamba2(width: int, heads: int) -> Mamba2:
    return Mamba2(width=width, heads=2 * heads, head_size=width // heads, state_size=64)


KINDS: dict[str, Make] = {
    "full attention": attention(Causal()),
    "local window of 64": attention(Window(64)),
    "linear": lambda width, heads: LinearAttention(width=width, heads=heads),
    "retention": lambda width, heads: LinearAttention(width=width, heads=heads, decay="heads"),
    "Performer": lambda width, heads: Performer(width=width, heads=heads, features=128),
    "LSH": lambda width, heads: LshAttention(width=width, heads=heads, chunk=32, rounds=2),
    "S4D": lambda width, _: S4D(width=width),
    "Mamba": lambda width, _: Mamba(width=width, inner=2 * width, dt_rank=width // 16),
    "Mamba-2": mamba2,
    "gated delta net": delta,
    "Kimi delta": lambda width, heads: KimiDelta(
        width=width, heads=heads, head_size=width // heads
    ),
    "hybrid: delta net, every fourth full": delta,
}
# Without a decay, a convolution or rotary angles nothing tells these the order of tokens.
NEEDS_POSITIONS = ("linear", "Performer", "LSH")


def make_model(
    kind: str, *, vocabulary: int, width: int, layers: int, heads: int, parameters: int
) -> Decoder:
    """A decoder of about so many parameters outside the embedding; feed-forwards take the rest."""
    made = [KINDS[kind](width, heads) for _ in range(layers)]
    if kind.startswith("hybrid"):
        full = KINDS["full attention"](width, heads)
        made = [full if index % ATTENDS_EVERY == 3 else one for index, one in enumerate(made)]
    config = DecoderConfig(
        embedding=Embedding(
            vocabulary=vocabulary,
            width=width,
            position=Sinusoidal() if kind in NEEDS_POSITIONS else NoPosition(),
        ),
        stack=StackConfig(width=width, layers=tuple(_layer(one, width, 8) for one in made)),
        readout=LanguageHead(),
        init=Initialization(draw="xavier"),
    )
    # Three matrices of `width` times `hidden` in every layer.
    left = parameters - count(build(config, seed=0))
    hidden = 8 + max(left // (3 * width * layers) // 8 * 8, 0)
    stack = replace(config.stack, layers=tuple(_layer(one, width, hidden) for one in made))
    model = build(replace(config, stack=stack), seed=0)
    assert isinstance(model, Decoder)
    return model


def count(model: Any) -> int:
    """Parameters outside the embedding and the readout."""
    return sum(each.numel() for each in model.stack.parameters())


def _layer(one: Any, width: int, hidden: int) -> LayerConfig:
    attends = isinstance(one, AttentionConfig)
    branch = Branch(one)
    return LayerConfig(
        attention=branch if attends else None,
        mixer=None if attends else branch,
        feedforward=Branch(SwiGLU(width=width, hidden=hidden)),
    )
