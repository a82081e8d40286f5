"""DINOv2: a vision transformer with scaled branches, and register tokens in its later version."""

from collections.abc import Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import EPS, Form, Key, Parts
from manyheads.checkpoints.families.family import Sources, class_count, layer_of
from manyheads.checkpoints.families.vit import SIDE, VIT, ViTFamily
from manyheads.checkpoints.tensor_map import Either, Entry
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.parts.feedforward import MLP, SwiGLU
from manyheads.parts.norms import LayerNorm, ScaledPreNorm

INT = Form(lambda _, value: int(value))
PLAIN, REGISTERS = "dinov2", "dinov2_with_registers"


class Dinov2Family(ViTFamily):
    """DINOv2, without and with register tokens."""

    name = PLAIN
    classes: Mapping[str, str] = {PLAIN: "Dinov2", REGISTERS: "Dinov2WithRegisters"}
    keys: Mapping[str, Key] = {
        **{name: key for name, key in VIT.keys.items() if name != "intermediate_size"},
        "layer_norm_eps": Key("norm.eps", 1e-6, EPS),
        "patch_size": Key("patches.size", 14, SIDE),
        "num_register_tokens": Key("patches.registers", form=INT, written="never"),
    }
    init = Initialization(draw="truncated")

    other_prefixes = (f"{REGISTERS}.", f"{PLAIN}.")
    prefix = f"{PLAIN}."
    layer: Mapping[str, Sources] = {
        **VIT.layer,
        "attention_residual.norm": "norm1",
        "feedforward_residual.norm": "norm2",
        "attention_residual.second_norm.weight": "layer_scale1.lambda1",
        "feedforward_residual.second_norm.weight": "layer_scale2.lambda1",
        "feedforward.expand": "mlp.fc1",
        "feedforward.contract": "mlp.fc2",
    }
    # The mask token is for training only.
    unused = ("embeddings.mask_token",)
    module_layers = ""
    modules: Mapping[str, str] = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.down_proj": "mlp.weights_out",
    }

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        config_json = super().complete(config_json)
        if config_json.get("drop_path_rate", 0.0):
            raise ConfigError(
                f"drop_path_rate={config_json['drop_path_rate']}, which skips sublayers in "
                "training, is not supported",
                "use drop_path_rate=0",
            )
        if config_json.get("use_swiglu_ffn", False):
            config_json = {key: config_json[key] for key in config_json if key != "hidden_act"}
        later = config_json["model_type"] == REGISTERS
        return {
            **({"patch_size": 16, "num_register_tokens": 4} if later else {}),
            **config_json,
            **({} if later else {"num_register_tokens": 0}),
        }

    def read_patches(self, parts: Parts, config_json: Mapping[str, Any]) -> Patches:
        later = config_json["model_type"] == REGISTERS
        return Patches(antialias=later, **parts.patches)

    def read_layer(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> LayerConfig:
        attention = AttentionConfig(bias="all", **parts.attention)
        hidden = int(parts.width * config_json.get("mlp_ratio", 4))
        scaled = ScaledPreNorm(norm, float(config_json.get("layerscale_value", 1.0)))
        if config_json.get("use_swiglu_ffn", False):
            gated = SwiGLU(width=parts.width, hidden=_gated_width(hidden), bias=True)
            return layer_of(attention, gated, scaled)
        return layer_of(attention, MLP(hidden=hidden, **parts.feedforward), scaled)

    def read_head(self, patches: Patches, config_json: Mapping[str, Any]) -> ClassHead:
        classes = class_count(config_json)
        return ClassHead(classes=classes, pool="first_and_mean", mean_from=1 + patches.registers)

    def model_type(self, parts: Parts) -> str:
        return REGISTERS if parts.patches.antialias else PLAIN

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        norm, gated = parts.residual.norm, isinstance(parts.feedforward, SwiGLU)
        if not isinstance(norm, ScaledPreNorm):
            return None
        registers = config.patches.registers
        return {
            "mlp_ratio": _ratio(parts.feedforward.hidden, config.stack.width, gated=gated),
            "use_swiglu_ffn": gated,
            "layerscale_value": norm.start,
            **({"num_register_tokens": registers} if config.patches.antialias else {}),
        }

    def prefix_of(self, config: ModelConfig) -> str:
        assert isinstance(config, VisionConfig)
        later = super().prefix_of(config) and config.patches.antialias
        return f"{REGISTERS}." if later else super().prefix_of(config)

    def entry(
        self, name: str, sources: tuple[str, ...], layer: LayerConfig | None
    ) -> Entry | Either:
        plain = super().entry(name, sources, layer)
        if layer is None or layer.feedforward is None or ".feedforward." not in name:
            return plain
        if isinstance(layer.feedforward.inner, MLP):
            return plain
        source = sources[0]
        if ".expand." not in name:
            return Entry(name, (source.replace(".fc2.", ".weights_out."),))
        # Files have both halves in one tensor, modules of `transformers` have them apart.
        apart = tuple(source.replace(".fc1.", f".{part}_proj.") for part in ("gate", "up"))
        return Either(Entry(name, (source.replace(".fc1.", ".weights_in."),)), Entry(name, apart))


DINOV2 = Dinov2Family()


def _gated_width(hidden: int) -> int:
    """Two thirds, rounded up to a multiple of 8, so that two input projections cost as one."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def _ratio(hidden: int, width: int, *, gated: bool) -> int | float:
    """The whole ratio if there is one: `transformers` refuses others."""
    for ratio in range(1, 65):
        if hidden == (_gated_width(width * ratio) if gated else width * ratio):
            return ratio
    return hidden / width
