"""DINOv2: a vision transformer with scaled branches, and register tokens in its later version."""

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
from manyheads.checkpoints.families.vit import ACTIVATIONS, square_side
from manyheads.checkpoints.tensor_map import Either, Entry, Packed
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import ClassHead, NoReadout, Readout
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.models.vision import Patches, VisionConfig
from manyheads.parts.feedforward import MLP, SwiGLU
from manyheads.parts.norms import LayerNorm, ScaledPreNorm

PLAIN, REGISTERS = "dinov2", "dinov2_with_registers"
CLASSES = {PLAIN: "Dinov2", REGISTERS: "Dinov2WithRegisters"}
CLASSIFIER = "ForImageClassification"
# Ours below a layer, and theirs below encoder.layer.N.
LAYER = (
    (
        "attention.project",
        ("attention.attention.query", "attention.attention.key", "attention.attention.value"),
    ),
    ("attention.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("norm1",)),
    ("feedforward_residual.norm", ("norm2",)),
)
FEEDFORWARD = (("feedforward.expand", "mlp.fc1"), ("feedforward.contract", "mlp.fc2"))
SCALES = (
    ("attention_residual.second_norm.weight", "layer_scale1.lambda1"),
    ("feedforward_residual.second_norm.weight", "layer_scale2.lambda1"),
)
OTHERS = (
    ("embedding.convolution", "embeddings.patch_embeddings.projection"),
    ("stack.final_norm", "layernorm"),
)
# The modules of transformers 5 below encoder.layer.N; its files have the names on the right.
RENAMED = {
    "attention.q_proj": "attention.attention.query",
    "attention.k_proj": "attention.attention.key",
    "attention.v_proj": "attention.attention.value",
    "attention.o_proj": "attention.output.dense",
    "mlp.down_proj": "mlp.weights_out",
}
LAYER_TENSOR = re.compile(r"(.*)encoder\.layer\.(\d+)\.(.+)\.(weight|bias)")
MASK_TOKEN = "embeddings.mask_token"


class Dinov2Family(Family):
    """DINOv2, without and with register tokens."""

    name = PLAIN

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        _refuse_foreign(theirs)
        width, dropout = theirs["hidden_size"], float(theirs.get("hidden_dropout_prob", 0.0))
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-6))
        scaled = ScaledPreNorm(norm, float(theirs.get("layerscale_value", 1.0)))
        attention = AttentionConfig(
            width=width,
            heads=theirs["num_attention_heads"],
            bias="all",
            dropout=float(theirs.get("attention_probs_dropout_prob", 0.0)),
        )
        layer = LayerConfig(
            attention=Branch(attention, scaled), feedforward=Branch(_feedforward(theirs), scaled)
        )
        later = theirs["model_type"] == REGISTERS
        registers = int(theirs.get("num_register_tokens", 4)) if later else 0
        return VisionConfig(
            patches=Patches(
                width=width,
                image=square_side(theirs, "image_size", 224),
                size=square_side(theirs, "patch_size", 16 if later else 14),
                channels=theirs.get("num_channels", 3),
                registers=registers,
                antialias=later,
                dropout=dropout,
            ),
            stack=StackConfig(
                width=width, layers=(layer,) * theirs["num_hidden_layers"], final_norm=norm
            ),
            readout=_readout(theirs, 1 + registers),
            init=Initialization(draw="truncated", std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, VisionConfig) or not config.stack.layers:
            return None
        first, norm, head = config.stack.layers[0], config.stack.final_norm, config.readout
        if first.attention is None or first.feedforward is None or not isinstance(norm, LayerNorm):
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        if not isinstance(first.attention.norm, ScaledPreNorm) or attention.head_size != "even":
            return None
        names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
        gated = isinstance(feedforward, SwiGLU)
        if isinstance(feedforward, MLP) and feedforward.activation not in names:
            return None
        if not isinstance(feedforward, MLP | SwiGLU):
            return None
        if not isinstance(head, NoReadout | ClassHead):
            return None
        family, patches = _family(config), config.patches
        registers = {"num_register_tokens": patches.registers} if family == REGISTERS else {}
        return {
            "model_type": family,
            "architectures": [
                CLASSES[family] + (CLASSIFIER if isinstance(head, ClassHead) else "Model")
            ],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "mlp_ratio": _ratio(feedforward.hidden, config.stack.width, gated=gated),
            "use_swiglu_ffn": gated,
            "hidden_act": names.get(feedforward.activation, "gelu"),
            "layer_norm_eps": norm.eps,
            "layerscale_value": first.attention.norm.start,
            "image_size": patches.image,
            "patch_size": patches.size,
            "num_channels": patches.channels,
            **registers,
            "qkv_bias": True,
            "initializer_range": config.init.std,
            "hidden_dropout_prob": patches.dropout,
            "attention_probs_dropout_prob": attention.dropout,
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Packed | Either]:
        assert isinstance(config, VisionConfig)
        have, width, grid = set(ours), config.stack.width, config.patches.grid
        prefix, kinds = _prefix(config), ("weight", "bias")
        positions = {
            "embedding.positions.class_token": (width,),
            "embedding.positions.patches": (grid.rows, grid.columns, width),
        }
        count, registers = 1 + grid.rows * grid.columns, config.patches.registers
        tokens = {"embedding.class_token": (width,)}
        table: list[Entry | Packed | Either] = [
            Packed(tokens, "embeddings.cls_token", (1, 1, width), prefix),
            Packed(positions, "embeddings.position_embeddings", (1, count, width), prefix),
        ]
        if registers:
            added = {"embedding.registers": (registers, width)}
            shape = (1, registers, width)
            table.append(Packed(added, "embeddings.register_tokens", shape, prefix))
        for kind in kinds:
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in OTHERS
            ]
            if f"readout.{kind}" in have:
                table.append(Entry(f"readout.{kind}", (f"classifier.{kind}",)))
        for index, layer in enumerate(config.stack.layers):
            place, mine = f"encoder.layer.{index}", f"stack.layers.{index}"
            table += [
                Entry(f"{mine}.{name}", (f"{place}.{theirs}",), prefix=prefix)
                for name, theirs in SCALES
            ]
            for kind in kinds:
                for name, parts in LAYER:
                    names = tuple(f"{place}.{part}.{kind}" for part in parts)
                    rows = (width,) * len(parts)
                    table.append(Entry(f"{mine}.{name}.{kind}", names, rows, prefix=prefix))
                table += _feedforward_entries(layer, mine, place, kind, prefix)
        return table

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack; modules of 5.x as files name them."""
        bare = name.removeprefix("dinov2_with_registers.").removeprefix("dinov2.")
        found = LAYER_TENSOR.fullmatch(bare)
        if found is None:
            return bare
        _, index, part, kind = found.groups()
        return f"encoder.layer.{index}.{RENAMED.get(part, part)}.{kind}"

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """The mask token is for training only."""
        return {MASK_TOKEN: _prefix(config) + MASK_TOKEN}

    def module_name(self, stem: str) -> str:
        """Files keep the names that modules had before transformers 5."""
        for new, old in RENAMED.items():
            if re.fullmatch(rf".*encoder\.layer\.\d+\.{re.escape(old)}", stem):
                return stem.removesuffix(old) + new
        return stem


DINOV2 = Dinov2Family()


def _feedforward_entries(
    layer: LayerConfig, mine: str, place: str, kind: str, prefix: str
) -> list[Entry | Either]:
    assert layer.feedforward is not None
    if isinstance(layer.feedforward.inner, MLP):
        return [
            Entry(f"{mine}.{name}.{kind}", (f"{place}.{theirs}.{kind}",), prefix=prefix)
            for name, theirs in FEEDFORWARD
        ]
    # Files have both halves in one tensor, modules of 5.x have them apart.
    name, rows = f"{mine}.feedforward.expand.{kind}", (layer.feedforward.inner.hidden,) * 2
    apart = tuple(f"{place}.mlp.{part}_proj.{kind}" for part in ("gate", "up"))
    joined = f"{place}.mlp.weights_in.{kind}"
    out = f"{place}.mlp.weights_out.{kind}"
    return [
        Either(Entry(name, (joined,), prefix=prefix), Entry(name, apart, rows, prefix=prefix)),
        Entry(f"{mine}.feedforward.contract.{kind}", (out,), prefix=prefix),
    ]


def _family(config: VisionConfig) -> str:
    return REGISTERS if config.patches.antialias else PLAIN


def _prefix(config: ModelConfig) -> str:
    """Files of the bare model are written without the prefix that a classifier's have."""
    assert isinstance(config, VisionConfig)
    return "" if isinstance(config.readout, NoReadout) else f"{_family(config)}."


