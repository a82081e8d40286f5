"""Qwen3-Next and Qwen3.5: gated attention in some layers, gated delta nets in the others."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.decoders.qwen import (
    HIDDEN,
    as_dense,
    describe_experts,
    expert_entries,
    feedforward_of,
    feedforwards_of,
    interleaved,
    with_attention,
    with_norm_and_feedforward,
)
from manyheads.checkpoints.families.family import Family, eps_of
from manyheads.checkpoints.tensor_map import Depthwise, Either, Entry, Interleaved
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.models.decoder import DecoderConfig
from manyheads.models.layer import Branch
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, Readout
from manyheads.models.recipes import ModelConfig
from manyheads.parts.experts import Experts
from manyheads.parts.gates import Gate
from manyheads.parts.norms import RMSNorm

# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "rms_norm_eps": 1e-6,
    "head_dim": 256,
    "intermediate_size": HIDDEN,
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
FULL, LINEAR = "full_attention", "linear_attention"
DELTA_NAMES = {
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "norm_weight": "norm.weight",
    "output.weight": "out_proj.weight",
}
GATES = (Gate(at="output", per="channel"),)


class QwenNextFamily(Family):
    """Qwen3-Next: gated attention in some layers, gated delta nets in the others."""

    name = "qwen_next"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        kinds = layer_kinds(theirs)
        plain = LLAMA.read_config(theirs)
        assert isinstance(plain, DecoderConfig)
        norm = RMSNorm(eps=eps_of(theirs, "rms_norm_eps"), centered=True)
        gated = with_attention(plain, gates=GATES, query_norm=norm, key_norm=norm)
        delta = read_delta(theirs, eps=norm.eps)
        layers = tuple(
            replace(layer, attention=None, mixer=Branch(delta)) if kind == LINEAR else layer
            for layer, kind in zip(gated.stack.layers, kinds, strict=True)
        )
        mixed = replace(gated, stack=replace(gated.stack, layers=layers))
        return with_norm_and_feedforward(
            mixed, norm, [feedforward_of(theirs, index) for index in range(len(layers))]
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        inside = feedforwards_of(config)
        if inside is None:
            return None
        assert isinstance(config, DecoderConfig)
        norm, mixed = config.stack.final_norm, [each for each in inside if type(each) is Experts]
        if not isinstance(norm, RMSNorm) or any(inner.shared_gate == "none" for inner in mixed):
            return None
        head_norm = RMSNorm(eps=norm.eps)
        attending = with_attention_everywhere(config)
        if attending is None:
            return None
        plain = with_attention(attending, gates=(), query_norm=head_norm, key_norm=head_norm)
        described = LLAMA.write_config(as_dense(plain, head_norm, inside))
        if described is None or "sliding_attention" in described["layer_types"]:
            return None
        del described["mlp_bias"]
        described["rope_parameters"].setdefault("partial_rotary_factor", 1.0)
        return described | {
            "model_type": "qwen3_next",
            "architectures": ["Qwen3NextForCausalLM"],
            **describe_experts(inside),
            **describe_delta(config),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Either]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table: list[Entry | Either] = [
            *interleaved(LLAMA.tensor_map(config, have), config, per="head")
        ]
        for index, layer in enumerate(config.stack.layers):
            if layer.feedforward is not None and isinstance(layer.feedforward.inner, Experts):
                below = f"stack.layers.{index}.feedforward", f"model.layers.{index}.mlp"
                table += expert_entries(layer.feedforward.inner, *below)
            if layer.mixer is not None and isinstance(layer.mixer.inner, GatedDelta):
                below = f"stack.layers.{index}.mixer", f"model.layers.{index}.linear_attn"
                table += self.delta_entries(layer.mixer.inner, *below)
        return [entry for entry in table if entry.ours in have]

    def delta_entries(self, mixer: GatedDelta, ours: str, theirs: str) -> Iterator[Entry]:
        """Their projections are stored by key head: q k v z together, and b a together."""
        rows = mixer.rows()
        wide = tuple(rows[name] for name in ("query", "key", "value", "gate"))
        for mine, other, blocks in (
            ("project", "in_proj_qkvz", wide),
            ("rates", "in_proj_ba", (rows["beta"], rows["dt"])),
        ):
            yield Interleaved(
                f"{ours}.{mine}.weight",
                (f"{theirs}.{other}.weight",),
                (sum(blocks),),
                blocks=blocks,
                groups=mixer.key_heads,
            )
        yield Depthwise(f"{ours}.convolution.weight", (f"{theirs}.conv1d.weight",))
        for mine, other in DELTA_NAMES.items():
            yield Entry(f"{ours}.{mine}", (f"{theirs}.{other}",))

    def canonical_name(self, name: str) -> str | None:
        """As for Llama; neither we nor `transformers` use the multi-token prediction layers."""
        return None if name.startswith("mtp.") else LLAMA.canonical_name(name)


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
CLASSES_3_5: dict[type[Readout], str] = {
    LanguageHead: "ForCausalLM",
    NoReadout: "TextModel",
    ClassHead: "TextForSequenceClassification",
}
# The text model within one that also sees images.
WITHIN, IMAGES = "model.language_model.", "model.visual."


class Qwen35Family(QwenNextFamily):
    """Qwen3.5, dense or with experts; of a model that also sees images, the text model."""

    name = "qwen3_5"

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        text = _text_config(theirs)
        experts = {} if "moe" in text["model_type"] else {"num_experts": 0}
        return super().read_config({**DEFAULTS_3_5, **text, **ONLY_NEXT, **experts})

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        described = super().write_config(config)
        if described is None or type(config.readout) not in CLASSES_3_5:
            return None
        sparse = described["num_experts"] > 0
        dropped = "intermediate_size" if sparse else "num_experts"
        for key in ("sliding_window", "use_sliding_window", "max_window_layers", dropped):
            described.pop(key, None)
        names = ("qwen3_5_moe_text", "Qwen3_5Moe") if sparse else ("qwen3_5_text", "Qwen3_5")
        return {key: each for key, each in described.items() if key not in ONLY_NEXT} | {
            "model_type": names[0],
            "architectures": [names[1] + CLASSES_3_5[type(config.readout)]],
        }

    def rewritten(self, theirs: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        """What is written is the text model alone."""
        text = _text_config(theirs)
        if theirs["model_type"] == text["model_type"]:
            return text
        name = "Qwen3_5Moe" if "moe" in text["model_type"] else "Qwen3_5"
        head = CLASSES_3_5.get(type(config.readout), "ForCausalLM")
        return {**text, "architectures": [name + head]}

    def delta_entries(self, mixer: GatedDelta, ours: str, theirs: str) -> Iterator[Entry]:
        """Their projections are apart."""
        rows = mixer.rows()
        mixed = rows["query"] + rows["key"] + rows["value"]
        for mine, others, sizes in (
            ("project", ("qkv", "z"), (mixed, rows["gate"])),
            ("rates", ("b", "a"), (rows["beta"], rows["dt"])),
        ):
            names = tuple(f"{theirs}.in_proj_{other}.weight" for other in others)
            yield Entry(f"{ours}.{mine}.weight", names, sizes)
        yield Depthwise(f"{ours}.convolution.weight", (f"{theirs}.conv1d.weight",))
        for mine, other in DELTA_NAMES.items():
            yield Entry(f"{ours}.{mine}", (f"{theirs}.{other}",))

    def canonical_name(self, name: str) -> str | None:
        if name.startswith(WITHIN):
            name = "model." + name.removeprefix(WITHIN)
        return None if name.startswith(IMAGES) else super().canonical_name(name)


QWEN3_5 = Qwen35Family()


def _text_config(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the text model; what holds for the whole is beside it."""
    inside = theirs.get("text_config")
    if inside is None:
        return dict(theirs)
    if not isinstance(inside, Mapping):
        raise ConfigError(f"text_config must be a table, got {inside!r:.200}")
    whole = {
        key: theirs[key]
        for key in ("architectures", "dtype", "id2label", "label2id")
        if key in theirs
    }
    tied = bool(theirs.get("tie_word_embeddings") or inside.get("tie_word_embeddings"))
    name = f"{theirs['model_type']}_text"
    return {**whole, **inside, "model_type": name, "tie_word_embeddings": tied}


