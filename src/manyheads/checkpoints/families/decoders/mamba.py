"""Mamba and Falcon-Mamba: decoders whose layers have a mixer and nothing else."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.checkpoints.families.family import CAUSAL_HEADS, Family, causal_readout, eps_of
from manyheads.checkpoints.tensor_map import Entry, Packed
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.mamba import Mamba
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
    "state_size": 16,
    "expand": 2,
    "conv_kernel": 4,
    "time_step_rank": "auto",
    "layer_norm_epsilon": 1e-5,
    "mixer_rms_eps": 1e-6,
    "use_bias": False,
    "use_conv_bias": True,
    "hidden_act": "silu",
    "initializer_range": 0.1,
    "tie_word_embeddings": True,
}
FALCON = "falcon_mamba"
NAMES = {
    "project.weight": "in_proj.weight",
    "project.bias": "in_proj.bias",
    "convolution.bias": "conv1d.bias",
    "x_proj.weight": "x_proj.weight",
    "dt_weight": "dt_proj.weight",
    "dt_bias": "dt_proj.bias",
    "A_log": "A_log",
    "D": "D",
    "output.weight": "out_proj.weight",
    "output.bias": "out_proj.bias",
}


class MambaFamily(Family):
    """Mamba, and Falcon-Mamba, which norms B, C and dt."""

    name = "mamba"
    tied_copies = ("lm_head.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        width, rank = theirs["hidden_size"], theirs["time_step_rank"]
        if theirs["hidden_act"] != "silu":
            raise ConfigError(f"hidden_act={theirs['hidden_act']!r} is not supported", "use silu")
        if rank != "auto" and not isinstance(rank, int):
            raise ConfigError(f'time_step_rank must be a number or "auto", got {rank!r:.100}')
        mixer = Mamba(
            width=width,
            inner=int(theirs["expand"] * width),
            state_size=theirs["state_size"],
            dt_rank=-(-width // 16) if rank == "auto" else rank,
            convolution=theirs["conv_kernel"],
            bias=theirs["use_bias"],
            convolution_bias=theirs["use_conv_bias"],
            inner_eps=eps_of(theirs, "mixer_rms_eps")
            if theirs.get("model_type") == FALCON
            else "none",
        )
        norm = RMSNorm(eps=eps_of(theirs, "layer_norm_epsilon"))
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
        branch, head = config.stack.layers[0].mixer, config.readout
        if branch is None or not isinstance(branch.inner, Mamba):
            return None
        mixer, norm = branch.inner, config.stack.final_norm
        if mixer.inner % mixer.width or not isinstance(head, LanguageHead | NoReadout):
            return None
        falcon = mixer.inner_eps != "none"
        return {
            "model_type": FALCON if falcon else "mamba",
            "architectures": [("FalconMamba" if falcon else "Mamba") + CAUSAL_HEADS[type(head)]],
            "hidden_size": mixer.width,
            "num_hidden_layers": len(config.stack.layers),
            "vocab_size": config.embedding.vocabulary,
            "state_size": mixer.state_size,
            "expand": mixer.inner // mixer.width,
            "conv_kernel": mixer.convolution,
            "time_step_rank": mixer.dt_rank,
            "layer_norm_epsilon": norm.eps if isinstance(norm, RMSNorm) else 1e-5,
            "use_bias": mixer.bias,
            "use_conv_bias": mixer.convolution_bias,
            "hidden_act": "silu",
            "initializer_range": config.init.std,
            "tie_word_embeddings": getattr(head, "tied", False),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **({"mixer_rms_eps": mixer.inner_eps} if falcon else {}),
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
            assert isinstance(layer.mixer.inner, Mamba)
            mine, theirs = f"stack.layers.{index}", f"backbone.layers.{index}"
            norm = f"{mine}.attention_residual.norm.weight"
            table.append(Entry(norm, (f"{theirs}.norm.weight",)))
            table += [
                Entry(f"{mine}.mixer.{own}", (f"{theirs}.mixer.{other}",))
                for own, other in NAMES.items()
            ]
            # Their convolution has one more axis, of one channel.
            channels, size = layer.mixer.inner.inner, layer.mixer.inner.convolution
            own = {f"{mine}.mixer.convolution.weight": (channels, size)}
            packed.append(Packed(own, f"{theirs}.mixer.conv1d.weight", (channels, 1, size)))
        return [*(entry for entry in table if entry.ours in have), *packed]

    def canonical_name(self, name: str) -> str | None:
        """Files of the bare model lack the prefix; the oldest say embedding."""
        if not name.startswith(("backbone.", "lm_head.")):
            name = f"backbone.{name}"
        return name.replace("backbone.embedding.", "backbone.embeddings.")


MAMBA = MambaFamily()
