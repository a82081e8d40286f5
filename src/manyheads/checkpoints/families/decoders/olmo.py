"""OLMo 2 and OLMo 3: norms after the sublayers, queries and keys of all heads normed together."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LlamaFamily
from manyheads.checkpoints.families.decoders.rope import longest_of, read_rope, rope_of
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
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.norms import OutputNorm, RMSNorm
from manyheads.parts.positions.rotary import Rotary

OLMO2, OLMO3 = "olmo2", "olmo3"
CLASSES = {OLMO2: "Olmo2", OLMO3: "Olmo3"}
# What `transformers` assumes where config.json does not say it.
THETAS = {OLMO2: 10_000.0, OLMO3: 500_000.0}
WINDOW, LENGTH = 4096, 2048
# Every so many layers of OLMo 3 one sees the whole text.
EVERY = 4


class OlmoFamily(LlamaFamily):
    """OLMo 2 and OLMo 3."""

    name = "olmo"
    norms: Mapping[str, str] = {
        "attention_residual.second_norm": "post_attention_layernorm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
        family, norm = theirs["model_type"], RMSNorm(eps=eps_of(theirs, "rms_norm_eps", 1e-5))
        if theirs.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={theirs['hidden_act']!r} is not supported", "use silu")
        count = theirs["num_hidden_layers"]
        kinds = layer_kinds(theirs, EVERY) if family == OLMO3 else [FULL] * count

        def layer(kind: str) -> LayerConfig:
            attention = AttentionConfig(
                width=width,
                heads=heads,
                kv_heads=theirs.get("num_key_value_heads") or heads,
                head_size=theirs.get("head_dim") or width // heads,
                position=_rotary(theirs, kind),
                mask=mask_of(kind, theirs.get("sliding_window", WINDOW)),
                query_norm=norm,
                key_norm=norm,
                norm_span="heads",
                bias="all" if theirs.get("attention_bias", False) else "none",
                dropout=float(theirs.get("attention_dropout", 0.0)),
            )
            feedforward = SwiGLU(width=width, hidden=theirs["intermediate_size"])
            return LayerConfig(
                attention=Branch(attention, OutputNorm(norm)),
                feedforward=Branch(feedforward, OutputNorm(norm)),
            )

        tied = bool(theirs.get("tie_word_embeddings", False))
        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width),
            stack=StackConfig(
                width=width, layers=tuple(layer(kind) for kind in kinds), final_norm=norm
            ),
            readout=causal_readout(theirs, LanguageHead(tied=tied)),
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
        if ropes is None or attention.norm_span != "heads" or not isinstance(feedforward, SwiGLU):
            return None
        kinds = [kind_of(each) for each in attentions]
        family = OLMO3 if SLIDING in kinds else OLMO2
        described: dict[str, Any] = {
            "model_type": family,
            "architectures": [CLASSES[family] + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "intermediate_size": feedforward.hidden,
            "vocab_size": config.embedding.vocabulary,
            "rms_norm_eps": norm.eps,
            "rope_parameters": ropes[FULL],
            "tie_word_embeddings": getattr(head, "tied", False),
            "attention_bias": attention.bias == "all",
            "attention_dropout": attention.dropout,
            "max_position_embeddings": longest_of(attention.position),
            "hidden_act": "silu",
            "initializer_range": config.init.std,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **default_labels(head),
        }
        if attention.size * attention.heads != config.stack.width:
            described["head_dim"] = attention.size
        if family == OLMO3:
            described |= {
                "rope_parameters": ropes,
                "layer_types": kinds,
                "sliding_window": window_of(attentions, WINDOW),
            }
        return described


OLMO = OlmoFamily()


def _rotary(theirs: Mapping[str, Any], kind: str) -> Rotary:
    """In OLMo 3 layers with a window have their own rotation, which no scaling touches."""
    family, rope = theirs["model_type"], rope_of(theirs)
    theta = theirs.get("rope_theta", THETAS[family])
    if family == OLMO3:
        given = theirs.get("rope_parameters") or {}
        rope = dict(given.get(kind) or {})
        # Only the layers without a window take the older keys; the others keep the default.
        rope |= (theirs.get("rope_scaling") or {}) if kind == FULL else {}
    whole = read_rope(rope, theta=theta, longest=theirs.get("max_position_embeddings", LENGTH))
    return replace(whole, fraction=1.0)
