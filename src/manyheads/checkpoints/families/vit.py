"""ViT: patches by a convolution, a class token in front, norms before each sublayer."""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import (
    Family,
    activation_of,
    class_count,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Entry, Packed
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import ClassHead, NoReadout, Readout
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.norms import LayerNorm, PreNorm

CLASSIFIER = "ViTForImageClassification"
BARE = "ViTModel"
ACTIVATIONS: dict[str, Activation] = {"gelu": "gelu", "gelu_new": "gelu_tanh", "relu": "relu"}
# Ours below a layer, and theirs below encoder.layer.N.
LAYER = (
    (
        "attention.project",
        ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    ),
    ("attention.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("layernorm_before",)),
    ("feedforward.expand", ("intermediate.dense",)),
    ("feedforward.contract", ("output.dense",)),
    ("feedforward_residual.norm", ("layernorm_after",)),
)
OTHERS = (
    ("embedding.convolution", "embeddings.patch_embeddings.projection"),
    ("stack.final_norm", "layernorm"),
)
# The modules of transformers 5 below layers.N; its files still have the names on the right.
RENAMED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.fc1": "intermediate.dense",
    "mlp.fc2": "output.dense",
}


class ViTFamily(Family):
    """ViT."""

    name = "vit"

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, norm = (
            theirs["hidden_size"],
            LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-12)),
        )
        dropout = float(theirs.get("hidden_dropout_prob", 0.0))
        if not theirs.get("qkv_bias", True):
            raise ConfigError(
                "qkv_bias=false, with a bias only on the output, is not supported",
                "use weights with qkv_bias=true, or add biases of zero",
            )
        attention = AttentionConfig(
            width=width,
            heads=theirs["num_attention_heads"],
            bias="all",
            dropout=float(theirs.get("attention_probs_dropout_prob", 0.0)),
        )
        feedforward = MLP(
            width=width,
            hidden=theirs["intermediate_size"],
            activation=activation_of(theirs, "hidden_act", ACTIVATIONS),
        )
        layer = LayerConfig(
            attention=Branch(attention, PreNorm(norm), dropout),
            feedforward=Branch(feedforward, PreNorm(norm), dropout),
        )
        return VisionConfig(
            patches=Patches(
                width=width,
                image=square_side(theirs, "image_size", 224),
                size=square_side(theirs, "patch_size", 16),
                channels=theirs.get("num_channels", 3),
                dropout=dropout,
            ),
            stack=StackConfig(
                width=width, layers=(layer,) * theirs["num_hidden_layers"], final_norm=norm
            ),
            readout=_readout(theirs),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, VisionConfig) or not config.stack.layers:
            return None
        first, norm, head = config.stack.layers[0], config.stack.final_norm, config.readout
        if first.attention is None or first.feedforward is None or not isinstance(norm, LayerNorm):
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        if not isinstance(feedforward, MLP) or feedforward.activation not in names:
            return None
        if attention.head_size != "even" or not isinstance(head, NoReadout | ClassHead):
            return None
        return {
            "model_type": "vit",
            "architectures": [CLASSIFIER if isinstance(head, ClassHead) else BARE],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "intermediate_size": feedforward.hidden,
            "hidden_act": names[feedforward.activation],
            "layer_norm_eps": norm.eps,
            "image_size": config.patches.image,
            "patch_size": config.patches.size,
            "num_channels": config.patches.channels,
            "qkv_bias": True,
            "initializer_range": config.init.std,
            "hidden_dropout_prob": config.patches.dropout,
            "attention_probs_dropout_prob": attention.dropout,
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Packed]:
        assert isinstance(config, VisionConfig)
        have, width, grid = set(ours), config.stack.width, config.patches.grid
        prefix = _prefix(config)
        classes = {"embedding.class_token": (width,)}
        positions = {
            "embedding.positions.class_token": (width,),
            "embedding.positions.patches": (grid.rows, grid.columns, width),
        }
        table: list[Entry | Packed] = [
            Packed(classes, "embeddings.cls_token", (1, 1, width), prefix),
            Packed(
                positions,
                "embeddings.position_embeddings",
                (1, 1 + grid.rows * grid.columns, width),
                prefix,
            ),
        ]
        for kind in ("weight", "bias"):
            for mine, theirs in OTHERS:
                table.append(Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix))
            if f"readout.{kind}" in have:
                table.append(Entry(f"readout.{kind}", (f"classifier.{kind}",)))
            for index in range(len(config.stack.layers)):
                for mine, parts in LAYER:
                    names = tuple(f"encoder.layer.{index}.{part}.{kind}" for part in parts)
                    rows, name = (width,) * len(parts), f"stack.layers.{index}.{mine}.{kind}"
                    table.append(Entry(name, names, rows, prefix=prefix))
        return table

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack; modules of 5.x as files name them."""
        bare = name.removeprefix("vit.")
        found = re.fullmatch(r"layers\.(\d+)\.(.+)\.(weight|bias)", bare)
        if found is None:
            return bare
        index, part, kind = found.groups()
        return f"encoder.layer.{index}.{RENAMED.get(part, part)}.{kind}"

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Hidden states and classes need no pooler; the mask token is for training only."""
        names = ("pooler.dense.weight", "pooler.dense.bias", "embeddings.mask_token")
        return {name: _prefix(config) + name for name in names}

    def module_name(self, stem: str) -> str:
        """Files keep the names that modules had before transformers 5."""
        for new, old in RENAMED.items():
            match = re.fullmatch(rf"(.*?)encoder\.layer\.(\d+)\.{re.escape(old)}", stem)
            if match is not None and match[1] in ("", "vit."):
                return f"{match[1]}layers.{match[2]}.{new}"
        return stem


VIT = ViTFamily()


def _prefix(config: ModelConfig) -> str:
    """Files of the bare model are written without the prefix that a classifier's have."""
    return "" if isinstance(config.readout, NoReadout) else "vit."


def square_side(theirs: Mapping[str, Any], key: str, default: int) -> int:
    """A side in pixels, which may be given for each of both sides."""
    value = theirs.get(key, default)
    sides = {value} if isinstance(value, int) else set(value)
    if len(sides) > 1:
        raise ConfigError(f"{key} must be square, got {value}", "use one number for both sides")
    return int(sides.pop())


def _readout(theirs: Mapping[str, Any]) -> Readout:
    name = (theirs.get("architectures") or [BARE])[0]
    if name == BARE:
        return NoReadout()
    if name != CLASSIFIER:
        raise ConfigError(f"the head of {name} is not supported", f"use {CLASSIFIER} or {BARE}")
    return ClassHead(classes=class_count(theirs))
