"""Our own layout: any model the library can build, its config and tensors under their own names."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads import attention
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.tensor_map import Entry
from manyheads.dataclass_codec import DataclassCodec
from manyheads.mixers.build import MIXERS
from manyheads.models import (
    decoder,
    embedding,
    encoder,
    initialization,
    layer,
    readout,
    seq2seq,
    stack,
    vision,
)
from manyheads.models.recipes import ModelConfig
from manyheads.parts import convolution, experts, feedforward, gates, halting, masks, norms
from manyheads.parts.positions import absolute, alibi, disentangled, relative, rotary
from manyheads.renamed_keys import new_tensor_name

# The only classes that a file may name; nothing else is ever made from one.
CONFIG_JSON = DataclassCodec(
    tag="type",
    classes=(
        attention.AttentionConfig,
        decoder.DecoderConfig,
        embedding.Embedding,
        encoder.EncoderConfig,
        initialization.Initialization,
        layer.Branch,
        layer.LayerConfig,
        readout.ClassHead,
        readout.LanguageHead,
        readout.NoReadout,
        readout.TokenHead,
        readout.ReadoutTransform,
        readout.SpanHead,
        seq2seq.Seq2SeqConfig,
        stack.StackConfig,
        vision.Patches,
        vision.VisionConfig,
        convolution.Convolution,
        feedforward.Constant,
        experts.ClampedSwiGLU,
        experts.Experts,
        feedforward.GeGLU,
        feedforward.MLP,
        feedforward.SwiGLU,
        gates.Gate,
        halting.Halting,
        *MIXERS,
        norms.OutputNorm,
        norms.SandwichNorm,
        norms.ScaledPreNorm,
        norms.LayerNorm,
        norms.NoNorm,
        norms.PostNorm,
        norms.PreNorm,
        norms.RMSNorm,
        masks.Full,
        masks.And,
        masks.Blocks,
        masks.Causal,
        masks.GlobalTokens,
        masks.Or,
        masks.Prefix,
        masks.RandomBlocks,
        masks.Window,
        alibi.Alibi,
        absolute.Axial,
        absolute.Learned,
        absolute.NoPosition,
        disentangled.Disentangled,
        relative.Shaw,
        relative.T5Buckets,
        rotary.DynamicScaling,
        rotary.LinearScaling,
        rotary.Llama3Scaling,
        rotary.LongRopeScaling,
        rotary.NTKScaling,
        rotary.Rotary,
        rotary.NoScaling,
        rotary.YarnScaling,
        absolute.Sinusoidal,
    ),
)


class NativeFamily(Family):
    """Our own layout, which can describe every model."""

    name = "native"

    def read_config(self, config_json: Mapping[str, Any]) -> ModelConfig:
        config: ModelConfig = CONFIG_JSON.decode(ModelConfig, config_json.get("config"), "config")
        return config

    def write_config(self, config: ModelConfig) -> dict[str, Any]:
        return {"model_type": "manyheads", "config": CONFIG_JSON.encode(config)}

    def tensor_map(self, config: ModelConfig, names: Iterable[str]) -> list[Entry]:  # noqa: ARG002
        return [Entry(name, (name,)) for name in names]

    def rewritten(self, config_json: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        """With today's keys."""
        return {**config_json, **self.write_config(config)}

    def canonical_name(self, name: str) -> str | None:
        return new_tensor_name(name)

    def opened_by(self, config_json: Mapping[str, Any]) -> str:  # noqa: ARG002
        return "manyheads"


NATIVE = NativeFamily()
