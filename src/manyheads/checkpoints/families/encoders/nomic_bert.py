"""NomicBERT: a rotary encoder with gated feed-forwards and norms after each sublayer."""

from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.tensor_map import Either, Entry, MapEntry
from manyheads.errors import ConfigError
from manyheads.models import readout
from manyheads.models.layer import LayerConfig
from manyheads.parts.positions import Rotary

THETA = 1000.0
WORDS = "cls.predictions.transform"
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


class NomicBertFamily(family.EncoderFamily):
    """NomicBERT."""

    name = "nomic_bert"
    classes = {"nomic_bert": "NomicBert"}
    class_ends = {
        kind: family.MASKED_HEADS[kind]
        for kind in (readout.NoReadout, readout.LanguageHead, readout.ClassHead, readout.TokenHead)
    }
    keys = {
        **{name: key for name, key in bert.KEYS.items() if name != "max_position_embeddings"},
        "head_dim": config_keys.HEAD_SIZE,
        "hidden_act": config_keys.activation("silu", config_keys.GATED_ACTIVATIONS),
        "hidden_dropout_prob": config_keys.dropout("embedding"),
        "attention_probs_dropout_prob": config_keys.dropout("attention"),
        "initializer_range": config_keys.STD,
    }

    feedforward = family.gated_feedforward

    prefix = "nomic_bert."
    # That of the model's own code.
    other_prefixes = ("bert.",)
    embedding = {**bert.EMBEDDING, "embedding.norm": "emb_ln"}
    layers = "encoder.layers"
    layer = {
        "attention.project": "attn.Wqkv",
        "attention.output": "attn.out_proj",
        "attention_residual.norm": "norm1",
        # The gate is the second of a file's two.
        "feedforward.expand": ("mlp.fc12", "mlp.fc11"),
        "feedforward.contract": "mlp.fc2",
        "feedforward_residual.norm": "norm2",
    }
    heads = {
        **bert.masked_heads("nomic_bert.", "pooler.dense"),
        readout.LanguageHead: bert.transform(f"{WORDS}.dense", f"{WORDS}.layer_norm"),
    }
    words = bert.BERT.words
    tied_copies = bert.BERT.tied_copies
    unused = bert.POOLED
    buffers = ("inv_freq", "position_ids", "token_type_ids")
    older = {"embeddings.LayerNorm.": "emb_ln."}
    module_layers = "layers"
    modules = {
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

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        config_json = _newer(config_json)
        width, heads = config_json["hidden_size"], config_json["num_attention_heads"]
        size = config_json.get("head_dim")
        even = size is None or size * heads == width
        return {**config_json, "head_dim": "even" if even else size}

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        return AttentionConfig(position=_rotary(parts.json), **parts.attention)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        if not isinstance(getattr(parts.attention, "position", None), Rotary):
            return None
        rope = {"rope_type": "default", "rope_theta": parts.attention.position.theta}
        return {"rope_parameters": rope}

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        """Files have queries, keys and values in one tensor, modules of `transformers` apart."""
        if ".attention.project." not in name:
            return super().entry(name, sources, layer)
        apart = tuple(sources[0].replace("Wqkv", f"{part}_proj") for part in "qkv")
        other = super().entry(name, apart, layer)
        assert isinstance(other, Entry)
        return Either(Entry(name, sources), other)


NOMIC_BERT = NomicBertFamily()


def _newer(config_json: ConfigJson) -> ConfigJson:
    """The config with the keys of `transformers`, if it is one of the model's own code."""
    if "n_embd" not in config_json:
        return config_json
    for key, value in FIXED.items():
        if config_json.get(key, value) != value:
            raise ConfigError(f"{key}={config_json[key]!r:.200} is not supported", f"use {value!r}")
    renamed = {new: config_json[old] for old, new in OLDER_KEYS.items() if old in config_json}
    activation = renamed.get("hidden_act", "swiglu")
    if activation not in OLDER_ACTIVATIONS:
        raise ConfigError(
            f"activation_function={activation!r:.200} is not supported",
            f"use {' or '.join(OLDER_ACTIVATIONS)}",
        )
    renamed["hidden_act"] = OLDER_ACTIVATIONS[activation]
    theta = float(config_json.get("rotary_emb_base", 10_000.0))
    return {**config_json, **renamed, "rope_parameters": {"rope_theta": theta}}


def _rotary(config_json: ConfigJson) -> Rotary:
    rope: ConfigJson = config_json.get("rope_parameters") or {}
    kind = rope.get("rope_type", "default")
    if kind != "default":
        raise ConfigError(f"rope_type={kind!r:.200} is not supported", "use rope_type='default'")
    return Rotary(theta=float(rope.get("rope_theta", config_json.get("rope_theta", THETA))))
