"""The ordinary decoder, GPT-2, Llama and their kin, whose step can be computed from its weights.

Steps that bypass the modules are written only for these. `why_not_ordinary` alone defines which
decoders they are, and `DecoderWeights` has the weights of such a step.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.formatting import kind_of
from manyheads.models.decoder import Decoder
from manyheads.models.layer import Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.parts import experts, masks
from manyheads.parts.feedforward import Activation, FeedForward
from manyheads.parts.norms import NoNorm, PreNorm
from manyheads.parts.positions import NoPosition, Rotary
from manyheads.quantization.integer_layers import IntegerLinear, IntegerWeight

PROJECTIONS = (
    "attention.project",
    "attention.output",
    "feedforward.expand",
    "feedforward.contract",
)


def why_not_ordinary(model: object) -> Iterator[str]:
    """The reasons why a model is not an ordinary decoder; none if it is one.

    An ordinary decoder has pre-norm layers of attention and a dense feed-forward, rotary positions
    or none in attention, a causal mask or a window, and a plain language head.
    """
    if not isinstance(model, Decoder):
        yield f"{type(model).__name__} is not a decoder"
        return
    head = model.config.readout
    plain = isinstance(head, LanguageHead) and head.transform is None
    if not plain or getattr(head, "softcap", "none") != "none":
        yield "the readout is not a plain language head"
    if model.config.stack.halting is not None:
        yield "its tokens stop on their own"
    for index, layer in enumerate(model.config.stack.layers):
        for reason in _why_not_ordinary_layer(layer):
            yield f"layer {index} {reason}"
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks:
            yield f"{name or 'the model'} has a forward hook"
        # An adapter, for one, computes more than a product with `weight`.
        linear = isinstance(module, nn.Linear) or name.endswith(PROJECTIONS)
        if linear and type(module) not in (nn.Linear, IntegerLinear):
            yield f"{name} is {kind_of(module)}, not a plain Linear"


def _why_not_ordinary_layer(layer: LayerConfig) -> Iterator[str]:
    attention, feedforward = layer.attention, layer.feedforward
    if attention is None or feedforward is None or layer.cross is not None:
        yield "is not made of self-attention and a feed-forward"
        return
    if layer.residual == "reversible":
        yield "has two residual streams"
    if isinstance(feedforward.inner, experts.Experts):
        yield "has experts"
    if not (isinstance(attention.norm, PreNorm) and isinstance(feedforward.norm, PreNorm)):
        yield "is not pre-norm"
    config = attention.inner
    if config.gates or config.sink != "none" or config.head_scale != "none":
        yield "has gates, a sink or scaled heads"
    if not isinstance(config.output_norm, NoNorm):
        yield "norms the outputs of its heads"
    if config.softcap != "none":
        yield "caps its scores"
    if config.norm_span == "heads" and config.query_norm != NoNorm():
        yield "norms the queries of all heads together"
    if config.groups is not None:
        yield "shares keys unevenly"
    if not isinstance(config.position, NoPosition | Rotary):
        yield f"has a position bias, {type(config.position).__name__}"
    if masks.exact_band(config.mask) is None:
        yield f"has the mask {config.mask}, which is neither causal nor a window"
    if config.kernel != "auto":
        yield f"requires the kernel {config.kernel!r}"


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The modules of an ordinary layer that hold its weights."""

    attention: AttentionConfig
    attention_norm: nn.Module
    project: nn.Linear
    query_norm: nn.Module | None
    key_norm: nn.Module | None
    output: nn.Linear
    feedforward_norm: nn.Module
    expand: nn.Linear
    activation: Activation
    gated: bool
    contract: nn.Linear
    parallel: bool

    @classmethod
    def of(cls, layer: Layer) -> "LayerWeights":
        attention, feedforward = layer.attention, layer.feedforward
        assert isinstance(attention, Attention)
        assert isinstance(feedforward, FeedForward)
        config = attention.config
        return cls(
            attention=config,
            attention_norm=layer.attention_residual.norm,
            project=attention.project,
            query_norm=None if isinstance(config.query_norm, NoNorm) else attention.query_norm,
            key_norm=None if isinstance(config.key_norm, NoNorm) else attention.key_norm,
            output=attention.output,
            feedforward_norm=layer.feedforward_residual.norm,
            expand=feedforward.expand,
            activation=feedforward.config.activation,
            gated=feedforward.gated,
            contract=feedforward.contract,
            parallel=layer.parallel,
        )


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """What an ordinary decoder computes with after the embedding, up to the logits."""

    layers: tuple[LayerWeights, ...]
    final_norm: nn.Module
    logit_scale: float
    vocabulary: Float[Tensor, "v c"] | IntegerWeight
    vocabulary_bias: Float[Tensor, " v"] | None

    @classmethod
    def of(cls, model: Decoder) -> "DecoderWeights":
        readout, head = model.readout, model.config.readout
        assert readout is not None
        assert isinstance(head, LanguageHead)
        table, product = model.embedding.tokens, readout.product
        vocabulary: Tensor | IntegerWeight
        if isinstance(table, IntegerWeight):
            vocabulary = product if isinstance(product, IntegerLinear) else table
        else:
            vocabulary = readout.vectors(table.weight)
        return cls(
            layers=tuple(LayerWeights.of(cast(Layer, layer)) for layer in model.stack.layers),
            final_norm=model.stack.final_norm,
            logit_scale=head.scale,
            vocabulary=vocabulary,
            vocabulary_bias=readout.bias,
        )
