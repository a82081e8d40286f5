"""ViT: patches by a convolution, a class token in front, norms before each sublayer."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, NoReadout, Readout
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.norms import LayerNorm, PreNorm

ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}


def _read_side(key: str, value: Any) -> int:
    """A side in pixels, which may be given for each of both sides."""
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) > 1:
        raise ConfigError(f"{key} must be square, got {value}", "use one number for both sides")
    return int(sides.pop())


SIDE = config_keys.Form(_read_side)


class ViTFamily(family.Family):
    """ViT."""

    name = "vit"
    classes: Mapping[str, str] = {"vit": "ViT"}
    class_ends: Mapping[type[Readout], str] = {
        ClassHead: "ForImageClassification",
        NoReadout: "Model",
    }
    config_types = (VisionConfig,)
    keys: Mapping[str, config_keys.Key] = {
        "hidden_size": config_keys.WIDTH,
        "num_hidden_layers": config_keys.DEPTH,
        "num_attention_heads": config_keys.HEADS,
        "intermediate_size": config_keys.HIDDEN,
        "hidden_act": config_keys.Key(
            "feedforward.activation", "gelu", config_keys.one_of(ACTIVATIONS)
        ),
        "layer_norm_eps": config_keys.Key("norm.eps", 1e-12, config_keys.EPS),
        "image_size": config_keys.Key("patches.image", 224, SIDE),
        "patch_size": config_keys.Key("patches.size", 16, SIDE),
        "num_channels": config_keys.Key("patches.channels", 3),
        "initializer_range": config_keys.STD,
        "hidden_dropout_prob": config_keys.Key("patches.dropout", 0.0, config_keys.FLOAT),
        "attention_probs_dropout_prob": config_keys.Key(
            "attention.dropout", 0.0, config_keys.FLOAT
        ),
    }
    constants: Mapping[str, Any] = {"qkv_bias": True}
    init = Initialization()

    prefix = "vit."
    embedding: Mapping[str, family.Sources] = {
        "embedding.convolution": "embeddings.patch_embeddings.projection",
        "stack.final_norm": "layernorm",
    }
    layers = "encoder.layer"
    layer: Mapping[str, family.Sources] = {
        "attention.project": tuple(
            f"attention.attention.{part}" for part in ("query", "key", "value")
        ),
        "attention.output": "attention.output.dense",
        "attention_residual.norm": "layernorm_before",
        "feedforward.expand": "intermediate.dense",
        "feedforward.contract": "output.dense",
        "feedforward_residual.norm": "layernorm_after",
    }
    heads: Mapping[type[Readout], Mapping[str, family.Sources]] = {
        ClassHead: {"readout": "classifier"}
    }
    # Hidden states and classes need no pooler; the mask token is for training only.
    unused: tuple[str, ...] = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token")
    module_layers = "layers"
    modules: Mapping[str, str] = {
        "attention.q_proj": "attention.attention.query",
        "attention.k_proj": "attention.attention.key",
        "attention.v_proj": "attention.attention.value",
        "attention.o_proj": "attention.output.dense",
        "mlp.fc1": "intermediate.dense",
        "mlp.fc2": "output.dense",
    }

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        if not config_json.get("qkv_bias", True):
            raise ConfigError(
                "qkv_bias=false, with a bias only on the output, is not supported",
                "use weights with qkv_bias=true, or add biases of zero",
            )
        return config_json

    def read_config(self, config_json: Mapping[str, Any]) -> VisionConfig:
        config_json = self.complete(config_json)
        parts = config_keys.read_keys(self.keys, config_json)
        norm = LayerNorm(**parts.norm)
        layer = self.read_layer(parts, norm, config_json)
        patches = self.read_patches(parts, config_json)
        kind = family.readout_class(self, config_json)
        return VisionConfig(
            patches=patches,
            stack=StackConfig(width=parts.width, layers=(layer,) * parts.depth, final_norm=norm),
            readout=self.read_head(patches, config_json) if kind is ClassHead else NoReadout(),
            init=replace(self.init, **parts.init),
        )

    def read_patches(self, parts: config_keys.Parts, config_json: Mapping[str, Any]) -> Patches:  # noqa: ARG002
        return Patches(**parts.patches)

    def read_layer(
        self,
        parts: config_keys.Parts,
        norm: LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> LayerConfig:
        attention = AttentionConfig(bias="all", **parts.attention)
        dropout = parts.patches["dropout"]
        return family.layer_of(attention, MLP(**parts.feedforward), PreNorm(norm), dropout)

    def read_head(self, patches: Patches, config_json: Mapping[str, Any]) -> ClassHead:  # noqa: ARG002
        return ClassHead(classes=family.class_count(config_json))

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
