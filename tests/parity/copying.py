"""Weights of `transformers` models put into ours, one function a family."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import torch
from einops import rearrange
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.models.layer import Layer
from manyheads.models.stack import Stack

__all__ = [
    "bert",
    "bloom",
    "gpt2",
    "llama",
    "marian",
    "modernbert",
    "scramble",
    "t5",
    "vit",
]


@dataclass(frozen=True)
class Dense:
    """A projection, its weight as (out, in)."""

    weight: Tensor
    bias: Tensor | None = None

    @classmethod
    def of(cls, module: nn.Module) -> "Dense":
        return cls(module.weight, getattr(module, "bias", None))

    @classmethod
    def turned(cls, module: nn.Module) -> "Dense":
        """Of GPT-2's Conv1D, which keeps its weight as (in, out)."""
        return cls(module.weight.T, module.bias)

    def rows(self, *sizes: int) -> "list[Dense]":
        """Several projections that were joined in one."""
        weights = self.weight.split(sizes)
        biases: Sequence[Tensor | None] = [None] * len(sizes)
        if self.bias is not None:
            biases = self.bias.split(sizes)
        return [Dense(*pair) for pair in zip(weights, biases, strict=True)]

    def reordered(self, pattern: str, **sizes: int) -> "Dense":
        """The rows in another order, as einops writes it for one axis."""
        weight = rearrange(self.weight, pattern.replace("->", "c ->") + " c", **sizes)
        bias = None if self.bias is None else rearrange(self.bias, pattern, **sizes)
        return Dense(weight, bias)


def scramble(model: nn.Module, std: float = 0.15) -> None:
    """Draw everything at random, so that no zero bias and no norm of ones hides a mistake."""
    generator = torch.Generator().manual_seed(len(list(model.parameters())))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.requires_grad:
                noise = torch.randn(parameter.shape, generator=generator) * std
                is_scale = "norm" in name.lower() or ".ln_" in name
                parameter.copy_(noise + 1 if is_scale and name.endswith("weight") else noise)


def whole(copy: Callable[..., None]) -> Callable[..., None]:
    """A copy that must reach every parameter of ours."""

    @wraps(copy)
    def copies(peer: Any, ours: Any) -> None:
        with torch.no_grad():
            for parameter in ours.parameters():
                parameter.fill_(torch.nan)
            copy(peer, ours)
        missed = [name for name, parameter in ours.named_parameters() if parameter.isnan().any()]
        assert not missed, f"{missed} got no weights"

    return copies


def put(parameter: Tensor | None, value: Tensor | None) -> None:
    if parameter is None or value is None:
        assert parameter is None, "a parameter of ours got no value"
        assert value is None, "a value of theirs found no parameter"
        return
    assert parameter.shape == value.shape, f"{tuple(value.shape)} into {tuple(parameter.shape)}"
    parameter.copy_(value)


def put_dense(ours: nn.Linear, peer: Dense | nn.Module) -> None:
    peer = peer if isinstance(peer, Dense) else Dense.of(peer)
    put(ours.weight, peer.weight)
    put(ours.bias, peer.bias)


def put_norm(ours: Any, peer: Any) -> None:
    put(ours.weight, peer.weight)
    put(ours.bias, getattr(peer, "bias", None))


def put_attention(ours: Attention, output: Dense | nn.Module, **rows: Dense | nn.Module) -> None:
    """The parts of the input projections by their names in `AttentionConfig.rows`."""
    biases = bias_rows(ours)
    weights = ours.projections()
    assert set(weights) == set(rows)
    for name, projection in rows.items():
        dense = projection if isinstance(projection, Dense) else Dense.of(projection)
        put(weights[name], dense.weight)
        put(biases.get(name), dense.bias)
    put_dense(ours.output, output)


def bias_rows(attention: Attention) -> dict[str, Tensor]:
    """The biases of the input projections by name, as views."""
    names = list(attention.config.rows())
    split = len(names) if attention.project_memory is None else names.index("key")
    result: dict[str, Tensor] = {}
    for linear, part in (
        (attention.project, names[:split]),
        (attention.project_memory, names[split:]),
    ):
        if linear is not None and linear.bias is not None:
            sizes = [attention.config.rows()[name] for name in part]
            result |= dict(zip(part, linear.bias.split(sizes), strict=True))
    return result


def layers(stack: Stack) -> list[Any]:
    return list(stack.layers)


@whole
def gpt2(peer: Any, ours: Any) -> None:
    put(ours.embedding.tokens.weight, peer.transformer.wte.weight)
    put(ours.embedding.positions.weight, peer.transformer.wpe.weight)
    for block, layer in zip(peer.transformer.h, layers(ours.stack), strict=True):
        joined = Dense.turned(block.attn.c_attn)
        query, key, value = joined.rows(*[joined.weight.shape[1]] * 3)
        put_attention(
            layer.attention, Dense.turned(block.attn.c_proj), query=query, key=key, value=value
        )
        put_norm(layer.attention_residual.norm, block.ln_1)
        put_norm(layer.feedforward_residual.norm, block.ln_2)
        put_dense(layer.feedforward.expand, Dense.turned(block.mlp.c_fc))
        put_dense(layer.feedforward.contract, Dense.turned(block.mlp.c_proj))
    put_norm(ours.stack.final_norm, peer.transformer.ln_f)


