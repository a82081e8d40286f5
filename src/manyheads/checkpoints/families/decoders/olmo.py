"""OLMo 2, OLMo 3 and OLMo hybrid: norms after the sublayers, all heads' queries normed together."""

from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import windows
from manyheads.checkpoints.families.config_keys import BIAS, STD, ConfigJson, Parts, eps
from manyheads.checkpoints.families.decoders import llama, qwen_hybrid
from manyheads.checkpoints.families.family import CAUSAL_HEADS, Inner
from manyheads.checkpoints.families.rope import describe_rope, longest_of, read_rope, rope_of
from manyheads.checkpoints.tensor_map import Depthwise, Either, Entry, MapEntry
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.parts.masks import Causal
from manyheads.parts.norms import OutputNorm, Placement, PreNorm
from manyheads.parts.positions import NoPosition, Rotary

OLMO2, OLMO3 = "olmo2", "olmo3"
# What `transformers` assumes where config.json does not say it.
THETAS = {OLMO2: 10_000.0, OLMO3: 500_000.0}
WINDOW, LENGTH = 4096, 2048
HYBRID_LENGTH, HYBRID_THETA = 65536, 10_000.0
# Every so many layers of OLMo 3 and OLMo hybrid one sees the whole text.
EVERY = 4
# The eps of the delta nets' own norm, whatever rms_norm_eps says.
DELTA_EPS = 1e-5


