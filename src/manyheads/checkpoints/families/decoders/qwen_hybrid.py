"""Qwen3-Next and Qwen3.5: gated attention in some layers, gated delta nets in the others."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from manyheads.checkpoints.families import windows
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders import llama, qwen
from manyheads.checkpoints.families.family import Inner
from manyheads.checkpoints.tensor_map import Depthwise, Entry, Interleaved, MapEntry
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts import gates, norms

# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "intermediate_size": qwen.DENSE_HIDDEN,
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 4,
    "decoder_sparse_step": 1,
    "num_experts": 512,
    "num_experts_per_tok": 10,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "norm_topk_prob": True,
    "linear_num_value_heads": 32,
    "linear_value_head_dim": 128,
    "linear_num_key_heads": 16,
    "linear_key_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
LINEAR = "linear_attention"
GATES = (gates.Gate(at="output", per="channel"),)
# The fields of a gated delta net by their keys.
DELTA_KEYS = {
    "linear_num_value_heads": "heads",
    "linear_value_head_dim": "head_size",
    "linear_num_key_heads": "key_heads",
    "linear_key_head_dim": "key_size",
    "linear_conv_kernel_dim": "convolution",
}


class QwenNextFamily(qwen.ExpertsFamily):
    """Qwen3-Next: gated attention in some layers, gated delta nets in the others."""

    name = "qwen_next"
    classes = {"qwen3_next": "Qwen3Next"}
    class_ends = {LanguageHead: "ForCausalLM"}
    norm = partial(norms.RMSNorm, centered=True)
    gates_per = "head"
    layer = {
        **llama.LLAMA.layer,
        # Stored by key head: q k v z together, and b a together.
        "mixer.project": "linear_attn.in_proj_qkvz",
        "mixer.rates": "linear_attn.in_proj_ba",
        "mixer.convolution": "linear_attn.conv1d",
        "mixer.dt_bias": "linear_attn.dt_bias",
        "mixer.A_log": "linear_attn.A_log",
        "mixer.norm_weight": "linear_attn.norm.weight",
        "mixer.output": "linear_attn.out_proj",
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        return super().complete({**DEFAULTS, **config_json})

    def read_inner(self, parts: Parts, index: int) -> Inner:
        if layer_kinds(parts.json)[index] == LINEAR:
            return read_delta(parts.json, eps=parts.norm.eps)
        attention: Any = super().read_inner(parts, index)
        return replace(attention, gates=GATES)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        described = None if parts.attention is None else super().describe(config, parts)
        if described is None:
            return None
        described["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return described | describe_delta(config.stack, parts.mixer)

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        if ".mixer." in name and layer is not None and layer.mixer is not None:
            assert isinstance(layer.mixer.inner, GatedDelta)
            return self.delta_entry(name, sources, layer.mixer.inner)
        return super().entry(name, sources, layer)

    def delta_entry(self, name: str, sources: tuple[str, ...], mixer: GatedDelta) -> Entry:
        if name.endswith(".convolution.weight"):
            return Depthwise(name, sources)
        blocks = delta_blocks(name, mixer)
        if not blocks:
            return Entry(name, sources)
        return Interleaved(name, sources, (sum(blocks),), blocks=blocks, groups=mixer.key_heads)

    def canonical_name(self, name: str) -> str | None:
        """As for Llama; neither we nor `transformers` use the multi-token prediction layers."""
        return None if name.startswith("mtp.") else super().canonical_name(name)


QWEN_NEXT = QwenNextFamily()

# What Qwen3.5 assumes in another way, and what only Qwen3-Next has a choice of.
DEFAULTS_3_5: dict[str, Any] = {
    "intermediate_size": 12288,
    "num_experts": 256,
    "num_experts_per_tok": 8,
    "max_position_embeddings": 32768,
}
ONLY_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
}
DENSE, SPARSE = "qwen3_5_text", "qwen3_5_moe_text"
# The text model within one that also sees images.
WITHIN, IMAGES = "model.language_model.", "model.visual."


class Qwen35Family(QwenNextFamily):
    """Qwen3.5, dense or with experts; of a model that also sees images, the text model."""

    name = "qwen3_5"
    classes = {DENSE: "Qwen3_5", SPARSE: "Qwen3_5Moe"}
    class_ends = {
        LanguageHead: "ForCausalLM",
        NoReadout: "TextModel",
        ClassHead: "TextForSequenceClassification",
    }
    layer = {
        **QWEN_NEXT.layer,
        "mixer.project": ("linear_attn.in_proj_qkv", "linear_attn.in_proj_z"),
        "mixer.rates": ("linear_attn.in_proj_b", "linear_attn.in_proj_a"),
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        text = _text_config(config_json)
        experts = {} if "moe" in text["model_type"] else {"num_experts": 0}
        return super().complete({**DEFAULTS_3_5, **text, **ONLY_NEXT, **experts})

    def model_type(self, parts: Parts) -> str:
        return SPARSE if any(map(qwen.has_experts, parts.stack.layers)) else DENSE

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        described = super().describe(config, parts)
        if described is None:
            return None
        dropped = {"sliding_window", "use_sliding_window", "max_window_layers", *ONLY_NEXT}
        dropped |= set() if described["num_experts"] else {"num_experts"}
        return {key: value for key, value in described.items() if key not in dropped}

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        described = super().write_config(config)
        if described is not None and described["model_type"] == SPARSE:
            del described["intermediate_size"]
        return described

    def rewritten(self, config_json: ConfigJson, config: ModelConfig) -> dict[str, Any]:
        """What is written is the text model alone."""
        text = _text_config(config_json)
        if config_json["model_type"] == text["model_type"]:
            return text
        name = self.classes[SPARSE if "moe" in text["model_type"] else DENSE]
        head = self.class_ends.get(type(config.readout), "ForCausalLM")
        return {**text, "architectures": [name + head]}

    def delta_entry(self, name: str, sources: tuple[str, ...], mixer: GatedDelta) -> Entry:
        """Their projections are apart."""
        blocks = delta_blocks(name, mixer)
        if not blocks:
            return super().delta_entry(name, sources, mixer)
        *mixed, last = blocks
        return Entry(name, sources, (sum(mixed), last))

    def canonical_name(self, name: str) -> str | None:
        if name.startswith(WITHIN):
            name = "model." + name.removeprefix(WITHIN)
        return None if name.startswith(IMAGES) else super().canonical_name(name)


QWEN3_5 = Qwen35Family()


def _text_config(config_json: ConfigJson) -> dict[str, Any]:
    """The config of the text model; what holds for the whole is beside it."""
    inside = config_json.get("text_config")
    if inside is None:
        return dict(config_json)
    if not isinstance(inside, Mapping):
        raise ConfigError(f"text_config must be a table, got {inside!r:.200}")
    keys = ("architectures", "dtype", "id2label", "label2id")
    whole = {key: config_json[key] for key in keys if key in config_json}
    tied = bool(config_json.get("tie_word_embeddings") or inside.get("tie_word_embeddings"))
    name = f"{config_json['model_type']}_text"
    return {**whole, **inside, "model_type": name, "tie_word_embeddings": tied}


def read_delta(config_json: ConfigJson, *, eps: float, **more: Any) -> GatedDelta:
    sizes = {field: config_json[key] for key, field in DELTA_KEYS.items()}
    return GatedDelta(width=config_json["hidden_size"], eps=eps, **sizes, **more)


def describe_delta(stack: StackConfig, mixer: object) -> dict[str, Any]:
    if not isinstance(mixer, GatedDelta):
        return {}
    kinds = [windows.FULL if layer.mixer is None else LINEAR for layer in stack.layers]
    sizes = {key: getattr(mixer, field) for key, field in DELTA_KEYS.items()}
    return {"layer_types": kinds, **sizes}


def delta_blocks(name: str, mixer: GatedDelta) -> tuple[int, ...]:
    """The rows of queries, keys, values and gates, or of both rates, in one of our tensors."""
    *wide, beta, dt = mixer.rows().values()
    if name.endswith(".mixer.project.weight"):
        return tuple(wide)
    return (beta, dt) if name.endswith(".mixer.rates.weight") else ()


def layer_kinds(config_json: ConfigJson) -> list[str]:
    return windows.layer_kinds(config_json, config_json["full_attention_interval"], LINEAR)
