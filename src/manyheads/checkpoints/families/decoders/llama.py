"""Llama, Mistral and Qwen2, and what Qwen3, Mixtral, Phi-3 and others share with them."""

from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, rope, windows
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.family import DecoderFamily, Inner
from manyheads.checkpoints.tensor_map import Interleaved, MapEntry
from manyheads.errors import ConfigError
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, TokenHead
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.masks import Causal, Mask, Window
from manyheads.parts.norms import NoNorm, RMSNorm
from manyheads.parts.positions.rotary import NoScaling, Rotary

# The families that normalize queries and keys.
NORMED = ("qwen3", "qwen3_moe", "qwen3_next")
# What `transformers` assumes where config.json does not say it.
WINDOW = 4096
THETAS = {"mixtral": 1_000_000.0}
LENGTHS = {"llama": 2048, "mistral": 131_072, "mixtral": 131_072}
KEYS: dict[str, config_keys.Key] = {
    **config_keys.SIZES,
    "num_key_value_heads": config_keys.KV_HEADS,
    "head_dim": config_keys.HEAD_SIZE,
    "rms_norm_eps": config_keys.eps(),
    "tie_word_embeddings": config_keys.UNTIED,
    "attention_dropout": config_keys.dropout("attention"),
    "initializer_range": config_keys.UNWRITTEN_STD,
}
# Written only where it is not width / heads.
UNEVEN_HEAD_SIZE = replace(config_keys.HEAD_SIZE, written="never")
# Without them `transformers` uses 1 and 2, whatever these are in this vocabulary.
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


class LlamaFamily(DecoderFamily):
    """Llama, Mistral and Qwen2."""

    name = "llama"
    classes = {"llama": "Llama", "mistral": "Mistral", "qwen2": "Qwen2", "qwen3": "Qwen3"}
    keys = KEYS
    only = {"hidden_act": "silu"}
    constants = NO_TOKENS
    per_layer_keys: tuple[str, ...] = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    # Whether the gates in q_proj follow the queries of a head or of all that share a key head.
    gates_per: Literal["head", "key head"] = "key head"

    root = "model."
    embedding = {"embedding.tokens": "embed_tokens", "stack.final_norm": "norm"}
    layers = "layers"
    layer = {
        "attention.project": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "feedforward.expand": ("mlp.gate_proj", "mlp.up_proj"),
        "feedforward.contract": "mlp.down_proj",
        "attention_residual.norm": "input_layernorm",
        "feedforward_residual.norm": "post_attention_layernorm",
    }
    heads = {
        LanguageHead: {"readout": "lm_head"},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "score"},
    }
    tied_copies = ("lm_head.weight",)
    # Old files hold the rotary frequencies.
    buffers = (".rotary_emb.inv_freq",)

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        config_json = super().complete(config_json)
        width, heads = config_json["hidden_size"], config_json["num_attention_heads"]
        return {
            **config_json,
            "num_key_value_heads": config_json.get("num_key_value_heads") or heads,
            "head_dim": config_json.get("head_dim") or width // heads,
        }

    def read_inner(self, parts: Parts, index: int) -> Inner:
        family = parts.json["model_type"]
        own = parts.norm if family in NORMED else NoNorm()
        # Only these read the key.
        biased = family in ("llama", *NORMED) and parts.json.get("attention_bias", False)
        return AttentionConfig(
            position=_rotary(parts.json),
            mask=_mask(parts.json, index),
            query_norm=own,
            key_norm=own,
            bias="inputs" if family == "qwen2" else "all" if biased else "none",
            **parts.attention,
        )

    def read_feedforward(self, parts: Parts, index: int) -> FeedForwardConfig:  # noqa: ARG002
        # Only Llama's own class reads it.
        biased = parts.json["model_type"] == "llama" and parts.json.get("mlp_bias", False)
        return SwiGLU(bias=biased, **parts.feedforward)

    def model_type(self, parts: Parts) -> str:
        attention = parts.attention
        if len(self.classes) == 1:
            return super().model_type(parts)
        if isinstance(attention.query_norm, RMSNorm):
            return "qwen3"
        if attention.bias == "inputs":
            return "qwen2"
        # `transformers` refuses a Llama whose heads do not divide the width, whatever their size. A
        # Mistral without a window computes the same and may have any number of heads.
        uneven = parts.stack.width % attention.heads != 0
        kinds = windows.describe_windows(parts.stack, None)["layer_types"]
        return "mistral" if uneven or windows.FULL not in kinds else "llama"

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        rotation = rope.describe_rope(parts.attention.position)
        if rotation is None:
            return None
        described = {
            "rope_parameters": rotation,
            "attention_bias": parts.attention.bias == "all",
            "mlp_bias": parts.feedforward.bias,
            "max_position_embeddings": rope.longest_of(parts.attention.position),
        }
        family, seen = self.model_type(parts), windows.describe_windows(parts.stack, None)
        if family == "llama":
            return described
        window = seen["sliding_window"]
        if family in ("mistral", "mixtral"):
            return described | {"sliding_window": window}
        used = {"use_sliding_window": window is not None, "max_window_layers": 0}
        return described | seen | used

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        attention = layer.attention.inner if layer is not None and layer.attention else None
        if attention is None or not attention.gates or ".attention.project." not in name:
            return super().entry(name, sources, layer)
        rows = attention.rows()
        blocks = rows.pop("query"), rows.pop("gate_output")
        groups = attention.heads if self.gates_per == "head" else attention.key_heads
        sizes = (sum(blocks), *rows.values())
        return Interleaved(name, sources, sizes, blocks=blocks, groups=groups)


LLAMA = LlamaFamily()


def uneven_head_size(parts: Parts) -> dict[str, int]:
    """The size of heads where it is not width / heads."""
    size, heads = parts.attention.size, parts.attention.heads
    return {} if size * heads == parts.stack.width else {"head_dim": size}


def _mask(config_json: ConfigJson, index: int) -> Mask:
    family, window = config_json["model_type"], config_json.get("sliding_window", WINDOW)
    if family in ("llama", "qwen3_next"):
        return Causal()
    if family == "mixtral":
        window = config_json.get("sliding_window")
    elif family.startswith("qwen") and not config_json.get("use_sliding_window", False):
        window = None
    slides = True
    if family in ("qwen2", "qwen3") and config_json.get("layer_types") is None:
        slides = index >= config_json.get("max_window_layers", 28)
    elif family in ("qwen2", "qwen3"):
        kinds = windows.layer_kinds(config_json)
        if window is None and windows.SLIDING in kinds:
            raise ConfigError(
                f"layer_types has {windows.SLIDING}, and no window is in use",
                "set use_sliding_window to true",
            )
        slides = kinds[index] == windows.SLIDING
    return Causal() if window is None or not slides else Window(window - 1)


def _rotary(config_json: ConfigJson) -> Rotary:
    family = config_json["model_type"]
    theta, longest = THETAS.get(family, 10_000.0), LENGTHS.get(family, rope.LONGEST)
    fraction = config_json.get("partial_rotary_factor", 1.0)
    rotary = rope.read_rope(config_json, theta, longest, fraction=fraction)
    # The other families rotate whole heads, whatever this says, and fail on it with a scaling.
    if family != "qwen3_next" and rotary.fraction != 1.0:
        if rotary.scaling != NoScaling():
            raise ConfigError(
                f"partial_rotary_factor={rotary.fraction!r} is not supported for a scaled {family}",
                "remove it",
            )
        return replace(rotary, fraction=1.0)
    return rotary