class OlmoFamily(llama.LlamaFamily):
    """OLMo 2 and OLMo 3."""

    name = "olmo"
    classes = {OLMO2: "Olmo2", OLMO3: "Olmo3"}
    keys = {
        **llama.KEYS,
        "head_dim": llama.UNEVEN_HEAD_SIZE,
        "rms_norm_eps": eps(1e-5),
        "attention_bias": BIAS,
        "initializer_range": STD,
    }
    constants = {**llama.NO_TOKENS, "pad_token_id": None}
    placement = OutputNorm
    layer = {
        **llama.LLAMA.layer,
        "attention_residual.second_norm": "post_attention_layernorm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }

    def read_inner(self, parts: Parts, index: int) -> Inner:
        later = parts.json["model_type"] == OLMO3
        kind = windows.layer_kinds(parts.json, EVERY)[index] if later else windows.FULL
        mask = windows.mask_of(kind, parts.json.get("sliding_window", WINDOW))
        return _normed(parts, position=_rotary(parts.json, kind), mask=mask)

    def model_type(self, parts: Parts) -> str:
        kinds = windows.describe_windows(parts.stack, None)["layer_types"]
        return OLMO3 if windows.SLIDING in kinds else OLMO2

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        ropes = windows.ropes_by_kind(config.stack)
        if ropes is None:
            return None
        described = {
            "rope_parameters": ropes[windows.FULL],
            "max_position_embeddings": longest_of(parts.attention.position),
            **llama.uneven_head_size(parts),
        }
        if self.model_type(parts) == OLMO2:
            return described
        seen = windows.describe_windows(config.stack, WINDOW)
        return {**described, **seen, "rope_parameters": ropes}


OLMO = OlmoFamily()


def _normed(parts: Parts, **own: Any) -> AttentionConfig:
    """Attention whose queries, and whose keys, are normed across all heads."""
    norms = {"query_norm": parts.norm, "key_norm": parts.norm}
    return AttentionConfig(norm_span="heads", **norms, **own, **parts.attention)


def _rotary(config_json: ConfigJson, kind: str) -> Rotary:
    """In OLMo 3 layers with a window have their own rotation, which no scaling touches."""
    family, rope = config_json["model_type"], rope_of(config_json)
    if family == OLMO3:
        rope = dict((config_json.get("rope_parameters") or {}).get(kind) or {})
        # Only the layers without a window take the older keys; the others keep the default.
        rope |= (config_json.get("rope_scaling") or {}) if kind == windows.FULL else {}
    return replace(read_rope(config_json, THETAS[family], LENGTH, rope=rope), fraction=1.0)


class OlmoHybridFamily(llama.LlamaFamily):
    """OLMo hybrid: gated delta nets in most layers, the attention of OLMo 3 in the others."""

    name = "olmo_hybrid"
    classes = {"olmo_hybrid": "OlmoHybrid"}
    class_ends = {kind: CAUSAL_HEADS[kind] for kind in (LanguageHead, NoReadout)}
    keys = {**OLMO.keys, "rms_norm_eps": eps(1e-6)}
    constants = OLMO.constants
    per_layer_keys = ()
    # Layers with attention norm what it writes, the others what they read.
    layer = {
        **llama.LLAMA.layer,
        "attention_residual.norm": "attention_layer_norm",
        "feedforward_residual.norm": "feedforward_layer_norm",
        "attention_residual.second_norm": "feedforward_layer_norm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
        "mixer.project": tuple(f"linear_attn.{part}_proj" for part in "qkvg"),
        "mixer.rates": ("linear_attn.b_proj", "linear_attn.a_proj"),
        "mixer.convolution": tuple(f"linear_attn.{part}_conv1d" for part in "qkv"),
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.A_log": "linear_attn.A_log",
        "mixer.norm_weight": "linear_attn.o_norm.weight",
        "mixer.output": "linear_attn.o_proj",
    }
    # In memory `transformers` has other names for the norms than in files.
    older = {
        ".input_layernorm.": ".attention_layer_norm.",
        ".post_attention_layernorm.": ".feedforward_layer_norm.",
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        """With all that `transformers` derives where config.json does not say it."""
        own = {key: value for key, value in config_json.items() if value is not None}
        heads, count = own["num_attention_heads"], own["num_hidden_layers"]
        keys = own.get("linear_num_key_heads", heads)
        key_size = own.get("linear_key_head_dim", int(0.75 * own["hidden_size"] / keys))
        kinds = qwen_hybrid.layer_kinds(
            {"num_hidden_layers": count, "full_attention_interval": EVERY}
        )
        kinds[-1:] = kinds[-1:] if windows.FULL in kinds else [windows.FULL]
        defaults = {
            "layer_types": kinds,
            "full_attention_interval": EVERY,
            "linear_num_key_heads": keys,
            "linear_num_value_heads": heads,
            "linear_key_head_dim": key_size,
            "linear_value_head_dim": 2 * key_size,
            "linear_conv_kernel_dim": 4,
        }
        complete = super().complete({**defaults, **own})
        kinds = qwen_hybrid.layer_kinds(complete)
        if len(set(kinds)) < 2:
            raise ConfigError(
                f"all layers are {kinds[0]}",
                f"use both {windows.FULL} and {qwen_hybrid.LINEAR} in layer_types",
            )
        return complete

    def read_placement(self, parts: Parts, inner: Inner) -> Placement:
        attends = isinstance(inner, AttentionConfig)
        return OutputNorm(parts.norm) if attends else PreNorm(parts.norm)

    def read_inner(self, parts: Parts, index: int) -> Inner:
        if qwen_hybrid.layer_kinds(parts.json)[index] == qwen_hybrid.LINEAR:
            turned = bool(parts.json.get("linear_allow_neg_eigval", True))
            return qwen_hybrid.read_delta(parts.json, eps=DELTA_EPS, negative_eigenvalues=turned)
        position: Rotary | NoPosition = NoPosition()
        # Released models say that they have no rotation by a theta that is null.
        if rope_of(parts.json).get("rope_theta", HYBRID_THETA) is not None:
            position = read_rope(parts.json, HYBRID_THETA, HYBRID_LENGTH)
        return _normed(parts, position=position, mask=Causal())

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        position = parts.attention.position
        rope = describe_rope(position)
        if isinstance(position, NoPosition):
            rope = {"rope_type": "default", "rope_theta": None}
        if rope is None or not isinstance(parts.mixer, GatedDelta):
            return None
        return {
            "rope_parameters": rope,
            "max_position_embeddings": longest_of(position, HYBRID_LENGTH),
            "linear_allow_neg_eigval": parts.mixer.negative_eigenvalues,
            **qwen_hybrid.describe_delta(config.stack, parts.mixer),
            **llama.uneven_head_size(parts),
        }

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        mixer = layer.mixer.inner if layer is not None and layer.mixer is not None else None
        if not isinstance(mixer, GatedDelta) or ".mixer." not in name:
            return super().entry(name, sources, layer)
        if not name.endswith(".convolution.weight"):
            return Entry(name, sources, qwen_hybrid.delta_blocks(name, mixer))
        sizes = tuple(mixer.rows().values())[:3]
        # `transformers` reads any sizes, and writes three that are as equal as can be.
        third = -(-sum(sizes) // 3)
        thirds = third, third, sum(sizes) - 2 * third
        return Either(Depthwise(name, sources, sizes), Depthwise(name, sources, thirds))


OLMO_HYBRID = OlmoHybridFamily()
