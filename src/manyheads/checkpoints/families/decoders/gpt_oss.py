"""gpt-oss: learned sinks, windows in turn, and experts with biases and a clamped SwiGLU."""

from collections.abc import Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, windows
from manyheads.checkpoints.families.config_keys import ConfigJson, Key, Parts
from manyheads.checkpoints.families.decoders.llama import KEYS, LLAMA, LlamaFamily
from manyheads.checkpoints.families.rope import describe_rope, longest_of, read_rope, rope_of
from manyheads.checkpoints.tensor_map import Alternating, MapEntry
from manyheads.errors import ConfigError
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.parts.experts import ClampedSwiGLU, Experts

# What `transformers` assumes where config.json does not say it.
THETA, WINDOW, HEAD_SIZE, LENGTH, EXPERTS = 150_000.0, 128, 64, 131_072, 128
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Every so many layers one sees the whole text.
EVERY = 2


class GptOssFamily(LlamaFamily):
    """gpt-oss, not quantized."""

    name = "gpt_oss"
    classes = {"gpt_oss": "GptOss"}
    keys = {
        **KEYS,
        "rms_norm_eps": config_keys.eps(1e-5),
        "attention_bias": Key("attention.bias", True, config_keys.flag("all", "none")),
        "num_local_experts": Key("feedforward.count"),
        "num_experts_per_tok": Key("feedforward.top_k", 4),
        "initializer_range": config_keys.STD,
    }
    only = {}
    constants = {**LLAMA.constants, "hidden_act": "silu"}
    per_layer_keys = ()
    layer = {
        **LLAMA.layer,
        "attention.sink": "self_attn.sinks",
        "feedforward.router": "mlp.router",
        "feedforward.expand": "mlp.experts.gate_up_proj",
        "feedforward.expand_bias": "mlp.experts.gate_up_proj_bias",
        "feedforward.contract": "mlp.experts.down_proj",
        "feedforward.contract_bias": "mlp.experts.down_proj_bias",
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        quantized = config_json.get("quantization_config")
        if quantized:
            method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
            raise ConfigError(
                f"weights quantized by {method!s:.40} are not supported",
                "load it in transformers with Mxfp4Config(dequantize=True) and save it again",
            )
        experts = {"num_local_experts": config_json.get("num_experts", EXPERTS)}
        size = {"head_dim": config_json.get("head_dim") or HEAD_SIZE}
        return super().complete({**experts, **config_json, **size})

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:
        kind = windows.layer_kinds(parts.json, EVERY)[index]
        position = read_rope(parts.json, THETA, LENGTH, rope=rope_of(parts.json) or YARN)
        mask = windows.mask_of(kind, parts.json.get("sliding_window", WINDOW))
        return AttentionConfig(position=position, mask=mask, sink="learned", **parts.attention)

    def read_feedforward(self, parts: Parts, index: int) -> FeedForwardConfig:  # noqa: ARG002
        alpha = float(parts.json.get("swiglu_alpha", 1.702))
        limit = float(parts.json.get("swiglu_limit", 7.0))
        gating = ClampedSwiGLU(alpha=alpha, limit=limit)
        return Experts(bias=True, gating=gating, **parts.feedforward)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        rope, gating = describe_rope(parts.attention.position), parts.feedforward.gating
        if rope is None or not isinstance(gating, ClampedSwiGLU):
            return None
        return {
            "swiglu_alpha": gating.alpha,
            "swiglu_limit": gating.limit,
            "rope_parameters": rope,
            **windows.describe_windows(config.stack, WINDOW),
            "max_position_embeddings": longest_of(parts.attention.position, LENGTH),
        }

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        """Gates and inputs of the experts alternate in a file."""
        if name.endswith((".feedforward.expand", ".feedforward.expand_bias")):
            return Alternating(name, sources)
        return super().entry(name, sources, layer)


GPT_OSS = GptOssFamily()
