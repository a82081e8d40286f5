"""Gemma 2 and the text models of Gemma 3: norms on both sides, capped scores, windows in turn."""

from functools import partial
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, windows
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders.llama import KEYS, LLAMA, NO_TOKENS, LlamaFamily
from manyheads.checkpoints.families.family import embedding_of
from manyheads.checkpoints.families.rope import longest_of, read_rope
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.parts.feedforward import GeGLU
from manyheads.parts.norms import NoNorm, RMSNorm, SandwichNorm
from manyheads.parts.positions.rotary import Rotary

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
# What `transformers` assumes where config.json does not say it.
WINDOW = 4096
DEFAULTS: dict[str, Any] = {"num_key_value_heads": 4, "head_dim": 256}
CAPS: dict[str, dict[str, float | None]] = {
    GEMMA2: {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    GEMMA3: {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
# Every so many layers one sees the whole text.
EVERY = {GEMMA2: 2, GEMMA3: 6}
THETAS = {windows.FULL: 1_000_000.0, windows.SLIDING: 10_000.0}


def _scalar(scale: float) -> int | float:
    """A whole number where it is one, as `transformers` wants it."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar


SCALAR = config_keys.Form(lambda _, value: value**-0.5, _scalar)


class GemmaFamily(LlamaFamily):
    """Gemma 2 and Gemma 3."""

    name = "gemma"
    classes = {GEMMA2: "Gemma2", GEMMA3: "Gemma3"}
    keys = {
        **KEYS,
        "rms_norm_eps": config_keys.eps(1e-6),
        "tie_word_embeddings": config_keys.TIED,
        "attention_bias": config_keys.BIAS,
        "query_pre_attn_scalar": config_keys.Key(
            "attention.scale", 256, SCALAR, "attention.score_scale"
        ),
        "attn_logit_softcapping": config_keys.Key("attention.softcap", None, config_keys.CAP),
        "final_logit_softcapping": config_keys.Key("readout.softcap", None, config_keys.CAP),
        "hidden_activation": config_keys.activation(names=ACTIVATIONS),
        "initializer_range": config_keys.STD,
    }
    only = {}
    constants = {**NO_TOKENS, "pad_token_id": None}
    norm = partial(RMSNorm, centered=True)
    placement = SandwichNorm
    layer = {
        **LLAMA.layer,
        "attention_residual.norm": "input_layernorm",
        "attention_residual.second_norm": "post_attention_layernorm",
        "feedforward_residual.norm": "pre_feedforward_layernorm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        if config_json.get("use_bidirectional_attention"):
            raise ConfigError(
                "use_bidirectional_attention=true is not supported", "use a causal Gemma"
            )
        family = config_json["model_type"]
        own = {
            **DEFAULTS,
            **CAPS[family],
            **config_json,
            "attention_dropout": config_json.get("attention_dropout") or 0.0,
            # Older files say it under another key, and `transformers` reads only this one.
            "hidden_activation": config_json.get("hidden_activation") or "gelu_pytorch_tanh",
        }
        # Gemma 3 in `transformers` does not use it, whatever it says.
        return own | ({"attn_logit_softcapping": None} if family == GEMMA3 else {})

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts, scale=parts.width**0.5, round_scale=True)

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:
        family = parts.json["model_type"]
        later, every = family == GEMMA3, EVERY[family]
        if later:
            every = int(parts.json.get("sliding_window_pattern") or every)
        kind = windows.layer_kinds(parts.json, every)[index]
        own = parts.norm if later else NoNorm()
        return AttentionConfig(
            position=_rotary(parts.json, kind),
            mask=windows.mask_of(kind, parts.json.get("sliding_window", WINDOW)),
            query_norm=own,
            key_norm=own,
            **parts.attention,
        )

    def read_feedforward(self, parts: Parts, index: int) -> GeGLU:  # noqa: ARG002
        return GeGLU(**parts.feedforward)

    def model_type(self, parts: Parts) -> str:
        return GEMMA2 if parts.attention.query_norm == NoNorm() else GEMMA3

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        ropes = windows.ropes_by_kind(config.stack)
        if ropes is None:
            return None
        return {
            "rope_parameters": ropes[windows.FULL] if self.model_type(parts) == GEMMA2 else ropes,
            **windows.describe_windows(config.stack, WINDOW),
            "max_position_embeddings": longest_of(parts.attention.position),
        }


GEMMA = GemmaFamily()


def _rotary(config_json: ConfigJson, kind: str) -> Rotary:
    """Gemma 2 has one rotation; in Gemma 3 windows have their own, which no scaling touches."""
    if config_json["model_type"] == GEMMA2:
        return read_rope(config_json, THETAS[windows.SLIDING])
    own = dict((config_json.get("rope_parameters") or {}).get(kind) or {})
    if kind == windows.FULL:
        own |= config_json.get("rope_scaling") or {}
    else:
        local = config_json.get("rope_local_base_freq", THETAS[windows.SLIDING])
        own = {**own, "rope_theta": own.get("rope_theta") or local}
    return read_rope(config_json, THETAS[windows.FULL], rope=own)
