"""The step of a Llama-like decoder on CUDA, in five Triton kernels per layer for one sequence.

Such a step only reads the weights, so every kernel less saves time: norms, rotations, gates and
residuals are computed inside the products. Several sequences are faster by the products of the
library, with three kernels between them.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import Any, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear

from manyheads.attention import OUTPUT_ALONE, AttentionConfig
from manyheads.cache import Cache, CachePlan, KeyValues, LayerCache, StaticCachePlan
from manyheads.decoding.steps.ordinary import DecoderWeights, LayerWeights, why_not_ordinary
from manyheads.kernels import choose
from manyheads.kernels.contract import Request
from manyheads.models.decoder import Decoder
from manyheads.models.layer import Branch, FeedForwardConfig
from manyheads.models.readout import LanguageHead
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.norms import NoNorm, RMSNorm
from manyheads.parts.positions import NoPosition, Rotary
from manyheads.parts.positions.rotary import ByLength
from manyheads.ragged import Lengths, Ragged

HALF = (torch.bfloat16, torch.float16)
HEAD_SIZES = (32, 64, 128)
# Up to so many sequences the products can be those of a kernel that reads the weights once.
FEW = 16
# One program reads the keys of a head. Several share a cache of so many tokens where the key heads
# of all texts are this few: it takes two more kernels, on an H200 50 µs in 16 layers.
LONG_CAPACITY, FEW_KEY_HEADS = 1024, 64


def cannot(model: Decoder) -> str | None:
    """Why these kernels do not fit this model; None if they do."""
    parameters = list(model.parameters())
    if parameters[0].device.type != "cuda" or find_spec("triton") is None:
        return "the Triton step needs CUDA and triton"
    if any(parameter.dtype not in HALF for parameter in parameters):
        return "the Triton step supports float16 and bfloat16"
    reason = next(why_not_ordinary(model), None)
    return next(_why_not_llama(model), None) if reason is None else reason


def few_fit(model: Decoder, sequences: int) -> bool:
    """Whether the products of a step with so many sequences can be our own.

    They divide by the norm in the end, and what it is to divide may be beyond float16.
    """
    return 1 < sequences <= FEW and next(model.parameters()).dtype != torch.float16


def _why_not_llama(model: Decoder) -> Iterator[str]:
    """What sets an ordinary decoder apart from those that the kernels are written for."""
    config = model.config
    embedding, head = config.embedding, config.readout
    if not isinstance(embedding.position, NoPosition) or embedding.types:
        yield "the embedding adds positions or types"
    if not isinstance(embedding.norm, NoNorm) or embedding.projected:
        yield "the embedding has a norm or a projection"
    if not _is_rms_norm(config.stack.final_norm):
        yield "the norm after the last layer is not an RMS norm without bias"
    if isinstance(head, LanguageHead) and head.scale != 1.0:
        yield f"the logits are scaled by {head.scale}"
    for index, layer in enumerate(config.stack.layers):
        assert layer.attention is not None
        assert layer.feedforward is not None
        if layer.residual != "serial":
            yield f"layer {index} is parallel"
        for reason in _why_not_llama_layer(layer.attention, layer.feedforward):
            yield f"layer {index} {reason}"


def _why_not_llama_layer(
    attention: Branch[AttentionConfig], feedforward: Branch[FeedForwardConfig]
) -> Iterator[str]:
    if not isinstance(feedforward.inner, SwiGLU):
        yield "has no SwiGLU"
    if not (_is_rms_norm(attention.norm.norm) and _is_rms_norm(feedforward.norm.norm)):
        yield "has a norm other than an RMS norm without bias"
    config = attention.inner
    if isinstance(config.position, Rotary) and config.position.fraction != 1.0:
        yield "rotates only a part of each head"
    if isinstance(config.position, Rotary) and isinstance(config.position.scaling, ByLength):
        yield "rotates by the length of the text"
    norms = {config.query_norm, config.key_norm}
    if norms != {NoNorm()} and not (len(norms) == 1 and _is_rms_norm(config.query_norm)):
        yield "has different norms of queries and keys"
    if config.size not in HEAD_SIZES:
        yield f"has heads of {config.size} channels, not of {HEAD_SIZES}"


def _is_rms_norm(norm: object) -> bool:
    return isinstance(norm, RMSNorm) and not norm.bias


def llama_step(
    model: Decoder,
    ids: Int[Tensor, " b"],
    cache: Cache,
    plan: StaticCachePlan,
    *,
    few: bool = False,
) -> Float[Tensor, "b v"]:
    """The logits after one more token per sequence; the cache and the plan advance by one.

    For `few` sequences the products can be our own instead of the library's.
    """
    from manyheads.decoding.steps.triton_kernels import gather_rows, product, rms_norm

    weights = DecoderWeights.of(model)
    assert isinstance(weights.vocabulary, Tensor), "integer weights are on the CPU"
    x = model.embedding.scaled(gather_rows(model.embedding.tokens.weight, ids))
    layer_step = _layer if len(ids) == 1 else _layer_of_several
    if few:
        layer_step = _layer_of_few
    for layer, store in zip(weights.layers, cache.stores, strict=True):
        assert store is not None
        x = layer_step(layer, x, store, plan)
    if any(_is_shared(store, len(ids)) for store in cache.stores if store is not None):
        plan.advance()
    else:
        # All that the other kernels read.
        plan.positions += 1
    norm = _norm_arguments(weights.final_norm)
    if len(ids) == 1:
        return product(x, weights.vocabulary, norm=norm, bias=weights.vocabulary_bias)
    return linear(rms_norm(x, *norm), weights.vocabulary, weights.vocabulary_bias)


def llama_read(
    model: Decoder,
    prompts: Ragged,
    cache: Cache,
    plan: CachePlan,
    last: Int[Tensor, " b"],
) -> Float[Tensor, "b v"]:
    """The logits after prompts, whose last tokens are at `last`; the cache has room for them.

    The products and the attention are those of the library; the rest is a kernel each.
    """
    from manyheads.decoding.steps.triton_kernels import rms_norm, silu_product

    weights = DecoderWeights.of(model)
    assert isinstance(weights.vocabulary, Tensor), "integer weights are on the CPU"
    x = model.embedding.scaled(model.embedding.tokens(prompts.values))
    for layer, store in zip(weights.layers, cache.stores, strict=True):
        assert store is not None
        normed = rms_norm(x, *_norm_arguments(layer.attention_norm))
        attended = _attend_prompts(layer, layer.project(normed), store, plan)
        x = _add_product(x, attended, layer.output)
        normed = rms_norm(x, *_norm_arguments(layer.feedforward_norm))
        x = _add_product(x, silu_product(layer.expand(normed)), layer.contract)
    x = rms_norm(x[last], *_norm_arguments(weights.final_norm))
    return linear(x, weights.vocabulary, weights.vocabulary_bias)


def _attend_prompts(
    layer: LayerWeights, projected: Float[Tensor, "n rows"], store: LayerCache, plan: CachePlan
) -> Float[Tensor, "n hd"]:
    lengths = plan.new
    rows = lengths.sequence_of_token
    q, k, v = _rotate_and_store(layer, projected, store, plan.positions, rows)
    return _read(layer, q, KeyValues(k, v, lengths), lengths)


def _layer(
    layer: LayerWeights, x: Float[Tensor, "b c"], store: LayerCache, plan: StaticCachePlan
) -> Float[Tensor, "b c"]:
    from manyheads.decoding.steps.triton_kernels import product

    output, contract = layer.output, layer.contract
    norm = _norm_arguments(layer.attention_norm)
    projected = product(x, layer.project.weight, norm=norm, bias=layer.project.bias)
    attended = _attend(layer, projected, store, plan)
    x = product(attended, output.weight, bias=output.bias, residual=x)
    norm = _norm_arguments(layer.feedforward_norm)
    inside = product(x, layer.expand.weight, norm=norm, bias=layer.expand.bias, gated=True)
    return product(inside, contract.weight, bias=contract.bias, residual=x)


def _layer_of_few(
    layer: LayerWeights, x: Float[Tensor, "b c"], store: LayerCache, plan: StaticCachePlan
) -> Float[Tensor, "b c"]:
    from manyheads.decoding.steps.triton_products import product_of_few

    output, contract = layer.output, layer.contract
    norm = _norm_arguments(layer.attention_norm)
    projected = product_of_few(x, layer.project.weight, norm=norm, bias=layer.project.bias)
    attended = _attend(layer, projected, store, plan)
    x = product_of_few(attended, output.weight, bias=output.bias, residual=x)
    norm = _norm_arguments(layer.feedforward_norm)
    inside = product_of_few(x, layer.expand.weight, norm=norm, bias=layer.expand.bias, gated=True)
    return product_of_few(inside, contract.weight, bias=contract.bias, residual=x)


def _layer_of_several(
    layer: LayerWeights, x: Float[Tensor, "b c"], store: LayerCache, plan: StaticCachePlan
) -> Float[Tensor, "b c"]:
    from manyheads.decoding.steps.triton_kernels import rms_norm, silu_product

    normed = rms_norm(x, *_norm_arguments(layer.attention_norm))
    attended = _attend(layer, layer.project(normed), store, plan)
    x = _add_product(x, attended, layer.output)
    normed = rms_norm(x, *_norm_arguments(layer.feedforward_norm))
    return _add_product(x, silu_product(layer.expand(normed)), layer.contract)


def _add_product(
    x: Float[Tensor, "b c"], y: Float[Tensor, "b d"], module: nn.Linear
) -> Float[Tensor, "b c"]:
    """x + weight @ y + bias, in place where there is no bias."""
    if module.bias is None:
        return x.addmm_(y, module.weight.T)
    return x + module(y)


def _attend(
    layer: LayerWeights,
    projected: Float[Tensor, "b rows"],
    store: LayerCache,
    plan: StaticCachePlan,
) -> Float[Tensor, "b hd"]:
    from manyheads.decoding.steps.triton_kernels import attend

    if _is_shared(store, len(projected)):
        return _attend_shared(layer, projected, store, plan)
    return attend(
        projected,
        store.k,
        store.v,
        plan.positions,
        scale=layer.attention.score_scale,
        **_position_arguments(layer, projected.device),
    )


def _is_shared(store: LayerCache, sequences: int) -> bool:
    """Whether several programs read the keys of a head."""
    few = sequences * store.k.shape[2] <= FEW_KEY_HEADS
    return few and store.capacity >= LONG_CAPACITY


def _attend_shared(
    layer: LayerWeights,
    projected: Float[Tensor, "b rows"],
    store: LayerCache,
    plan: StaticCachePlan,
) -> Float[Tensor, "b hd"]:
    q, _, _ = _rotate_and_store(layer, projected, store, plan.positions, plan.rows)
    return _read(layer, q, store.whole(plan), plan.new)


def _rotate_and_store(
    layer: LayerWeights,
    projected: Float[Tensor, "n rows"],
    store: LayerCache,
    positions: Int[Tensor, " n"],
    sequences: Int[Tensor, " n"],
) -> tuple[Float[Tensor, "n h d"], Float[Tensor, "n g d"], Float[Tensor, "n g d"]]:
    """Queries, keys and values; the last two are in the cache then."""
    from manyheads.decoding.steps.triton_kernels import rotate_and_store

    config, arguments = layer.attention, _position_arguments(layer, projected.device)
    rotate_and_store(projected, store.k, store.v, positions, sequences, **arguments)
    heads = projected.unflatten(1, (-1, config.size))
    q, k, v = heads.split((config.heads, config.key_heads, config.key_heads), dim=1)
    return q, k, v


def _read(
    layer: LayerWeights, q: Float[Tensor, "n h d"], keys: KeyValues, queries: Lengths
) -> Float[Tensor, "n hd"]:
    request = Request(
        queries=queries,
        keys=keys.lengths,
        mask=layer.attention.mask,
        scale=layer.attention.score_scale,
        want=OUTPUT_ALONE,
    )
    return choose.attend(q, keys.k, keys.v, request).output.flatten(1)


def _position_arguments(layer: LayerWeights, device: torch.device) -> dict[str, Any]:
    """Heads, rotation and norms of queries and keys, as the kernels take them."""
    config, norms = layer.attention, None
    if layer.query_norm is not None and layer.key_norm is not None:
        query, key = _norm_arguments(layer.query_norm), _norm_arguments(layer.key_norm)
        norms = (query[0], key[0], *query[1:])
    frequencies, stretch = None, 1.0
    if isinstance(config.position, Rotary):
        frequencies = config.position.frequencies_on(config.size, device)
        stretch = config.position.stretch
    return {
        "heads": config.heads,
        "frequencies": frequencies,
        "stretch": stretch,
        "norms": norms,
    }


def _norm_arguments(norm: nn.Module) -> tuple[Float[Tensor, " c"], float, float]:
    """An RMS norm's weight, what is added to it, and eps."""
    config = cast(RMSNorm, norm.config)
    return cast(Tensor, norm.weight), float(config.centered), config.eps
