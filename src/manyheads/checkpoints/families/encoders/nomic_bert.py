"""NomicBERT: a rotary encoder with gated feed-forwards and norms after each sublayer."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.encoders.bert import POOLED, POOLER, language_entries
from manyheads.checkpoints.families.family import (
    Family,
    activation_of,
    class_count,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Either, Entry, TensorMap
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
    TokenHead,
)
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import Activation, GeGLU, SwiGLU
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Rotary

ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}
HEADS: dict[type[Readout], str] = {
    NoReadout: "NomicBertModel",
    LanguageHead: "NomicBertForMaskedLM",
    ClassHead: "NomicBertForSequenceClassification",
    TokenHead: "NomicBertForTokenClassification",
}
THETA = 1000.0
# The keys of the model's own code, whose files have no others, and ours. Defaults are its own.
OLDER_KEYS = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "layer_norm_eps",
    "resid_pdrop": "hidden_dropout_prob",
    "attn_pdrop": "attention_probs_dropout_prob",
    "activation_function": "hidden_act",
}
OLDER_ACTIVATIONS = {"swiglu": "silu", "geglu": "gelu"}
# What that code can do and `transformers` cannot, with the only value that both have.
FIXED: dict[str, Any] = {
    "prenorm": False,
    "use_rms_norm": False,
    "causal": False,
    "parallel_block": False,
    "qkv_proj_bias": False,
    "mlp_fc1_bias": False,
    "mlp_fc2_bias": False,
    "rotary_emb_interleaved": False,
    "rotary_emb_fraction": 1.0,
    "rotary_emb_scale_base": None,
    "rotary_scaling_factor": None,
}
EMBEDDING = (
    ("embedding.tokens", "embeddings.word_embeddings"),
    ("embedding.types", "embeddings.token_type_embeddings"),
    ("embedding.norm", "emb_ln"),
)
# Ours below a layer and theirs below encoder.layers.N; the gate is the second of their two.
LAYER = (
    ("attention.output", ("attn.out_proj",)),
    ("attention_residual.norm", ("norm1",)),
    ("feedforward.expand", ("mlp.fc12", "mlp.fc11")),
    ("feedforward.contract", ("mlp.fc2",)),
    ("feedforward_residual.norm", ("norm2",)),
)
# The modules of `transformers` below layers.N; its files have the names on the right.
RENAMED = {
    "self_attn.o_proj": "attn.out_proj",
    "self_attn.q_proj": "attn.q_proj",
    "self_attn.k_proj": "attn.k_proj",
    "self_attn.v_proj": "attn.v_proj",
    "mlp.up_proj": "mlp.fc11",
    "mlp.gate_proj": "mlp.fc12",
    "mlp.down_proj": "mlp.fc2",
    "post_attention_layernorm": "norm1",
    "post_mlp_layernorm": "norm2",
}


class NomicBertFamily(Family):
    """NomicBERT."""

    name = "nomic_bert"
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = _newer(theirs)
        width, dropout = theirs["hidden_size"], float(theirs.get("hidden_dropout_prob", 0.0))
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-12))
        heads, size = theirs["num_attention_heads"], theirs.get("head_dim")
        attention = AttentionConfig(
            width=width,
            heads=heads,
            head_size="even" if size is None or size * heads == width else size,
            position=_rotary(theirs),
            dropout=float(theirs.get("attention_probs_dropout_prob", 0.0)),
        )
        layer = LayerConfig(
            attention=Branch(attention, PostNorm(norm), dropout),
            feedforward=Branch(_feedforward(theirs), PostNorm(norm), dropout),
        )
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                types=theirs.get("type_vocab_size", 2),
                norm=norm,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=(layer,) * theirs["num_hidden_layers"]),
            readout=_readout(theirs, norm),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first, width = config.embedding, config.stack.layers[0], config.stack.width
        if first.attention is None or first.feedforward is None or not embedding.types:
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        if not isinstance(feedforward, GeGLU | SwiGLU) or type(config.readout) not in HEADS:
            return None
        if not isinstance(attention.position, Rotary) or not isinstance(embedding.norm, LayerNorm):
            return None
        activation = feedforward.activation
        return {
            "model_type": "nomic_bert",
            "architectures": [HEADS[type(config.readout)]],
            "hidden_size": width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "head_dim": attention.size,
            "intermediate_size": feedforward.hidden,
            "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
            "vocab_size": embedding.vocabulary,
            "type_vocab_size": embedding.types,
            "layer_norm_eps": embedding.norm.eps,
            "hidden_dropout_prob": embedding.dropout,
            "attention_probs_dropout_prob": attention.dropout,
            "initializer_range": config.init.std,
            "rope_parameters": {"rope_type": "default", "rope_theta": attention.position.theta},
            "tie_word_embeddings": getattr(config.readout, "tied", True),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> TensorMap:
        assert isinstance(config, EncoderConfig)
        have, head, prefix = set(ours), config.readout, _prefix(config)
        body = [*EMBEDDING]
        if isinstance(head, ClassHead):
            body.append(("readout.transform.dense", "pooler.dense"))
        table = [
            Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
            for mine, theirs in body
            for kind in ("weight", "bias")
        ]
        projections: list[Either] = []
        for index, layer in enumerate(config.stack.layers):
            assert layer.attention is not None
            assert layer.feedforward is not None
            mine, place = f"stack.layers.{index}", f"encoder.layers.{index}"
            rows = (layer.feedforward.inner.hidden,) * 2
            for name, parts in LAYER:
                for kind in ("weight", "bias"):
                    names = tuple(f"{place}.{part}.{kind}" for part in parts)
                    table.append(Entry(f"{mine}.{name}.{kind}", names, rows, prefix=prefix))
            name = f"{mine}.attention.project.weight"
            apart = tuple(f"{place}.attn.{part}_proj.weight" for part in "qkv")
            rows_apart = tuple(layer.attention.inner.rows().values())
            projections.append(
                Either(
                    Entry(name, (f"{place}.attn.Wqkv.weight",), prefix=prefix),
                    Entry(name, apart, rows_apart, prefix=prefix),
                )
            )
        if isinstance(head, LanguageHead):
            table += language_entries(head, "cls.predictions")
            names_of = (("dense", "dense"), ("norm", "layer_norm"))
            table += [
                Entry(
                    f"readout.transform.{mine}.{kind}", (f"cls.predictions.transform.{it}.{kind}",)
                )
                for mine, it in names_of
                for kind in ("weight", "bias")
            ]
        else:
            table += [
                Entry(f"readout.{kind}", (f"classifier.{kind}",)) for kind in ("weight", "bias")
            ]
        return [*(entry for entry in table if entry.ours in have), *projections]

    def canonical_name(self, name: str) -> str | None:
        """Without a prefix, and as files name what `transformers` names otherwise."""
        if name.endswith(("inv_freq", "position_ids", "token_type_ids")):
            return None
        bare = name.removeprefix("nomic_bert.").removeprefix("bert.")
        bare = bare.replace("embeddings.LayerNorm.", "emb_ln.")
        found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", bare)
        if found is None:
            return bare
        index, part, kind = found.groups()
        return f"encoder.layers.{index}.{RENAMED.get(part, part)}.{kind}"

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Only classes of sequences need the pooler."""
        pooler = () if isinstance(config.readout, ClassHead) else POOLED
        return {name: _prefix(config) + name for name in pooler}

    def module_name(self, stem: str) -> str:
        """Files keep the names of the model's own code."""
        found = re.fullmatch(r"(nomic_bert\.|)encoder\.layers\.(\d+)\.(.+)", stem)
        if found is None:
            return stem
        prefix, index, part = found.groups()
        new = next((new for new, old in RENAMED.items() if old == part), part)
        return f"{prefix}layers.{index}.{new}"