@whole
def bert(peer: Any, ours: Any) -> None:
    embeddings = peer.bert.embeddings
    put(ours.embedding.tokens.weight, embeddings.word_embeddings.weight)
    put(ours.embedding.positions.weight, embeddings.position_embeddings.weight)
    put(ours.embedding.types.weight, embeddings.token_type_embeddings.weight)
    put_norm(ours.embedding.norm, embeddings.LayerNorm)
    for block, layer in zip(peer.bert.encoder.layer, layers(ours.stack), strict=True):
        own = block.attention.self
        put_attention(
            layer.attention,
            block.attention.output.dense,
            query=own.query,
            key=own.key,
            value=own.value,
        )
        put_norm(layer.attention_residual.norm, block.attention.output.LayerNorm)
        put_dense(layer.feedforward.expand, block.intermediate.dense)
        put_dense(layer.feedforward.contract, block.output.dense)
        put_norm(layer.feedforward_residual.norm, block.output.LayerNorm)
    if hasattr(peer, "classifier"):
        put_dense(ours.readout.transform.dense, peer.bert.pooler.dense)
        put_dense(ours.readout, peer.classifier)
    else:
        head = peer.cls.predictions
        put_dense(ours.readout.transform.dense, head.transform.dense)
        put_norm(ours.readout.transform.norm, head.transform.LayerNorm)
        put(ours.readout.bias, head.bias)


@whole
def modernbert(peer: Any, ours: Any) -> None:
    put(ours.embedding.tokens.weight, peer.model.embeddings.tok_embeddings.weight)
    put_norm(ours.embedding.norm, peer.model.embeddings.norm)
    for block, layer in zip(peer.model.layers, layers(ours.stack), strict=True):
        joined = Dense.of(block.attn.Wqkv)
        query, key, value = joined.rows(*[joined.weight.shape[1]] * 3)
        put_attention(layer.attention, block.attn.Wo, query=query, key=key, value=value)
        if not isinstance(layer.attention_residual.norm, nn.Identity):
            put_norm(layer.attention_residual.norm, block.attn_norm)
        put_norm(layer.feedforward_residual.norm, block.mlp_norm)
        put_dense(layer.feedforward.expand, block.mlp.Wi)
        put_dense(layer.feedforward.contract, block.mlp.Wo)
    put_norm(ours.stack.final_norm, peer.model.final_norm)
    put_dense(ours.readout.transform.dense, peer.head.dense)
    put_norm(ours.readout.transform.norm, peer.head.norm)
    put(ours.readout.bias, peer.decoder.bias)


