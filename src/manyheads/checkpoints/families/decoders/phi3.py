"""Phi-3: as Llama, with joined matrices, a part of each head rotated, and LongRoPE."""

from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, windows
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders import llama
from manyheads.checkpoints.families.rope import describe_rope, longest_of, read_rope, rope_of
from manyheads.errors import ConfigError
from manyheads.parts.positions.rotary import LongRopeScaling, NoScaling, Rotary

# What `transformers` assumes where config.json does not say it.
LENGTH = 4096
# Older names of LongRoPE.
LONGROPE = ("longrope", "su", "yarn")


class Phi3Family(llama.LlamaFamily):
    """Phi-3."""

    name = "phi3"
    classes = {"phi3": "Phi3"}
    keys = {
        **llama.KEYS,
        "head_dim": llama.UNEVEN_HEAD_SIZE,
        "rms_norm_eps": config_keys.eps(1e-5),
        "resid_pdrop": config_keys.dropout("residual"),
        "embd_pdrop": config_keys.dropout("embedding"),
    }
    constants = {**llama.NO_TOKENS, "pad_token_id": None, "attention_bias": False}
    layer = {
        **llama.LLAMA.layer,
        "attention.project": "self_attn.qkv_proj",
        "feedforward.expand": "mlp.gate_up_proj",
    }

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        window = parts.json.get("sliding_window")
        mask = windows.mask_of(windows.FULL if window is None else windows.SLIDING, window)
        return AttentionConfig(position=_rotary(parts.json), mask=mask, **parts.attention)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        position = parts.attention.position
        rope = describe_rope(position)
        if rope is None or not isinstance(position.scaling, NoScaling | LongRopeScaling):
            return None
        described = {
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
            "max_position_embeddings": longest_of(position),
            "sliding_window": windows.describe_windows(config.stack, None)["sliding_window"],
            **llama.uneven_head_size(parts),
        }
        if isinstance(position.scaling, LongRopeScaling):
            described["original_max_position_embeddings"] = position.scaling.original_length
        return described


PHI3 = Phi3Family()


def _rotary(config_json: ConfigJson) -> Rotary:
    rope = rope_of(config_json)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LONGROPE:
        rope["rope_type"] = "longrope"
        # Outside the table it has precedence.
        length = config_json.get("original_max_position_embeddings", LENGTH)
        rope["original_max_position_embeddings"] = length
    elif kind != "default":
        raise ConfigError(f"rope_type={kind!r} is not supported for Phi-3", "use longrope")
    fraction = config_json.get("partial_rotary_factor", 1.0)
    return read_rope(config_json, 10_000.0, LENGTH, rope=rope, fraction=fraction)