NOMIC_BERT = NomicBertFamily()


def _prefix(config: ModelConfig) -> str:
    return "" if isinstance(config.readout, NoReadout) else "nomic_bert."


def _newer(theirs: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config with the keys of `transformers`, if it is one of the model's own code."""
    if "n_embd" not in theirs:
        return theirs
    for key, value in FIXED.items():
        if theirs.get(key, value) != value:
            raise ConfigError(f"{key}={theirs[key]!r:.200} is not supported", f"use {value!r}")
    renamed = {new: theirs[old] for old, new in OLDER_KEYS.items() if old in theirs}
    activation = renamed.get("hidden_act", "swiglu")
    if activation not in OLDER_ACTIVATIONS:
        raise ConfigError(
            f"activation_function={activation!r:.200} is not supported",
            f"use {' or '.join(OLDER_ACTIVATIONS)}",
        )
    renamed["hidden_act"] = OLDER_ACTIVATIONS[activation]
    names = [
        name.replace("ForPreTraining", "ForMaskedLM") for name in theirs.get("architectures") or []
    ]
    theta = float(theirs.get("rotary_emb_base", 10_000.0))
    return {**theirs, **renamed, "architectures": names, "rope_parameters": {"rope_theta": theta}}


def _rotary(theirs: Mapping[str, Any]) -> Rotary:
    rope = theirs.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"rope_type={kind!r:.200} is not supported", "use rope_type='default'")
    return Rotary(theta=float(rope.get("rope_theta", theirs.get("rope_theta", THETA))))


def _activation(theirs: Mapping[str, Any]) -> Activation:
    return activation_of({"hidden_act": "silu", **theirs}, "hidden_act", ACTIVATIONS)


def _feedforward(theirs: Mapping[str, Any]) -> GeGLU | SwiGLU:
    width, hidden = theirs["hidden_size"], theirs["intermediate_size"]
    match _activation(theirs):
        case "gelu" | "gelu_tanh" as activation:
            return GeGLU(width=width, hidden=hidden, activation=activation)
        case _:
            return SwiGLU(width=width, hidden=hidden)


def _readout(theirs: Mapping[str, Any], norm: LayerNorm) -> Readout:
    name = (theirs.get("architectures") or ["NomicBertModel"])[0]
    match name.removeprefix("NomicBert"):
        case "Model":
            return NoReadout()
        case "ForMaskedLM":
            transform = ReadoutTransform(activation=_activation(theirs), norm=norm)
            tied = bool(theirs.get("tie_word_embeddings", True))
            return LanguageHead(tied=tied, transform=transform, bias=True)
        case "ForSequenceClassification":
            return ClassHead(classes=class_count(theirs), transform=POOLER)
        case "ForTokenClassification":
            return TokenHead(classes=class_count(theirs))
    raise ConfigError(
        f"the head of {name} is not supported", f"use one of {', '.join(HEADS.values())}"
    )
