"""ModernBERT: a rotary encoder with global and local attention layers."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.errors import ConfigError
from manyheads.models import encoder, initialization, stack
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    Readout,
    ReadoutTransform,
    SpanHead,
    TokenHead,
)
from manyheads.parts import masks, norms
from manyheads.parts.feedforward import Activation, GeGLU, SwiGLU
from manyheads.parts.positions import Rotary

# Where several names mean one of our activations, we write the first.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "silu": "silu",
    "relu": "relu",
    "tanh": "tanh",
}
POOLS: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}
FULL, SLIDING = "full_attention", "sliding_attention"
# The defaults if config.json leaves them out.
THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}
LOCAL = 128
LAST_SPECIAL = 50283
ACTIVATION = config_keys.one_of(ACTIVATIONS)
TRANSFORM: dict[str, family.Sources] = {
    "readout.transform.dense": "head.dense",
    "readout.transform.norm": "head.norm",
}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


class ModernBertFamily(family.EncoderFamily):
    """ModernBERT."""

    name = "modernbert"
    classes: Mapping[str, str] = {"modernbert": "ModernBert"}
    keys: Mapping[str, config_keys.Key] = {
        "hidden_size": config_keys.WIDTH,
        "num_hidden_layers": config_keys.DEPTH,
        "num_attention_heads": config_keys.HEADS,
        "intermediate_size": config_keys.HIDDEN,
        "hidden_activation": config_keys.Key("feedforward.activation", "gelu", ACTIVATION),
        "vocab_size": config_keys.VOCABULARY,
        "norm_eps": config_keys.Key("norm.eps", 1e-5, config_keys.EPS),
        "norm_bias": config_keys.Key("norm.bias", False, config_keys.BOOL),
        "attention_bias": config_keys.BIAS,
        "mlp_bias": config_keys.Key("feedforward.bias", False, config_keys.BOOL),
        "attention_dropout": config_keys.Key("attention.dropout", 0.0, config_keys.FLOAT),
        "mlp_dropout": config_keys.Key("feedforward.dropout", 0.0, config_keys.FLOAT),
        "embedding_dropout": config_keys.Key("embedding.dropout", 0.0, config_keys.FLOAT),
        "tie_word_embeddings": replace(config_keys.TIED, written="never"),
        "initializer_range": config_keys.UNWRITTEN_STD,
    }
    init = initialization.Initialization(draw="truncated", scaled_outputs=True)

    prefix = "model."
    embedding: Mapping[str, family.Sources] = {
        "embedding.tokens": "embeddings.tok_embeddings",
        "embedding.norm": "embeddings.norm",
        "stack.final_norm": "final_norm",
    }
    layers = "layers"
    layer: Mapping[str, family.Sources] = {
        "attention_residual.norm": "attn_norm",
        "attention.project": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "feedforward_residual.norm": "mlp_norm",
        "feedforward.expand": "mlp.Wi",
        "feedforward.contract": "mlp.Wo",
    }
    heads: Mapping[type[Readout], Mapping[str, family.Sources]] = {
        LanguageHead: {**TRANSFORM, "readout": "decoder"},
        ClassHead: {**TRANSFORM, "readout": "classifier"},
        TokenHead: {**TRANSFORM, "readout": "classifier"},
        SpanHead: {**TRANSFORM, "readout": "classifier"},
    }
    tied_copies = ("decoder.weight",)
    # Rotary frequencies.
    buffers = ("inv_freq",)

    def read_stack(
        self, parts: config_keys.Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> stack.StackConfig:
        # The two keys mean the same; `transformers` follows this one.
        side = config_json.get("sliding_window", config_json.get("local_attention", LOCAL) // 2)
        feedforward: Branch[FeedForwardConfig] = Branch(
            _feedforward(parts.feedforward), norms.PreNorm(norm)
        )
        layers: list[LayerConfig] = []
        for kind in _kinds(config_json):
            attention = AttentionConfig(
                position=_rotary(config_json, kind),
                mask=masks.Full() if kind == FULL else masks.Window(side, side),
                **parts.attention,
            )
            # The embedding is already normalized, so the first attention has no norm.
            before = norms.PreNorm(norm if layers else norms.NoNorm())
            branch = Branch(attention, before, attention.dropout)
            layers.append(LayerConfig(attention=branch, feedforward=feedforward))
        return stack.StackConfig(width=parts.width, layers=tuple(layers), final_norm=norm)

    def transforms(
        self,
        parts: config_keys.Parts,  # noqa: ARG002
        norm: norms.LayerNorm,
        config_json: Mapping[str, Any],
    ) -> Mapping[type[Readout], ReadoutTransform]:
        name = config_json.get("classifier_activation", "gelu")
        transform = ReadoutTransform(
            activation=ACTIVATION.read("classifier_activation", name),
            norm=norm,
            bias=bool(config_json.get("classifier_bias", False)),
        )
        return dict.fromkeys(self.heads, transform)

    def read_readout(
        self, parts: config_keys.Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> Readout:
        head = super().read_readout(parts, norm, config_json)
        if isinstance(head, LanguageHead):
            return replace(head, bias=bool(config_json.get("decoder_bias", True)))
        if isinstance(head, ClassHead):
            pool = config_json.get("classifier_pooling", "cls")
            if pool not in POOLS:
                raise ConfigError(
                    f"classifier_pooling={pool!r} is not supported", "use cls or mean"
                )
            return replace(head, pool=POOLS[pool])
        return head

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:
        layers, head = _describe_layers(config), _describe_head(config.readout)
        if layers is None or head is None:
            return None
        # The default ids of special tokens must be in the vocabulary.
        small = parts.embedding.vocabulary <= LAST_SPECIAL
        return {**layers, **head, **(dict.fromkeys(SPECIAL) if small else {})}


MODERNBERT = ModernBertFamily()


def _kinds(config_json: Mapping[str, Any]) -> list[str]:
    count = config_json["num_hidden_layers"]
    kinds = config_json.get("layer_types")
    if kinds is None:
        every = config_json.get("global_attn_every_n_layers", 3)
        return [SLIDING if index % every else FULL for index in range(count)]
    unknown = sorted(set(kinds) - {FULL, SLIDING})
    if unknown:
        raise ConfigError(
            f"layer_types has {', '.join(unknown)}, which is not supported",
            f"use {FULL} and {SLIDING}",
        )
    if len(kinds) != count:
        raise ConfigError(
            f"layer_types has {len(kinds)} entries, and num_hidden_layers={count}",
            "give one type per layer",
        )
    return list(kinds)


def _rotary(config_json: Mapping[str, Any], kind: str) -> Rotary:
    rope = (config_json.get("rope_parameters") or {}).get(kind) or {}
    rope = {**rope, **(config_json.get("rope_scaling") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    # A partial_rotary_factor has no effect in this family.
    if scaling != "default":
        raise ConfigError(
            f"rope_type={scaling!r:.200} of {kind} is not supported", "use rope_type='default'"
        )
    full = config_json.get("global_rope_theta", THETAS[FULL])
    old = full if kind == FULL else config_json.get("local_rope_theta", THETAS[SLIDING])
    # In the first release a local theta of null means the global one.
    return Rotary(theta=float(rope.get("rope_theta", full if old is None else old)))


def _feedforward(arguments: Mapping[str, Any]) -> GeGLU | SwiGLU:
    activation = arguments["activation"]
    if activation in ("gelu", "gelu_tanh"):
        return GeGLU(**arguments)
    if activation != "silu":
        raise ConfigError(
            f"hidden_activation={activation!r} is not supported in a gated layer",
            "use gelu, gelu_pytorch_tanh or silu",
        )
    return SwiGLU(**{name: value for name, value in arguments.items() if name != "activation"})


def _describe_layers(config: encoder.EncoderConfig) -> dict[str, Any] | None:
    kinds, thetas, local = [], dict(THETAS), LOCAL
    for index in range(len(config.stack.layers)):
        attention = config.stack.attention(index)
        if attention is None or not isinstance(attention.position, Rotary):
            return None
        if attention.position != Rotary(theta=attention.position.theta):
            return None
        kind = SLIDING if isinstance(attention.mask, masks.Window) else FULL
        if isinstance(attention.mask, masks.Window):
            local = 2 * attention.mask.before
        thetas[kind] = attention.position.theta
        kinds.append(kind)
    ropes = {kind: {"rope_type": "default", "rope_theta": theta} for kind, theta in thetas.items()}
    return {"layer_types": kinds, "rope_parameters": ropes, "local_attention": local}


def _describe_head(readout: Readout) -> dict[str, Any] | None:
    if isinstance(readout, NoReadout):
        return {}
    transform = readout.transform
    if transform is None:
        return None
    head: dict[str, Any] = {
        "classifier_activation": ACTIVATION.write(transform.activation),
        "classifier_bias": transform.bias,
    }
    if isinstance(readout, LanguageHead):
        return head | {"tie_word_embeddings": readout.tied, "decoder_bias": readout.bias}
    if isinstance(readout, ClassHead):
        pool = next((name for name in POOLS if POOLS[name] == readout.pool), None)
        return None if pool is None else head | {"classifier_pooling": pool}
    return head
