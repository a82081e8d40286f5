"""The step of a Llama-like decoder for one sequence, in five kernels a layer.

Such a step only reads the weights, so that every kernel less is time won: norms, turns, gates and
residuals are done on the way.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from manyheads.attention import Attention, AttentionConfig
from manyheads.cache import Cache, StaticCachePlan
from manyheads.models.decoder import Decoder
from manyheads.models.layer import Branch, FeedForwardConfig, Layer, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.parts.feedforward import FeedForward, SwiGLU
from manyheads.parts.masks.rules import Causal, Window
from manyheads.parts.norms import NoNorm, Pre, RMSNorm
from manyheads.parts.positions import NoPosition, Rotary

__all__ = ["cannot", "program"]

HALF = (torch.bfloat16, torch.float16)
SIZES = (32, 64, 128)
# One program reads all keys of a head, which for more of them takes longer than several would.
LARGEST_ROOM = 8192


def cannot(model: Decoder, sequences: int, room: int) -> str | None:
    """Why these kernels do not fit this model or batch; None if they do."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cuda" or find_spec("triton") is None:
        return "the lean step needs CUDA and triton"
    if any(parameter.dtype not in HALF for parameter in parameters):
        return "the lean step knows float16 and bfloat16"
    if sequences != 1:
        return f"{sequences} sequences are a matter for matrix products"
    if room > LARGEST_ROOM:
        return f"a room of {room} tokens wants several programs a head"
    return next(_differences(model), None)


def _differences(model: Decoder) -> Iterator[str]:
    config = model.config
    embedding, head = config.embedding, config.readout
    if not isinstance(embedding.position, NoPosition) or embedding.types:
        yield "the embedding adds positions or types"
    if not isinstance(embedding.norm, NoNorm) or not _plain_norm(config.stack.final_norm):
        yield "an RMS norm is wanted after the last layer and none after the embedding"
    if not isinstance(head, LanguageHead) or head.transform is not None or head.scale != 1.0:
        yield "the readout is no plain language head"
    for index, layer in enumerate(config.stack.layers):
        for difference in _layer_differences(layer):
            yield f"layer {index} {difference}"


def _layer_differences(layer: LayerConfig) -> Iterator[str]:
    attention, feedforward = layer.attention, layer.feedforward
    if attention is None or feedforward is None or layer.cross is not None:
        yield "is not attention and feed-forward"
        return
    if not isinstance(feedforward.inner, SwiGLU):
        yield "has no SwiGLU"
    if not (_before(attention) and _before(feedforward)):
        yield "has no RMS norm before its sublayers alone"
    yield from _attention_differences(attention.inner)


def _attention_differences(config: AttentionConfig) -> Iterator[str]:
    if config.gates or config.sink != "none" or config.head_scale != "none":
        yield "has gates, a sink or scaled heads"
    if config.groups is not None:
        yield "shares keys unevenly"
    position = config.position
    turns = isinstance(position, Rotary) and position.share == 1.0
    if not turns and not isinstance(position, NoPosition):
        yield "has a position other than rotary of the whole head"
    if not isinstance(config.mask, Causal | Window) or config.kernel != "auto":
        yield "has a mask or kernel of its own"
    norms = {config.query_norm, config.key_norm}
    if norms != {NoNorm()} and not (len(norms) == 1 and _plain_norm(config.query_norm)):
        yield "has unlike norms of query and key"
    if config.size not in SIZES:
        yield f"has heads of {config.size} channels"


def _plain_norm(norm: object) -> bool:
    return isinstance(norm, RMSNorm) and not norm.bias


def _before(branch: Branch[AttentionConfig] | Branch[FeedForwardConfig]) -> bool:
    return isinstance(branch.norm, Pre) and _plain_norm(branch.norm.norm)


def program(
    model: Decoder, ids: Int[Tensor, " b"], cache: Cache, plan: StaticCachePlan
) -> Float[Tensor, "b v"]:
    """The scores after one more token a sequence; the cache and the plan go on by one."""
    from manyheads.decoding.onetoken import product

    x = model.embedding.tokens(ids)
    if model.embedding.config.scale != 1.0:
        x = x * model.embedding.config.scale
    for each, store in zip(model.stack.layers, cache.stores, strict=True):
        layer = cast(Layer, each)
        assert store is not None
        attention, feedforward = layer.attention, cast(FeedForward, layer.feedforward)
        assert attention is not None
        norm = _numbers(layer.attention_residual.norm)
        joined = product(x, attention.project.weight, norm=norm, bias=attention.project.bias)
        read = _read(attention, joined, store.k, store.v, plan)
        x = product(read, attention.output.weight, bias=attention.output.bias, residual=x)
        norm = _numbers(layer.feedforward_residual.norm)
        expand, contract = feedforward.expand, feedforward.contract
        inside = product(x, expand.weight, norm=norm, bias=expand.bias, gated=True)
        x = product(inside, contract.weight, bias=contract.bias, residual=x)
    readout = model.readout
    assert readout is not None
    table = model.embedding.tokens.weight if readout.weight is None else readout.weight
    plan.positions += 1
    return product(x, table, norm=_numbers(model.stack.final_norm), bias=readout.bias)


def _read(
    attention: Attention,
    joined: Float[Tensor, "b rows"],
    k: Float[Tensor, "b room g d"],
    v: Float[Tensor, "b room g d"],
    plan: StaticCachePlan,
) -> Float[Tensor, "b hd"]:
    from manyheads.decoding.onetoken import attend

    config = attention.config
    norms = None
    if isinstance(config.query_norm, RMSNorm):
        query, key = _numbers(attention.query_norm), _numbers(attention.key_norm)
        norms = (query[0], key[0], *query[1:])
    frequencies, stretch = None, 1.0
    if isinstance(config.position, Rotary):
        frequencies = config.position.frequencies_on(config.size, joined.device)
        stretch = config.position.stretch
    return attend(
        joined,
        k,
        v,
        plan.positions,
        heads=config.heads,
        scale=config.score_scale,
        frequencies=frequencies,
        stretch=stretch,
        norms=norms,
    )


def _numbers(norm: nn.Module) -> tuple[Float[Tensor, " c"], float, float]:
    """An RMS norm's weight, what is added to it, and eps."""
    config = cast(RMSNorm, norm.config)
    return cast(Tensor, norm.weight), float(config.centred), config.eps