def _feedforward(theirs: Mapping[str, Any]) -> MLP | SwiGLU:
    width = theirs["hidden_size"]
    hidden = int(width * theirs.get("mlp_ratio", 4))
    if theirs.get("use_swiglu_ffn", False):
        return SwiGLU(width=width, hidden=_gated_width(hidden), bias=True)
    activation = activation_of(theirs, "hidden_act", ACTIVATIONS)
    return MLP(width=width, hidden=hidden, activation=activation)


def _gated_width(hidden: int) -> int:
    """Two thirds, rounded up to a multiple of 8, so that two input projections cost as one."""
    return (int(hidden * 2 / 3) + 7) // 8 * 8


def _ratio(hidden: int, width: int, *, gated: bool) -> int | float:
    """The whole ratio if there is one: `transformers` refuses others."""
    wanted = (lambda ratio: _gated_width(int(width * ratio))) if gated else (lambda r: width * r)
    return next((ratio for ratio in range(1, 65) if wanted(ratio) == hidden), hidden / width)


def _readout(theirs: Mapping[str, Any], mean_from: int) -> Readout:
    stem = CLASSES[theirs["model_type"]]
    name = (theirs.get("architectures") or [f"{stem}Model"])[0]
    if name == f"{stem}Model":
        return NoReadout()
    if name != stem + CLASSIFIER:
        raise ConfigError(
            f"the head of {name} is not supported", f"use {stem}{CLASSIFIER} or {stem}Model"
        )
    return ClassHead(classes=class_count(theirs), pool="first_and_mean", mean_from=mean_from)


def _refuse_foreign(theirs: Mapping[str, Any]) -> None:
    if not theirs.get("qkv_bias", True):
        raise ConfigError(
            "qkv_bias=false, with a bias only on the output, is not supported",
            "use weights with qkv_bias=true, or add biases of zero",
        )
    if theirs.get("drop_path_rate", 0.0):
        raise ConfigError(
            f"drop_path_rate={theirs['drop_path_rate']}, which skips sublayers in training, "
            "is not supported",
            "use drop_path_rate=0",
        )
