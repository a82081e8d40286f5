"""ModernBERT: a rotary encoder with global and local attention layers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.encoders.bert import transform
from manyheads.checkpoints.families.family import EncoderFamily, Transforms, gated_feedforward
from manyheads.checkpoints.families.windows import FULL, SLIDING
from manyheads.errors import ConfigError
from manyheads.models import encoder, initialization, readout
from manyheads.models.layer import LayerConfig
from manyheads.parts import masks, norms
from manyheads.parts.positions import Rotary

POOLS: dict[str, Literal["first", "mean"]] = {"cls": "first", "mean": "mean"}
# The defaults if config.json leaves them out.
THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}
LOCAL = 128
LAST_SPECIAL = 50283
# Of the names for one activation, the first is written.
ACTIVATION = config_keys.one_of(
    {"gelu_pytorch_tanh": "gelu_tanh", **config_keys.HIDDEN_ACTIVATIONS}
)
TRANSFORM = transform("head.dense", "head.norm")
CLASSIFIER = {**TRANSFORM, "readout": "classifier"}
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")


class ModernBertFamily(EncoderFamily):
    """ModernBERT."""

    name = "modernbert"
    classes = {"modernbert": "ModernBert"}
    keys = {
        **config_keys.SIZES,
        "hidden_activation": config_keys.activation("gelu", config_keys.GATED_ACTIVATIONS),
        "norm_eps": config_keys.eps(1e-5),
        "norm_bias": config_keys.Key("norm.bias", False, config_keys.BOOL),
        "attention_bias": config_keys.BIAS,
        "mlp_bias": config_keys.Key("feedforward.bias", False, config_keys.BOOL),
        "attention_dropout": config_keys.dropout("attention"),
        "mlp_dropout": config_keys.dropout("feedforward"),
        "embedding_dropout": config_keys.dropout("embedding"),
        "tie_word_embeddings": replace(config_keys.TIED, written="never"),
        "initializer_range": config_keys.UNWRITTEN_STD,
    }
    init = initialization.Initialization(draw="truncated", scaled_outputs=True)
    final_norm = True
    placement = norms.PreNorm
    feedforward = gated_feedforward
    dropouts = ("attention", "")

    prefix = "model."
    embedding = {
        "embedding.tokens": "embeddings.tok_embeddings",
        "embedding.norm": "embeddings.norm",
        "stack.final_norm": "final_norm",
    }
    layers = "layers"
    layer = {
        "attention_residual.norm": "attn_norm",
        "attention.project": "attn.Wqkv",
        "attention.output": "attn.Wo",
        "feedforward_residual.norm": "mlp_norm",
        "feedforward.expand": "mlp.Wi",
        "feedforward.contract": "mlp.Wo",
    }
    heads = {
        readout.LanguageHead: {**TRANSFORM, "readout": "decoder"},
        readout.ClassHead: CLASSIFIER,
        readout.TokenHead: CLASSIFIER,
        readout.SpanHead: CLASSIFIER,
    }
    tied_copies = ("decoder.weight",)
    # Rotary frequencies.
    buffers = ("inv_freq",)

    def read_layers(self, parts: Parts) -> Iterator[LayerConfig]:
        for index, layer in enumerate(super().read_layers(parts)):
            assert layer.attention is not None
            # The embedding is already normalized, so the first attention has no norm.
            plain = replace(layer.attention, norm=norms.PreNorm(norms.NoNorm()))
            yield layer if index else replace(layer, attention=plain)

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:
        kind, local = _kinds(parts.json)[index], parts.json.get("local_attention", LOCAL)
        # The two keys mean the same; `transformers` follows this one.
        side = parts.json.get("sliding_window", local // 2)
        return AttentionConfig(
            position=_rotary(parts.json, kind),
            mask=masks.Full() if kind == FULL else masks.Window(side, side),
            **parts.attention,
        )

    def transforms(self, parts: Parts) -> Transforms:
        name = parts.json.get("classifier_activation", "gelu")
        transform = readout.ReadoutTransform(
            activation=ACTIVATION.read("classifier_activation", name),
            norm=parts.norm,
            bias=bool(parts.json.get("classifier_bias", False)),
        )
        return dict.fromkeys(self.heads, transform)

    def read_readout(self, parts: Parts) -> readout.Readout:
        head = super().read_readout(parts)
        if isinstance(head, readout.LanguageHead):
            return replace(head, bias=bool(parts.json.get("decoder_bias", True)))
        if isinstance(head, readout.ClassHead):
            pool = parts.json.get("classifier_pooling", "cls")
            if pool not in POOLS:
                raise ConfigError(
                    f"classifier_pooling={pool!r} is not supported", "use cls or mean"
                )
            return replace(head, pool=POOLS[pool])
        return head

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        layers, head = _describe_layers(config), _describe_head(config.readout)
        if layers is None or head is None:
            return None
        # The default ids of special tokens must be in the vocabulary.
        small = parts.embedding.vocabulary <= LAST_SPECIAL
        return {**layers, **head, **(dict.fromkeys(SPECIAL) if small else {})}


MODERNBERT = ModernBertFamily()


def _kinds(config_json: ConfigJson) -> list[str]:
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


def _rotary(config_json: ConfigJson, kind: str) -> Rotary:
    rope: ConfigJson = (config_json.get("rope_parameters") or {}).get(kind) or {}
    rope = {**rope, **(config_json.get("rope_scaling") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    # A partial_rotary_factor has no effect in this family.
    if scaling != "default":
        raise ConfigError(
            f"rope_type={scaling!r:.200} of {kind} is not supported", "use rope_type='default'"
        )
    full: Any = config_json.get("global_rope_theta", THETAS[FULL])
    old = full if kind == FULL else config_json.get("local_rope_theta", THETAS[SLIDING])
    # In the first release a local theta of null means the global one.
    return Rotary(theta=float(rope.get("rope_theta", full if old is None else old)))


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


def _describe_head(head: readout.Readout) -> dict[str, Any] | None:
    if isinstance(head, readout.NoReadout):
        return {}
    transform = head.transform
    if transform is None:
        return None
    described: dict[str, Any] = {
        "classifier_activation": ACTIVATION.write(transform.activation),
        "classifier_bias": transform.bias,
    }
    if isinstance(head, readout.LanguageHead):
        return described | {"tie_word_embeddings": head.tied, "decoder_bias": head.bias}
    if isinstance(head, readout.ClassHead):
        pool = next((name for name in POOLS if POOLS[name] == head.pool), None)
        return None if pool is None else described | {"classifier_pooling": pool}
    return described