@whole
def llama(peer: Any, ours: Any) -> None:
    """Llama, Mistral, Mixtral, Qwen2, Qwen3, and Qwen3-Next where all its layers are attention."""
    put(ours.embedding.tokens.weight, peer.model.embed_tokens.weight)
    for block, layer in zip(peer.model.layers, layers(ours.stack), strict=True):
        own, heads = block.self_attn, layer.attention.config.heads
        queries = {"query": Dense.of(own.q_proj)}
        if layer.attention.config.gates:
            # Each head's queries are followed by its gate.
            both = queries["query"].reordered("(h two d) -> (two h d)", h=heads, two=2)
            query, gate = both.rows(*[both.weight.shape[0] // 2] * 2)
            queries = {"query": query, "gate_output": gate}
        put_attention(layer.attention, own.o_proj, **queries, key=own.k_proj, value=own.v_proj)
        if hasattr(own, "q_norm"):
            put_norm(layer.attention.query_norm, own.q_norm)
            put_norm(layer.attention.key_norm, own.k_norm)
        put_norm(layer.attention_residual.norm, block.input_layernorm)
        put_norm(layer.feedforward_residual.norm, block.post_attention_layernorm)
        if hasattr(block.mlp, "experts"):
            put(layer.feedforward.router.weight, block.mlp.gate.weight)
            put(layer.feedforward.expand, block.mlp.experts.gate_up_proj.transpose(1, 2))
            put(layer.feedforward.contract, block.mlp.experts.down_proj.transpose(1, 2))
            if hasattr(block.mlp, "shared_expert"):
                _put_swiglu(layer.feedforward.shared, block.mlp.shared_expert)
                put_dense(layer.feedforward.shared_gate, block.mlp.shared_expert_gate)
        else:
            _put_swiglu(layer.feedforward, block.mlp)
    put_norm(ours.stack.final_norm, peer.model.norm)
    if ours.readout.weight is not None:
        put(ours.readout.weight, peer.lm_head.weight)


def _put_swiglu(ours: Any, peer: Any) -> None:
    put_dense(ours.expand, Dense(torch.cat((peer.gate_proj.weight, peer.up_proj.weight))))
    put_dense(ours.contract, peer.down_proj)


@whole
def bloom(peer: Any, ours: Any) -> None:
    put(ours.embedding.tokens.weight, peer.transformer.word_embeddings.weight)
    put_norm(ours.embedding.norm, peer.transformer.word_embeddings_layernorm)
    for block, layer in zip(peer.transformer.h, layers(ours.stack), strict=True):
        heads = layer.attention.config.heads
        joined = Dense.of(block.self_attention.query_key_value)
        joined = joined.reordered("(h three d) -> (three h d)", h=heads, three=3)
        query, key, value = joined.rows(*[joined.weight.shape[1]] * 3)
        put_attention(
            layer.attention, block.self_attention.dense, query=query, key=key, value=value
        )
        put_norm(layer.attention_residual.norm, block.input_layernorm)
        put_norm(layer.feedforward_residual.norm, block.post_attention_layernorm)
        put_dense(layer.feedforward.expand, block.mlp.dense_h_to_4h)
        put_dense(layer.feedforward.contract, block.mlp.dense_4h_to_h)
    put_norm(ours.stack.final_norm, peer.transformer.ln_f)


@whole
def vit(peer: Any, ours: Any) -> None:
    embeddings = peer.vit.embeddings
    put(ours.embedding.class_token, embeddings.cls_token[0, 0])
    positions = embeddings.position_embeddings[0]
    put(ours.embedding.positions.class_token, positions[0])
    rows, columns = ours.embedding.positions.patches.shape[:2]
    put(ours.embedding.positions.patches, positions[1:].unflatten(0, (rows, columns)))
    put_dense(ours.embedding.convolution, embeddings.patch_embeddings.projection)
    for block, layer in zip(peer.vit.layers, layers(ours.stack), strict=True):
        own = block.attention
        put_attention(
            layer.attention, own.o_proj, query=own.q_proj, key=own.k_proj, value=own.v_proj
        )
        put_norm(layer.attention_residual.norm, block.layernorm_before)
        put_norm(layer.feedforward_residual.norm, block.layernorm_after)
        put_dense(layer.feedforward.expand, block.mlp.fc1)
        put_dense(layer.feedforward.contract, block.mlp.fc2)
    put_norm(ours.stack.final_norm, peer.vit.layernorm)
    put_dense(ours.readout, peer.classifier)


@whole
def marian(peer: Any, ours: Any) -> None:
    put(ours.embedding.tokens.weight, peer.model.shared.weight)
    for side in ("encoder", "decoder"):
        blocks, stack = getattr(peer.model, side).layers, getattr(ours, side)
        for block, layer in zip(blocks, layers(stack), strict=True):
            _put_marian_attention(layer.attention, block.self_attn)
            put_norm(layer.attention_residual.norm, block.self_attn_layer_norm)
            if side == "decoder":
                _put_marian_attention(layer.cross, block.encoder_attn)
                put_norm(layer.cross_residual.norm, block.encoder_attn_layer_norm)
            put_dense(layer.feedforward.expand, block.fc1)
            put_dense(layer.feedforward.contract, block.fc2)
            put_norm(layer.feedforward_residual.norm, block.final_layer_norm)
    put(ours.readout.bias, peer.final_logits_bias[0])


def _put_marian_attention(ours: Attention, peer: Any) -> None:
    put_attention(ours, peer.out_proj, query=peer.q_proj, key=peer.k_proj, value=peer.v_proj)


@whole
def t5(peer: Any, ours: Any) -> None:
    put(ours.embedding.tokens.weight, peer.shared.weight)
    for side in ("encoder", "decoder"):
        half, stack = getattr(peer, side), getattr(ours, side)
        for block, layer in zip(half.block, layers(stack), strict=True):
            _put_t5_layer(layer, block.layer)
        table = half.block[0].layer[0].SelfAttention.relative_attention_bias.weight
        put(layers(stack)[0].attention.table.table, table)
        put_norm(stack.final_norm, half.final_layer_norm)
    if ours.readout.weight is not None:
        put(ours.readout.weight, peer.lm_head.weight)


def _put_t5_layer(layer: Layer, parts: Any) -> None:
    own = parts[0].SelfAttention
    put_attention(layer.attention, own.o, query=own.q, key=own.k, value=own.v)
    put_norm(layer.attention_residual.norm, parts[0].layer_norm)
    if layer.cross is not None:
        other = parts[1].EncDecAttention
        put_attention(layer.cross, other.o, query=other.q, key=other.k, value=other.v)
        put_norm(layer.cross_residual.norm, parts[1].layer_norm)
    dense = parts[-1].DenseReluDense
    gated = hasattr(dense, "wi_0")
    expand = torch.cat((dense.wi_0.weight, dense.wi_1.weight)) if gated else dense.wi.weight
    put_dense(layer.feedforward.expand, Dense(expand))
    put_dense(layer.feedforward.contract, dense.wo)
    put_norm(layer.feedforward_residual.norm, parts[-1].layer_norm)
