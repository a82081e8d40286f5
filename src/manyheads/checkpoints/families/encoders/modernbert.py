"""ModernBERT: a rotary encoder with global and local attention layers."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import (
    Family,
    activation_of,
    class_count,
    default_labels,
    eps_of,
    span_head,
)
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    Readout,
    ReadoutTransform,
    SpanHead,
    TokenHead,
)
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import Activation, GeGLU, SwiGLU
from manyheads.parts.masks import Full, Window
from manyheads.parts.norms import LayerNorm, NoNorm, PreNorm
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
HEADS: dict[type[Readout], str] = {
    NoReadout: "ModernBertModel",
    LanguageHead: "ModernBertForMaskedLM",
    ClassHead: "ModernBertForSequenceClassification",
    TokenHead: "ModernBertForTokenClassification",
    SpanHead: "ModernBertForQuestionAnswering",
}
FULL, SLIDING = "full_attention", "sliding_attention"
# The defaults if config.json leaves them out.
THETAS = {FULL: 160_000.0, SLIDING: 10_000.0}
LOCAL = 128
LAST_SPECIAL = 50283
SPECIAL = ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id")
# Ours below a layer and theirs below layers.N.
LAYER = (
    ("attention_residual.norm", "attn_norm"),
    ("attention.project", "attn.Wqkv"),
    ("attention.output", "attn.Wo"),
    ("feedforward_residual.norm", "mlp_norm"),
    ("feedforward.expand", "mlp.Wi"),
    ("feedforward.contract", "mlp.Wo"),
)
BODY = (
    ("embedding.tokens", "embeddings.tok_embeddings"),
    ("embedding.norm", "embeddings.norm"),
    ("stack.final_norm", "final_norm"),
)


class ModernBertFamily(Family):
    """ModernBERT."""

    name = "modernbert"
    tied_copies = ("decoder.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width = theirs["hidden_size"]
        norm = _norm(theirs)
        kinds = _kinds(theirs)
        rotary = {kind: _rotary(theirs, kind) for kind in (FULL, SLIDING)}
        # The two keys mean the same; `transformers` follows this one.
        side = theirs.get("sliding_window", theirs.get("local_attention", LOCAL) // 2)
        dropout = float(theirs.get("attention_dropout", 0.0))

        def layer(index: int) -> LayerConfig:
            attention = AttentionConfig(
                width=width,
                heads=theirs["num_attention_heads"],
                position=rotary[kinds[index]],
                mask=Full() if kinds[index] == FULL else Window(side, side),
                bias="all" if theirs.get("attention_bias", False) else "none",
                dropout=dropout,
            )
            # The embedding is already normalized, so the first attention has no norm.
            before = PreNorm(NoNorm()) if index == 0 else PreNorm(norm)
            return LayerConfig(
                attention=Branch(attention, before, dropout),
                feedforward=Branch(_feedforward(theirs), PreNorm(norm)),
            )

        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                norm=norm,
                dropout=float(theirs.get("embedding_dropout", 0.0)),
            ),
            stack=StackConfig(
                width=width,
                layers=tuple(layer(index) for index in range(len(kinds))),
                final_norm=norm,
            ),
            readout=_readout(theirs),
            init=Initialization(
                draw="truncated",
                std=float(theirs.get("initializer_range", 0.02)),
                scaled_outputs=True,
            ),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        first, width, norm = config.stack.layers[0], config.stack.width, config.embedding.norm
        if first.attention is None or first.feedforward is None or not isinstance(norm, LayerNorm):
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        if not isinstance(feedforward, GeGLU | SwiGLU) or attention.size * attention.heads != width:
            return None
        layers, head = _describe_layers(config), _describe_head(config.readout)
        if layers is None or head is None:
            return None
        # The default ids of special tokens must be in the vocabulary.
        small = config.embedding.vocabulary <= LAST_SPECIAL
        return {
            "model_type": "modernbert",
            "architectures": [HEADS[type(config.readout)]],
            "hidden_size": width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "intermediate_size": feedforward.hidden,
            "hidden_activation": _their_name(feedforward.activation),
            "vocab_size": config.embedding.vocabulary,
            "norm_eps": norm.eps,
            "norm_bias": norm.bias,
            "attention_bias": attention.bias == "all",
            "mlp_bias": feedforward.bias,
            "attention_dropout": attention.dropout,
            "mlp_dropout": feedforward.dropout,
            "embedding_dropout": config.embedding.dropout,
            **layers,
            **head,
            **(dict.fromkeys(SPECIAL) if small else {}),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have = set(ours)
        prefix = "" if isinstance(config.readout, NoReadout) else "model."
        body = [*BODY]
        for index in range(len(config.stack.layers)):
            body += [
                (f"stack.layers.{index}.{mine}", f"layers.{index}.{theirs}")
                for mine, theirs in LAYER
            ]
        answer = "decoder" if isinstance(config.readout, LanguageHead) else "classifier"
        head = (
            ("readout.transform.dense", "head.dense"),
            ("readout.transform.norm", "head.norm"),
            ("readout", answer),
        )
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in body
            ]
            table += [Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",)) for mine, theirs in head]
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack; rotary frequencies are not weights."""
        return None if name.endswith("inv_freq") else name.removeprefix("model.")


