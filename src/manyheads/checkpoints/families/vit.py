"""ViT: patches by a convolution, a class token in front, norms before each sublayer."""

from collections.abc import Iterator
from typing import Any

from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.models.readout import ClassHead, NoReadout, Readout
from manyheads.models.vision import Patches, VisionConfig


def _read_side(key: str, value: Any) -> int:
    """A side in pixels, which may be given for each of both sides."""
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) > 1:
        raise ConfigError(f"{key} must be square, got {value}", "use one number for both sides")
    return int(sides.pop())


SIDE = config_keys.Form(_read_side)
ATTENTION_MODULES = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
}


class ViTFamily(family.StackFamily):
    """ViT."""

    name = "vit"
    classes = {"vit": "ViT"}
    class_ends = {ClassHead: "ForImageClassification", NoReadout: "Model"}
    config_types = (VisionConfig,)
    keys = {
        **{name: key for name, key in config_keys.SIZES.items() if name != "vocab_size"},
        "hidden_act": config_keys.activation("gelu"),
        "layer_norm_eps": config_keys.eps(1e-12),
        "image_size": config_keys.Key("patches.image", 224, SIDE),
        "patch_size": config_keys.Key("patches.size", 16, SIDE),
        "num_channels": config_keys.Key("patches.channels", 3),
        "initializer_range": config_keys.STD,
        "hidden_dropout_prob": config_keys.dropout("patches"),
        "attention_probs_dropout_prob": config_keys.dropout("attention"),
    }
    constants = {"qkv_bias": True}
    final_norm = True
    dropouts = ("patches", "patches")

    prefix = "vit."
    embedding = {
        "embedding.convolution": "embeddings.patch_embeddings.projection",
        "stack.final_norm": "layernorm",
    }
    layers = "encoder.layer"
    layer = {
        "attention.project": tuple(
            f"attention.attention.{part}" for part in ("query", "key", "value")
        ),
        "attention.output": "attention.output.dense",
        "attention_residual.norm": "layernorm_before",
        "feedforward.expand": "intermediate.dense",
        "feedforward.contract": "output.dense",
        "feedforward_residual.norm": "layernorm_after",
    }
    heads = {ClassHead: {"readout": "classifier"}}
    # Hidden states and classes need no pooler; the mask token is for training only.
    unused: tuple[str, ...] = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token")
    module_layers = "layers"
    modules = {**ATTENTION_MODULES, "mlp.fc1": "intermediate.dense", "mlp.fc2": "output.dense"}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        if not config_json.get("qkv_bias", True):
            raise ConfigError(
                "qkv_bias=false, with a bias only on the output, is not supported",
                "use weights with qkv_bias=true, or add biases of zero",
            )
        return config_json

    def read_inputs(self, parts: Parts) -> dict[str, Any]:
        return {"patches": Patches(**parts.patches)}

    def read_readout(self, parts: Parts) -> Readout:
        classifies = family.readout_class(self, parts.json) is ClassHead
        return self.read_head(parts) if classifies else NoReadout()

    def read_head(self, parts: Parts) -> ClassHead:
        return ClassHead(classes=family.class_count(parts.json))

    def model_entries(self, config: VisionConfig) -> Iterator[Packed]:
        width, patches = config.stack.width, config.patches
        rows, columns = patches.grid.rows, patches.grid.columns
        positions = {
            "embedding.positions.class_token": (width,),
            "embedding.positions.patches": (rows, columns, width),
        }
        token = {"embedding.class_token": (width,)}
        yield Packed(token, "embeddings.cls_token", (1, 1, width))
        shape = (1, 1 + rows * columns, width)
        yield Packed(positions, "embeddings.position_embeddings", shape)
        if patches.registers:
            registers = {"embedding.registers": (patches.registers, width)}
            yield Packed(registers, "embeddings.register_tokens", (1, patches.registers, width))


VIT = ViTFamily()
