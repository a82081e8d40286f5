"""Gemma 2 and the text models of Gemma 3: norms on both sides, capped scores, windows in turn."""

from collections.abc import Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, windows
from manyheads.checkpoints.families.decoders.llama import KEYS, LLAMA, NO_TOKENS, LlamaFamily
from manyheads.checkpoints.families.family import Sources, embedding_of
from manyheads.checkpoints.families.rope import LONGEST, longest_of, read_rope
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.layer import FeedForwardConfig
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


class GemmaFamily(LlamaFamily):
    """Gemma 2 and Gemma 3."""

    name = "gemma"
    classes: Mapping[str, str] = {GEMMA2: "Gemma2", GEMMA3: "Gemma3"}
    keys: Mapping[str, config_keys.Key] = {
        **KEYS,
        "rms_norm_eps": config_keys.Key("norm.eps", 1e-6, config_keys.EPS),
        "tie_word_embeddings": config_keys.TIED,
        "attention_bias": config_keys.BIAS,
        "query_pre_attn_scalar": config_keys.Key(
            "attention.scale",
            256,
            config_keys.Form(lambda _, value: value**-0.5, _scalar),
            "attention.score_scale",
        ),
        "attn_logit_softcapping": config_keys.Key("attention.softcap", None, config_keys.CAP),
        "final_logit_softcapping": config_keys.Key("readout.softcap", None, config_keys.CAP),
        "hidden_activation": config_keys.Key(
            "feedforward.activation", form=config_keys.one_of(ACTIVATIONS)
        ),
        "initializer_range": config_keys.STD,
    }
    only: Mapping[str, Any] = {}
    constants: Mapping[str, Any] = {**NO_TOKENS, "pad_token_id": None}
    placement = SandwichNorm
    layer: Mapping[str, Sources] = {
        **LLAMA.layer,
        "attention_residual.norm": "input_layernorm",
        "attention_residual.second_norm": "post_attention_layernorm",
        "feedforward_residual.norm": "pre_feedforward_layernorm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
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

    def read_norm(self, parts: config_keys.Parts) -> RMSNorm:
        return RMSNorm(centered=True, **parts.norm)

    def read_embedding(self, parts: config_keys.Parts) -> Embedding:
        return embedding_of(parts, scale=parts.width**0.5, round_scale=True)

    def read_inner(
        self, parts: config_keys.Parts, norm: RMSNorm, config_json: Mapping[str, Any], index: int
    ) -> AttentionConfig:
        family = config_json["model_type"]
        every = EVERY[family]
        if family == GEMMA3:
            every = int(config_json.get("sliding_window_pattern") or every)
        kind = windows.layer_kinds(config_json, every)[index]
        own = norm if family == GEMMA3 else NoNorm()
        return AttentionConfig(
            position=_rotary(config_json, kind),
            mask=windows.mask_of(kind, config_json.get("sliding_window", WINDOW)),
            query_norm=own,
            key_norm=own,
            **parts.attention,
        )

    def read_feedforward(
        self,
        parts: config_keys.Parts,
        config_json: Mapping[str, Any],  # noqa: ARG002
        index: int,  # noqa: ARG002
    ) -> FeedForwardConfig:
        return GeGLU(**parts.feedforward)

    def model_type(self, parts: config_keys.Parts) -> str:
        return GEMMA2 if parts.attention.query_norm == NoNorm() else GEMMA3

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:
        attentions = windows.attentions_of(config)
        ropes = windows.ropes_by_kind(attentions)
        if ropes is None:
            return None
        return {
            "rope_parameters": ropes[windows.FULL] if self.model_type(parts) == GEMMA2 else ropes,
            "sliding_window": windows.window_of(attentions, WINDOW),
            "layer_types": [windows.kind_of(attention) for attention in attentions],
            "max_position_embeddings": longest_of(parts.attention.position),
        }


GEMMA = GemmaFamily()


def _rotary(config_json: Mapping[str, Any], kind: str) -> Rotary:
    """Gemma 2 has one rotation; in Gemma 3 windows have their own, which no scaling touches."""
    longest = config_json.get("max_position_embeddings", LONGEST)
    rope: Any = config_json.get("rope_parameters") or {}
    scaling = config_json.get("rope_scaling") or {}
    theta = config_json.get("rope_theta", THETAS[windows.FULL])
    if config_json["model_type"] == GEMMA2:
        theta = config_json.get("rope_theta", THETAS[windows.SLIDING])
        return read_rope(scaling or rope, theta=theta, longest=longest)
    own = dict(rope.get(kind) or {})
    if kind == windows.FULL:
        return read_rope({**own, **scaling}, theta=theta, longest=longest)
    theta = config_json.get("rope_local_base_freq", THETAS[windows.SLIDING])
    return read_rope(own, theta=theta, longest=longest)