MODERNBERT = ModernBertFamily()


def _norm(theirs: Mapping[str, Any]) -> LayerNorm:
    return LayerNorm(
        eps=eps_of(theirs, "norm_eps", 1e-5), bias=bool(theirs.get("norm_bias", False))
    )


def _kinds(theirs: Mapping[str, Any]) -> list[str]:
    count = theirs["num_hidden_layers"]
    kinds = theirs.get("layer_types")
    if kinds is None:
        every = theirs.get("global_attn_every_n_layers", 3)
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


def _rotary(theirs: Mapping[str, Any], kind: str) -> Rotary:
    rope = (theirs.get("rope_parameters") or {}).get(kind) or {}
    rope = {**rope, **(theirs.get("rope_scaling") or {})}
    scaling = rope.get("rope_type", rope.get("type", "default"))
    # A partial_rotary_factor has no effect in this family.
    if scaling != "default":
        raise ConfigError(
            f"rope_type={scaling!r:.200} of {kind} is not supported", "use rope_type='default'"
        )
    full = theirs.get("global_rope_theta", THETAS[FULL])
    old = full if kind == FULL else theirs.get("local_rope_theta", THETAS[SLIDING])
    # In the first release a local theta of null means the global one.
    return Rotary(theta=float(rope.get("rope_theta", full if old is None else old)))


def _feedforward(theirs: Mapping[str, Any]) -> GeGLU | SwiGLU:
    width, hidden = theirs["hidden_size"], theirs["intermediate_size"]
    bias, dropout = bool(theirs.get("mlp_bias", False)), float(theirs.get("mlp_dropout", 0.0))
    match activation_of(theirs, "hidden_activation", ACTIVATIONS):
        case "gelu" | "gelu_tanh" as activation:
            return GeGLU(
                width=width, hidden=hidden, activation=activation, bias=bias, dropout=dropout
            )
        case "silu":
            return SwiGLU(width=width, hidden=hidden, bias=bias, dropout=dropout)
    raise ConfigError(
        f"hidden_activation={theirs['hidden_activation']!r} is not supported in a gated layer",
        "use gelu, gelu_pytorch_tanh or silu",
    )


def _their_name(activation: Activation) -> str:
    return next(name for name, ours in ACTIVATIONS.items() if ours == activation)


def _readout(theirs: Mapping[str, Any]) -> Readout:
    transform = ReadoutTransform(
        activation=activation_of(theirs, "classifier_activation", ACTIVATIONS),
        norm=_norm(theirs),
        bias=bool(theirs.get("classifier_bias", False)),
    )
    name = (theirs.get("architectures") or ["ModernBertModel"])[0]
    match name.removeprefix("ModernBert"):
        case "Model":
            return NoReadout()
        case "ForMaskedLM":
            return LanguageHead(
                tied=bool(theirs.get("tie_word_embeddings", True)),
                transform=transform,
                bias=bool(theirs.get("decoder_bias", True)),
            )
        case "ForSequenceClassification":
            pool = theirs.get("classifier_pooling", "cls")
            if pool not in POOLS:
                raise ConfigError(
                    f"classifier_pooling={pool!r} is not supported", "use cls or mean"
                )
            return ClassHead(classes=class_count(theirs), pool=POOLS[pool], transform=transform)
        case "ForTokenClassification":
            return TokenHead(classes=class_count(theirs), transform=transform)
        case "ForQuestionAnswering":
            return span_head(theirs, transform)
    raise ConfigError(
        f"the head of {name} is not supported", f"use one of {', '.join(HEADS.values())}"
    )


def _describe_layers(config: EncoderConfig) -> dict[str, Any] | None:
    kinds, thetas, local = [], dict(THETAS), LOCAL
    for index in range(len(config.stack.layers)):
        attention = config.stack.attention(index)
        if attention is None or not isinstance(attention.position, Rotary):
            return None
        if attention.position != Rotary(theta=attention.position.theta):
            return None
        kind = SLIDING if isinstance(attention.mask, Window) else FULL
        if isinstance(attention.mask, Window):
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
        "classifier_activation": _their_name(transform.activation),
        "classifier_bias": transform.bias,
    }
    if isinstance(readout, LanguageHead):
        return head | {"tie_word_embeddings": readout.tied, "decoder_bias": readout.bias}
    if isinstance(readout, ClassHead):
        pool = next((name for name, ours in POOLS.items() if ours == readout.pool), None)
        return None if pool is None else head | {"classifier_pooling": pool}
    return head
