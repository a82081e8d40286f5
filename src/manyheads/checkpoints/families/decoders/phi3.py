"""Phi-3: as Llama, with joined matrices, a part of each head rotated, and LongRoPE."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.decoders.llama import LLAMA, LlamaFamily
from manyheads.checkpoints.families.decoders.rope import read_rope, rope_of
from manyheads.checkpoints.families.decoders.windows import (
    FULL,
    SLIDING,
    attentions_of,
    mask_of,
    window_of,
)
from manyheads.checkpoints.families.family import CAUSAL_HEADS
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import LayerConfig
from manyheads.models.recipes import ModelConfig
from manyheads.parts.positions.rotary import LongRopeScaling, NoScaling, Rotary

# What `transformers` assumes where config.json does not say it.
LENGTH, EPS = 4096, 1e-5
# Older names of LongRoPE.
LONGROPE = ("longrope", "su", "yarn")


class Phi3Family(LlamaFamily):
    """Phi-3."""

    name = "phi3"
    joined = True

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        rotary, window = _rotary(theirs), theirs.get("sliding_window")
        plain = {key: each for key, each in theirs.items() if not key.startswith("rope_")}
        plain |= {"model_type": "llama", "mlp_bias": False, "attention_bias": False}
        config = LLAMA.read_config({"rms_norm_eps": EPS, **plain, "partial_rotary_factor": 1.0})
        assert isinstance(config, DecoderConfig)
        dropout = float(theirs.get("resid_pdrop", 0.0))

        def changed(layer: LayerConfig) -> LayerConfig:
            assert layer.attention is not None
            assert layer.feedforward is not None
            mask = mask_of(FULL if window is None else SLIDING, window)
            inner = replace(layer.attention.inner, position=rotary, mask=mask)
            return replace(
                layer,
                attention=replace(layer.attention, inner=inner, dropout=dropout),
                feedforward=replace(layer.feedforward, dropout=dropout),
            )

        layers = tuple(changed(layer) for layer in config.stack.layers)
        embedding = replace(config.embedding, dropout=float(theirs.get("embd_pdrop", 0.0)))
        return replace(config, embedding=embedding, stack=replace(config.stack, layers=layers))

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig):
            return None
        described = LLAMA.write_config(config)
        if described is None or described["model_type"] not in ("llama", "mistral"):
            return None
        attentions = attentions_of(config)
        first = config.stack.layers[0].attention
        if first is None or not isinstance(first.inner.position, Rotary):
            return None
        scaling = first.inner.position.scaling
        if not isinstance(scaling, NoScaling | LongRopeScaling):
            return None
        kept = {key: each for key, each in described.items() if key not in ("mlp_bias", "head_dim")}
        if first.inner.size * first.inner.heads != config.stack.width:
            kept["head_dim"] = first.inner.size
        if isinstance(scaling, LongRopeScaling):
            kept["original_max_position_embeddings"] = scaling.original_length
        return kept | {
            "model_type": "phi3",
            "architectures": ["Phi3" + CAUSAL_HEADS[type(config.readout)]],
            "rope_parameters": {"partial_rotary_factor": 1.0, **described["rope_parameters"]},
            "sliding_window": window_of(attentions, None),
            "resid_pdrop": first.dropout,
            "embd_pdrop": config.embedding.dropout,
            "pad_token_id": None,
        }


PHI3 = Phi3Family()


def _rotary(theirs: Mapping[str, Any]) -> Rotary:
    rope = rope_of(theirs)
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind in LONGROPE:
        rope["rope_type"] = "longrope"
        # Outside the table it has precedence.
        length = theirs.get("original_max_position_embeddings", LENGTH)
        rope["original_max_position_embeddings"] = length
    elif kind != "default":
        raise ConfigError(f"rope_type={kind!r} is not supported for Phi-3", "use longrope")
    return read_rope(
        rope,
        theta=theirs.get("rope_theta", 10_000.0),
        fraction=theirs.get("partial_rotary_factor", 1.0),
        longest=theirs.get("max_position_embeddings", LENGTH),
    )
