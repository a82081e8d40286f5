"""Qwen3, plain or with the output gates of the gated-attention study (arXiv 2505.06708)."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.families.llama import LLAMA
from manyheads.checkpoints.tensor_map import Entry, Interleaved
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import LayerConfig
from manyheads.models.recipes import ModelConfig
from manyheads.parts.gates import Gate
from manyheads.parts.norms import NoNorm, RMSNorm

GATES: dict[str, Literal["head", "channel"]] = {
    "headwise_attn_output_gate": "head",
    "elementwise_attn_output_gate": "channel",
}
# Keys of Qwen3 that the code of the study does not read.
NEWER = ("rope_parameters", "layer_types", "mlp_bias", "attention_bias")
# The default, whatever the width.
HEAD_SIZE = 128


class QwenGatedFamily(Family):
    """Qwen3, plain or with output gates."""

    name = "qwen_gated"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        asked = [key for key in GATES if theirs.get(key)]
        if len(asked) > 1:
            raise ConfigError(
                f"{' and '.join(asked)} are both set", "set one: a layer has one gate"
            )
        # The study's qkv_bias includes the output projection; its code reads no other key.
        bias = theirs.get("qkv_bias", theirs.get("attention_bias", False))
        plain = LLAMA.read_config({"head_dim": HEAD_SIZE, **theirs, "attention_bias": bias})
        changes: dict[str, Any] = {
            "gates": tuple(Gate(at="output", per=GATES[key]) for key in asked),
        }
        if not theirs.get("use_qk_norm", True):
            changes |= {"query_norm": NoNorm(), "key_norm": NoNorm()}
        assert isinstance(plain, DecoderConfig)
        return with_attention(plain, **changes)

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        first, norm = config.stack.layers[0].attention, config.stack.final_norm
        if first is None or len(first.inner.gates) != 1:
            return None
        described = LLAMA.write_config(
            with_attention(config, gates=(), query_norm=norm, key_norm=norm)
        )
        if described is None or "sliding_attention" in described["layer_types"]:
            return None
        rope = described["rope_parameters"]
        scaling = {key: each for key, each in rope.items() if key != "rope_theta"}
        # The code of the study rotates whole heads.
        if "partial_rotary_factor" in scaling:
            return None
        return {key: each for key, each in described.items() if key not in NEWER} | {
            **{key: first.inner.gates[0].per == per for key, per in GATES.items()},
            "qkv_bias": first.inner.bias == "all",
            "use_qk_norm": isinstance(first.inner.query_norm, RMSNorm),
            "rope_theta": rope["rope_theta"],
            "rope_scaling": None if scaling == {"rope_type": "default"} else scaling,
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        return interleaved(LLAMA.tensor_map(config, ours), config, per="key head")

    def canonical_name(self, name: str) -> str | None:
        return LLAMA.canonical_name(name)

    def opened_by(self, theirs: Mapping[str, Any]) -> str:
        """`transformers` would open a gated model too, but read its gates as queries."""
        gated = any(theirs.get(key) for key in GATES)
        return "the gated-attention study's own code" if gated else "transformers"


QWEN_GATED = QwenGatedFamily()


def with_attention(config: DecoderConfig, **changes: Any) -> DecoderConfig:
    """The config with changes to the attention of every layer."""

    def changed(layer: LayerConfig) -> LayerConfig:
        branch = layer.attention
        if branch is None:
            return layer
        return replace(layer, attention=replace(branch, inner=replace(branch.inner, **changes)))

    layers = tuple(changed(layer) for layer in config.stack.layers)
    return replace(config, stack=replace(config.stack, layers=layers))


def interleaved(
    table: Iterable[Entry], config: ModelConfig, per: Literal["head", "key head"]
) -> list[Entry]:
    """The entries with the rows of gates in q_proj, after the queries of each head or group."""
    assert isinstance(config, DecoderConfig)
    gated = {
        f"stack.layers.{index}.attention.project": layer.attention.inner
        for index, layer in enumerate(config.stack.layers)
        if layer.attention is not None and layer.attention.inner.gates
    }

    def interleave(entry: Entry, attention: AttentionConfig) -> Entry:
        rows = attention.rows()
        blocks = rows.pop("query"), rows.pop("gate_output")
        groups = attention.heads if per == "head" else attention.key_heads
        theirs = (sum(blocks), *rows.values())
        return Interleaved(entry.ours, entry.theirs, theirs, blocks=blocks, groups=groups)

    names = ((entry, entry.ours.rpartition(".")[0]) for entry in table)
    return [interleave(entry, gated[name]) if name in gated else entry for entry, name in names]
