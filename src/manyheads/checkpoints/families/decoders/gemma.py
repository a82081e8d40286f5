"""Gemma 2 and the text models of Gemma 3: norms on both sides, capped scores, windows in turn."""

from collections.abc import Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LlamaFamily
from manyheads.checkpoints.families.decoders.rope import LONGEST, longest_of, read_rope
from manyheads.checkpoints.families.decoders.windows import (
    FULL,
    SLIDING,
    attentions_of,
    kind_of,
    layer_kinds,
    mask_of,
    ropes_by_kind,
    window_of,
)
from manyheads.checkpoints.families.family import (
    CAUSAL_HEADS,
    activation_of,
    causal_readout,
    default_labels,
    eps_of,
)
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import GeGLU
from manyheads.parts.norms import NoNorm, RMSNorm, SandwichNorm
from manyheads.parts.positions.rotary import Rotary

GEMMA2, GEMMA3 = "gemma2", "gemma3_text"
CLASSES = {GEMMA2: "Gemma2", GEMMA3: "Gemma3"}
ACTIVATIONS = {"gelu_pytorch_tanh": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu": "gelu"}
# What `transformers` assumes where config.json does not say it.
SCALAR, WINDOW, HEAD_SIZE, KEY_HEADS = 256, 4096, 256, 4
CAPS: dict[str, dict[str, float | None]] = {
    GEMMA2: {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0},
    GEMMA3: {"attn_logit_softcapping": None, "final_logit_softcapping": None},
}
# Every so many layers one sees the whole text.
EVERY = {GEMMA2: 2, GEMMA3: 6}
THETAS = {FULL: 1_000_000.0, SLIDING: 10_000.0}


class GemmaFamily(LlamaFamily):
    """Gemma 2 and Gemma 3."""

    name = "gemma"
    norms: Mapping[str, str] = {
        "attention_residual.norm": "input_layernorm",
        "attention_residual.second_norm": "post_attention_layernorm",
        "feedforward_residual.norm": "pre_feedforward_layernorm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        if theirs.get("use_bidirectional_attention"):
            raise ConfigError(
                "use_bidirectional_attention=true is not supported", "use a causal Gemma"
            )
        width, family = theirs["hidden_size"], theirs["model_type"]
        norm = RMSNorm(eps=eps_of(theirs, "rms_norm_eps", 1e-6), centered=True)
        kinds = layer_kinds(theirs, EVERY[family] if family == GEMMA2 else _pattern(theirs))
        rotary = {kind: _rotary(theirs, kind) for kind in (FULL, SLIDING)}
        scores, logits = (theirs.get(key, cap) for key, cap in CAPS[family].items())
        own = norm if family == GEMMA3 else NoNorm()

        def layer(kind: str) -> LayerConfig:
            attention = AttentionConfig(
                width=width,
                heads=theirs["num_attention_heads"],
                kv_heads=theirs.get("num_key_value_heads", KEY_HEADS),
                head_size=theirs.get("head_dim", HEAD_SIZE),
                position=rotary[kind],
                mask=mask_of(kind, theirs.get("sliding_window", WINDOW)),
                query_norm=own,
                key_norm=own,
                bias="all" if theirs.get("attention_bias", False) else "none",
                scale=theirs.get("query_pre_attn_scalar", SCALAR) ** -0.5,
                # Gemma 3 in `transformers` does not use it, whatever it says.
                softcap=float(scores) if scores and family == GEMMA2 else "none",
                dropout=float(theirs.get("attention_dropout") or 0.0),
            )
            feedforward = GeGLU(
                width=width,
                hidden=theirs["intermediate_size"],
                activation=_activation(theirs),
            )
            return LayerConfig(
                attention=Branch(attention, SandwichNorm(norm)),
                feedforward=Branch(feedforward, SandwichNorm(norm)),
            )

        head = LanguageHead(
            tied=bool(theirs.get("tie_word_embeddings", True)),
            softcap=float(logits) if logits else "none",
        )
        return DecoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"], width=width, scale=width**0.5, round_scale=True
            ),
            stack=StackConfig(
                width=width, layers=tuple(layer(kind) for kind in kinds), final_norm=norm
            ),
            readout=causal_readout(theirs, head),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        first, norm, head = config.stack.layers[0], config.stack.final_norm, config.readout
        if first.attention is None or first.feedforward is None or not isinstance(norm, RMSNorm):
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        attentions = attentions_of(config)
        ropes = ropes_by_kind(attentions)
        if ropes is None or not isinstance(feedforward, GeGLU):
            return None
        family = GEMMA2 if attention.query_norm == NoNorm() else GEMMA3
        tanh = feedforward.activation == "gelu_tanh"
        cap = getattr(head, "softcap", "none")
        return {
            "model_type": family,
            "architectures": [CLASSES[family] + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "head_dim": attention.size,
            "intermediate_size": feedforward.hidden,
            "vocab_size": config.embedding.vocabulary,
            "rms_norm_eps": norm.eps,
            "rope_parameters": ropes[FULL] if family == GEMMA2 else ropes,
            "tie_word_embeddings": getattr(head, "tied", True),
            "attention_bias": attention.bias == "all",
            "attention_dropout": attention.dropout,
            "query_pre_attn_scalar": _scalar(attention.score_scale),
            "sliding_window": window_of(attentions, WINDOW),
            "layer_types": [kind_of(each) for each in attentions],
            "attn_logit_softcapping": attention.score_cap,
            "final_logit_softcapping": None if cap == "none" else cap,
            "max_position_embeddings": longest_of(attention.position),
            "hidden_activation": "gelu_pytorch_tanh" if tanh else "gelu",
            "initializer_range": config.init.std,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **default_labels(head),
        }


GEMMA = GemmaFamily()


def _activation(theirs: Mapping[str, Any]) -> Any:
    # Older files say it under another key, and `transformers` reads only this one.
    given = {"hidden_activation": theirs.get("hidden_activation") or "gelu_pytorch_tanh"}
    return activation_of(given, "hidden_activation", ACTIVATIONS)  # type: ignore[arg-type]


def _pattern(theirs: Mapping[str, Any]) -> int:
    return int(theirs.get("sliding_window_pattern") or EVERY[GEMMA3])


def _rotary(theirs: Mapping[str, Any], kind: str) -> Rotary:
    """Gemma 2 has one rotation; in Gemma 3 windows have their own, which no scaling touches."""
    longest = theirs.get("max_position_embeddings", LONGEST)
    rope: Any = theirs.get("rope_parameters") or {}
    if theirs["model_type"] == GEMMA2:
        rope = theirs.get("rope_scaling") or rope
        return read_rope(rope, theta=theirs.get("rope_theta", THETAS[SLIDING]), longest=longest)
    own = dict(rope.get(kind) or {})
    if kind == FULL:
        own |= theirs.get("rope_scaling") or {}
        theta = theirs.get("rope_theta", THETAS[FULL])
    else:
        theta = theirs.get("rope_local_base_freq", THETAS[SLIDING])
    return read_rope(own, theta=theta, longest=longest)


def _scalar(scale: float) -> int | float:
    """A whole number where it is one, as `transformers` wants it."""
    scalar = scale**-2
    return round(scalar) if abs(scalar - round(scalar)) < 1e-6 * scalar else scalar