def read_delta(theirs: Mapping[str, Any], *, eps: float, **more: Any) -> GatedDelta:
    return GatedDelta(
        width=theirs["hidden_size"],
        heads=theirs["linear_num_value_heads"],
        head_size=theirs["linear_value_head_dim"],
        key_heads=theirs["linear_num_key_heads"],
        key_size=theirs["linear_key_head_dim"],
        convolution=theirs["linear_conv_kernel_dim"],
        eps=eps,
        **more,
    )


def layer_kinds(theirs: Mapping[str, Any]) -> list[str]:
    count, every = theirs["num_hidden_layers"], theirs["full_attention_interval"]
    kinds = theirs.get("layer_types") or [
        LINEAR if (index + 1) % every else FULL for index in range(count)
    ]
    if len(kinds) != count or not set(kinds) <= {FULL, LINEAR}:
        raise ConfigError(f"layer_types must have {FULL} or {LINEAR} for each of {count} layers")
    return list(kinds)


def with_attention_everywhere(config: DecoderConfig) -> DecoderConfig | None:
    """The model with its first attention in place of every mixer, for Llama to describe."""
    layers = config.stack.layers
    first = next((layer.attention for layer in layers if layer.attention is not None), None)
    if first is None:
        return None
    attending = tuple(
        layer if layer.mixer is None else replace(layer, attention=first, mixer=None)
        for layer in layers
    )
    return replace(config, stack=replace(config.stack, layers=attending))


def describe_delta(config: DecoderConfig) -> dict[str, Any]:
    layers = config.stack.layers
    found = [layer.mixer.inner for layer in layers if layer.mixer is not None]
    first = next((mixer for mixer in found if isinstance(mixer, GatedDelta)), None)
    if first is None:
        return {}
    return {
        "layer_types": [FULL if layer.mixer is None else LINEAR for layer in layers],
        "linear_num_value_heads": first.heads,
        "linear_value_head_dim": first.head_size,
        "linear_num_key_heads": first.key_heads,
        "linear_key_head_dim": first.key_size,
        "linear_conv_kernel_dim": first.convolution,
    }
