"""Llama, Mistral and Qwen2, and what Qwen3, Mixtral, Phi-3 and others share with them."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.family import DecoderFamily, Sources, layer_of
from manyheads.checkpoints.families.rope import (
    LONGEST,
    describe_rope,
    longest_of,
    read_rope,
    rope_of,
)
from manyheads.checkpoints.families.windows import FULL, SLIDING, layer_kinds
from manyheads.checkpoints.tensor_map import Either, Entry, Interleaved
from manyheads.errors import ConfigError
from manyheads.mixers.build import MixerConfig
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, Readout, TokenHead
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.masks import Causal, Mask, Window
from manyheads.parts.norms import NoNorm, Placement, PreNorm, RMSNorm
from manyheads.parts.positions.rotary import NoScaling, Rotary

# The families that normalize queries and keys.
NORMED = ("qwen3", "qwen3_moe", "qwen3_next")
# What `transformers` assumes where config.json does not say it.
WINDOW = 4096
THETAS = {"mixtral": 1_000_000.0}
LENGTHS = {"llama": 2048, "mistral": 131_072, "mixtral": 131_072}
KEYS: dict[str, config_keys.Key] = {
    "hidden_size": config_keys.WIDTH,
    "num_hidden_layers": config_keys.DEPTH,
    "num_attention_heads": config_keys.HEADS,
    "num_key_value_heads": config_keys.KV_HEADS,
    "head_dim": config_keys.HEAD_SIZE,
    "intermediate_size": config_keys.HIDDEN,
    "vocab_size": config_keys.VOCABULARY,
    "rms_norm_eps": config_keys.Key("norm.eps", form=config_keys.EPS),
    "tie_word_embeddings": config_keys.UNTIED,
    "attention_dropout": config_keys.Key("attention.dropout", 0.0, config_keys.FLOAT),
    "initializer_range": config_keys.UNWRITTEN_STD,
}
# Written only where it is not width / heads.
UNEVEN_HEAD_SIZE = replace(config_keys.HEAD_SIZE, written="never")
# Without them `transformers` uses 1 and 2, whatever these are in this vocabulary.
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None}


class LlamaFamily(DecoderFamily):
    """Llama, Mistral and Qwen2."""

    name = "llama"
    classes: Mapping[str, str] = {
        "llama": "Llama",
        "mistral": "Mistral",
        "qwen2": "Qwen2",
        "qwen3": "Qwen3",
    }
    keys: Mapping[str, config_keys.Key] = KEYS
    only: Mapping[str, Any] = {"hidden_act": "silu"}
    constants: Mapping[str, Any] = NO_TOKENS
    per_layer_keys: tuple[str, ...] = (
        "num_attention_heads",
        "num_key_value_heads",
        "intermediate_size",
    )
    placement: Callable[[RMSNorm], Placement] = PreNorm
    # Whether the gates in q_proj follow the queries of a head or of all that share a key head.
    gates_per: Literal["head", "key head"] = "key head"

    root = "model."
    embedding: Mapping[str, Sources] = {
        "embedding.tokens": "embed_tokens",
        "stack.final_norm": "norm",
    }
    layers = "layers"
    layer: Mapping[str, Sources] = {
        "attention.project": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
        "attention.output": "self_attn.o_proj",
        "attention.query_norm": "self_attn.q_norm",
        "attention.key_norm": "self_attn.k_norm",
        "feedforward.expand": ("mlp.gate_proj", "mlp.up_proj"),
        "feedforward.contract": "mlp.down_proj",
        "attention_residual.norm": "input_layernorm",
        "feedforward_residual.norm": "post_attention_layernorm",
    }
    heads: Mapping[type[Readout], Mapping[str, Sources]] = {
        LanguageHead: {"readout": "lm_head"},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "score"},
    }
    tied_copies = ("lm_head.weight",)
    # Old files hold the rotary frequencies.
    buffers = (".rotary_emb.inv_freq",)

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        config_json = super().complete(config_json)
        width, heads = config_json["hidden_size"], config_json["num_attention_heads"]
        return {
            **config_json,
            "num_key_value_heads": config_json.get("num_key_value_heads") or heads,
            "head_dim": config_json.get("head_dim") or width // heads,
        }

    def read_layers(
        self, parts: config_keys.Parts, norm: RMSNorm, config_json: Mapping[str, Any]
    ) -> Iterator[LayerConfig]:
        dropout = parts.residual.get("dropout", 0.0)
        for index in range(parts.depth):
            inner = self.read_inner(parts, norm, config_json, index)
            feedforward = self.read_feedforward(parts, config_json, index)
            yield layer_of(inner, feedforward, self.placement_of(inner)(norm), dropout)

    def placement_of(self, inner: AttentionConfig | MixerConfig) -> Callable[[RMSNorm], Placement]:  # noqa: ARG002
        """Where the norms of a layer are."""
        return type(self).placement

    def read_inner(
        self, parts: config_keys.Parts, norm: RMSNorm, config_json: Mapping[str, Any], index: int
    ) -> AttentionConfig | MixerConfig:
        """The attention of a layer, or its mixer."""
        own = norm if config_json["model_type"] in NORMED else NoNorm()
        return AttentionConfig(
            position=_rotary(config_json),
            mask=_mask(config_json, index),
            query_norm=own,
            key_norm=own,
            bias=_bias(config_json),
            **parts.attention,
        )

    def read_feedforward(
        self,
        parts: config_keys.Parts,
        config_json: Mapping[str, Any],
        index: int,  # noqa: ARG002
    ) -> FeedForwardConfig:
        # Only Llama's own class reads it.
        biased = config_json["model_type"] == "llama" and config_json.get("mlp_bias", False)
        return SwiGLU(bias=biased, **parts.feedforward)

    def model_type(self, parts: config_keys.Parts) -> str:
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
        return "mistral" if uneven or all(_windows(parts.stack)) else "llama"

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:  # noqa: ARG002
        rope = describe_rope(parts.attention.position)
        if rope is None:
            return None
        return {
            "rope_parameters": rope,
            "attention_bias": parts.attention.bias == "all",
            "mlp_bias": parts.feedforward.bias,
            "max_position_embeddings": longest_of(parts.attention.position),
            **_describe_windows(parts.stack, self.model_type(parts)),
        }

    def entry(
        self, name: str, sources: tuple[str, ...], layer: LayerConfig | None
    ) -> Entry | Either:
        attention = layer.attention.inner if layer is not None and layer.attention else None
        if attention is None or not attention.gates or ".attention.project." not in name:
            return super().entry(name, sources, layer)
        rows = attention.rows()
        blocks = rows.pop("query"), rows.pop("gate_output")
        groups = attention.heads if self.gates_per == "head" else attention.key_heads
        sizes = (sum(blocks), *rows.values())
        return Interleaved(name, sources, sizes, blocks=blocks, groups=groups)


LLAMA = LlamaFamily()


def uneven_head_size(parts: config_keys.Parts) -> dict[str, int]:
    """The size of heads where it is not width / heads."""
    size, heads = parts.attention.size, parts.attention.heads
    return {} if size * heads == parts.stack.width else {"head_dim": size}


def _bias(config_json: Mapping[str, Any]) -> Literal["none", "inputs", "all"]:
    if config_json["model_type"] == "qwen2":
        return "inputs"
    uses_it = config_json["model_type"] in ("llama", *NORMED)
    return "all" if uses_it and config_json.get("attention_bias", False) else "none"


def _mask(config_json: Mapping[str, Any], index: int) -> Mask:
    family, window = config_json["model_type"], config_json.get("sliding_window", WINDOW)
    if family in ("llama", "qwen3_next"):
        return Causal()
    if family == "mixtral":
        window = config_json.get("sliding_window")
    elif family.startswith("qwen") and not config_json.get("use_sliding_window", False):
        window = None
    slides = _slides(config_json, index, window) if family in ("qwen2", "qwen3") else True
    return Causal() if window is None or not slides else Window(window - 1)


def _slides(config_json: Mapping[str, Any], index: int, window: int | None) -> bool:
    """Whether a layer of Qwen2 or Qwen3 sees a window."""
    if config_json.get("layer_types") is None:
        return bool(index >= config_json.get("max_window_layers", 28))
    kinds = layer_kinds(config_json)
    if window is None and SLIDING in kinds:
        raise ConfigError(
            f"layer_types has {SLIDING}, and no window is in use", "set use_sliding_window to true"
        )
    return kinds[index] == SLIDING


def _rotary(config_json: Mapping[str, Any]) -> Rotary:
    family = config_json["model_type"]
    rotary = read_rope(
        rope_of(config_json),
        theta=config_json.get("rope_theta", THETAS.get(family, 10_000.0)),
        fraction=config_json.get("partial_rotary_factor", 1.0),
        longest=config_json.get("max_position_embeddings", LENGTHS.get(family, LONGEST)),
    )
    # The other families rotate whole heads, whatever this says, and fail on it with a scaling.
    if family != "qwen3_next" and rotary.fraction != 1.0:
        if rotary.scaling != NoScaling():
            raise ConfigError(
                f"partial_rotary_factor={rotary.fraction!r} is not supported for a scaled {family}",
                "remove it",
            )
        return replace(rotary, fraction=1.0)
    return rotary


def _windows(stack: StackConfig) -> list[Window | None]:
    masks = [layer.attention.inner.mask if layer.attention else None for layer in stack.layers]
    return [mask if isinstance(mask, Window) else None for mask in masks]


def _describe_windows(stack: StackConfig, family: str) -> dict[str, Any]:
    windows = _windows(stack)
    widths = [window.before + 1 for window in windows if window is not None]
    window = {"sliding_window": widths[0] if widths else None}
    if family == "llama":
        return {}
    if family in ("mistral", "mixtral"):
        return window
    kinds = [FULL if window is None else SLIDING for window in windows]
    sliding = {"use_sliding_window": bool(widths), "max_window_layers": 0}
    return {**window, **sliding, "layer_types": kinds}
