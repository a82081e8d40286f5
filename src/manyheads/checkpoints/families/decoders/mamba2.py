"""Mamba-2: a decoder whose layers have a mixer and nothing else."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from manyheads.checkpoints.families.family import CAUSAL_HEADS, Family, causal_readout, eps_of
from manyheads.checkpoints.tensor_map import Entry, Packed
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.mamba2 import Mamba2
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.norms import PreNorm, RMSNorm

# What `transformers` assumes where config.json does not say it.
DEFAULTS: dict[str, Any] = {
    "num_heads": 128,
    "head_dim": 64,
    "state_size": 128,
    "n_groups": 8,
    "conv_kernel": 4,
    "expand": 2,
    "layer_norm_epsilon": 1e-5,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "tie_word_embeddings": False,
}
NAMES = {
    "project.weight": "in_proj.weight",
    "project.bias": "in_proj.bias",
    "convolution.bias": "conv1d.bias",
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "D": "D",
    "norm_weight": "norm.weight",
    "output.weight": "out_proj.weight",
    "output.bias": "out_proj.bias",
}


class Mamba2Family(Family):
    """Mamba-2."""

    name = "mamba2"
    tied_copies = ("lm_head.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        width, inner = theirs["hidden_size"], theirs["num_heads"] * theirs["head_dim"]
        if theirs["hidden_act"] != "silu":
            raise ConfigError(f"hidden_act={theirs['hidden_act']!r} is not supported", "use silu")
        if inner != int(theirs["expand"] * width):
            raise ConfigError(
                f"num_heads * head_dim is {inner}, and expand * hidden_size is "
                f"{int(theirs['expand'] * width)}",
                "make them equal",
            )
        eps = eps_of(theirs, "layer_norm_epsilon")
        mixer = Mamba2(
            width=width,
            heads=theirs["num_heads"],
            head_size=theirs["head_dim"],
            state_size=theirs["state_size"],
            groups=theirs["n_groups"],
            convolution=theirs["conv_kernel"],
            time_step=_limits(theirs.get("time_step_limit")),
            eps=eps,
            bias=theirs["use_bias"],
            convolution_bias=theirs["use_conv_bias"],
        )
        norm = RMSNorm(eps=eps)
        layer = LayerConfig(attention=None, mixer=Branch(mixer, PreNorm(norm)), feedforward=None)
        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width),
            stack=StackConfig(
                width=width, layers=(layer,) * theirs["num_hidden_layers"], final_norm=norm
            ),
            readout=causal_readout(theirs, LanguageHead(tied=bool(theirs["tie_word_embeddings"]))),
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        branch = config.stack.layers[0].mixer
        if branch is None or not isinstance(branch.inner, Mamba2):
            return None
        mixer, head = branch.inner, config.readout
        if mixer.inner % mixer.width or not isinstance(head, LanguageHead | NoReadout):
            return None
        limits = {} if mixer.time_step == "any" else {"time_step_limit": list(mixer.time_step)}
        return {
            "model_type": "mamba2",
            "architectures": ["Mamba2" + CAUSAL_HEADS[type(head)]],
            "hidden_size": mixer.width,
            "num_hidden_layers": len(config.stack.layers),
            "vocab_size": config.embedding.vocabulary,
            "num_heads": mixer.heads,
            "head_dim": mixer.head_size,
            "state_size": mixer.state_size,
            "n_groups": mixer.groups,
            "conv_kernel": mixer.convolution,
            "expand": mixer.inner // mixer.width,
            "layer_norm_epsilon": mixer.eps,
            "use_bias": mixer.bias,
            "use_conv_bias": mixer.convolution_bias,
            "hidden_act": "silu",
            "initializer_range": config.init.std,
            "tie_word_embeddings": getattr(head, "tied", False),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **limits,
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Packed]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table = [
            Entry("embedding.tokens.weight", ("backbone.embeddings.weight",)),
            Entry("stack.final_norm.weight", ("backbone.norm_f.weight",)),
            Entry("readout.weight", ("lm_head.weight",)),
        ]
        packed = []
        for index, layer in enumerate(config.stack.layers):
            assert layer.mixer is not None
            assert isinstance(layer.mixer.inner, Mamba2)
            mine, theirs = f"stack.layers.{index}", f"backbone.layers.{index}"
            norm = f"{mine}.attention_residual.norm.weight"
            table.append(Entry(norm, (f"{theirs}.norm.weight",)))
            table += [
                Entry(f"{mine}.mixer.{own}", (f"{theirs}.mixer.{other}",))
                for own, other in NAMES.items()
            ]
            packed.append(_convolution(layer.mixer.inner, mine, theirs))
        return [*(entry for entry in table if entry.ours in have), *packed]

    def canonical_name(self, name: str) -> str | None:
        """Files of the bare model lack the prefix; the oldest say embedding."""
        if not name.startswith(("backbone.", "lm_head.")):
            name = f"backbone.{name}"
        return name.replace("backbone.embedding.", "backbone.embeddings.")


MAMBA2 = Mamba2Family()


def _convolution(mixer: Mamba2, ours: str, theirs: str) -> Packed:
    """Their convolution has one more axis, of one channel."""
    shape = (mixer.channels, mixer.convolution)
    own = {f"{ours}.mixer.convolution.weight": shape}
    return Packed(own, f"{theirs}.mixer.conv1d.weight", (shape[0], 1, shape[1]))


def _limits(found: Any) -> tuple[float, float] | Literal["any"]:
    """The bounds of the time step; those from 0 to infinity bound nothing.

    JSON has no infinity: `transformers` writes {"__float__": "Infinity"}.
    """
    if found is None:
        return "any"
    plain = (each["__float__"] if isinstance(each, dict) else each for each in found)
    low, high = (float(each) for each in plain)
    return "any" if low <= 0.0 and high == float("inf") else (low, high)
