"""DINOv2: a vision transformer with scaled branches, and register tokens in its later version."""

from typing import Any

from manyheads.checkpoints.families.config_keys import ConfigJson, Form, Key, Parts, eps
from manyheads.checkpoints.families.family import Inner, class_count
from manyheads.checkpoints.families.vit import ATTENTION_MODULES, SIDE, VIT, ViTFamily
from manyheads.checkpoints.tensor_map import Either, Entry, MapEntry
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.models.readout import ClassHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.parts.feedforward import MLP, SwiGLU
from manyheads.parts.norms import ScaledPreNorm

INT = Form(lambda _, value: int(value))
PLAIN, REGISTERS = "dinov2", "dinov2_with_registers"


class Dinov2Family(ViTFamily):
    """DINOv2, without and with register tokens."""

    name = PLAIN
    classes = {PLAIN: "Dinov2", REGISTERS: "Dinov2WithRegisters"}
    keys = {
        **{name: key for name, key in VIT.keys.items() if name != "intermediate_size"},
        "layer_norm_eps": eps(1e-6),
        "patch_size": Key("patches.size", 14, SIDE),
        "num_register_tokens": Key("patches.registers", form=INT, written="never"),
    }
    init = Initialization(draw="truncated")
    dropouts = ("", "")

    other_prefixes = (f"{REGISTERS}.", f"{PLAIN}.")
    prefix = f"{PLAIN}."
    layer = {
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
    modules = {**ATTENTION_MODULES, "mlp.down_proj": "mlp.weights_out"}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
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

    def read_inputs(self, parts: Parts) -> dict[str, Any]:
        later = parts.json["model_type"] == REGISTERS
        return {"patches": Patches(antialias=later, **parts.patches)}

    def read_placement(self, parts: Parts, inner: Inner) -> ScaledPreNorm:  # noqa: ARG002
        return ScaledPreNorm(parts.norm, float(parts.json.get("layerscale_value", 1.0)))

    def read_feedforward(self, parts: Parts, index: int) -> FeedForwardConfig:  # noqa: ARG002
        hidden = int(parts.width * parts.json.get("mlp_ratio", 4))
        if parts.json.get("use_swiglu_ffn", False):
            return SwiGLU(width=parts.width, hidden=_gated_width(hidden), bias=True)
        return MLP(hidden=hidden, **parts.feedforward)

    def read_head(self, parts: Parts) -> ClassHead:
        classes, start = class_count(parts.json), 1 + parts.patches["registers"]
        return ClassHead(classes=classes, pool="first_and_mean", mean_from=start)

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

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
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
