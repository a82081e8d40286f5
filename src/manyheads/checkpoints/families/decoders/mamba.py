"""Mamba, Falcon-Mamba and Mamba-2: decoders whose layers have a mixer and nothing else."""

from collections.abc import Iterator
from typing import Any

from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Key, Parts
from manyheads.checkpoints.families.family import CAUSAL_HEADS, DecoderFamily, Inner
from manyheads.checkpoints.tensor_map import Depthwise, MapEntry
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent import mamba, mamba2
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.parts.norms import PreNorm

MAMBA_TYPE, FALCON = "mamba", "falcon_mamba"
KEYS: dict[str, Key] = {
    "hidden_size": config_keys.WIDTH,
    "num_hidden_layers": config_keys.DEPTH,
    "vocab_size": config_keys.VOCABULARY,
    "conv_kernel": Key("mixer.convolution", 4),
    "layer_norm_epsilon": config_keys.eps(1e-5),
    "use_bias": Key("mixer.bias", False),
    "use_conv_bias": Key("mixer.convolution_bias", True),
    "initializer_range": Key("init.std", 0.1, config_keys.FLOAT),
}
NO_TOKENS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class MambaFamily(DecoderFamily):
    """Mamba, and Falcon-Mamba, which norms B, C and dt."""

    name = "mamba"
    classes = {MAMBA_TYPE: "Mamba", FALCON: "FalconMamba"}
    class_ends = {kind: CAUSAL_HEADS[kind] for kind in (LanguageHead, NoReadout)}
    keys = {
        **KEYS,
        "state_size": Key("mixer.state_size", 16),
        "time_step_rank": Key("mixer.dt_rank"),
        "tie_word_embeddings": config_keys.TIED,
    }
    only = {"hidden_act": "silu"}
    constants = NO_TOKENS
    mixer: type[mamba.Mamba] | type[mamba2.Mamba2] = mamba.Mamba

    root = "backbone."
    embedding = {"embedding.tokens": "embeddings", "stack.final_norm": "norm_f"}
    layers = "layers"
    layer = {
        "attention_residual.norm": "norm",
        "mixer.project": "mixer.in_proj",
        "mixer.convolution": "mixer.conv1d",
        "mixer.x_proj": "mixer.x_proj",
        "mixer.dt_weight": "mixer.dt_proj.weight",
        "mixer.dt_bias": "mixer.dt_proj.bias",
        "mixer.A_log": "mixer.A_log",
        "mixer.D": "mixer.D",
        "mixer.output": "mixer.out_proj",
    }
    heads = {LanguageHead: {"readout": "lm_head"}}
    tied_copies = ("lm_head.weight",)
    # The oldest files say embedding.
    older = {"backbone.embedding.": "backbone.embeddings."}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        rank = config_json.get("time_step_rank", "auto")
        if rank != "auto" and not isinstance(rank, int):
            raise ConfigError(f'time_step_rank must be a number or "auto", got {rank!r:.100}')
        rank = -(-config_json["hidden_size"] // 16) if rank == "auto" else rank
        return super().complete({**config_json, "time_step_rank": rank})

    def read_layers(self, parts: Parts) -> Iterator[LayerConfig]:
        for index in range(parts.depth):
            mixer: Any = Branch(self.read_inner(parts, index), PreNorm(parts.norm))
            yield LayerConfig(attention=None, mixer=mixer, feedforward=None)

    def read_inner(self, parts: Parts, index: int) -> Inner:  # noqa: ARG002
        inner = int(parts.json.get("expand", 2) * parts.width)
        if parts.json["model_type"] == FALCON:
            eps = config_keys.EPS.read("mixer_rms_eps", parts.json.get("mixer_rms_eps", 1e-6))
            return mamba.Mamba(inner=inner, inner_eps=eps, **parts.mixer)
        return mamba.Mamba(inner=inner, **parts.mixer)

    def model_type(self, parts: Parts) -> str:
        return MAMBA_TYPE if getattr(parts.mixer, "inner_eps", "none") == "none" else FALCON

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        mixer = parts.mixer
        if not isinstance(mixer, self.mixer) or mixer.inner % mixer.width:
            return None
        described: dict[str, Any] = {"expand": mixer.inner // mixer.width}
        if isinstance(mixer, mamba.Mamba) and mixer.inner_eps != "none":
            described["mixer_rms_eps"] = mixer.inner_eps
        if isinstance(config.readout, NoReadout):
            # A tied bare model would get a head.
            described["tie_word_embeddings"] = False
        return described

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        """The convolution of a file has one more axis, of one channel."""
        convolution = name.endswith(".convolution.weight")
        return Depthwise(name, sources) if convolution else super().entry(name, sources, layer)


MAMBA = MambaFamily()


def _read_limits(_: str, limits: Any) -> Any:
    """The bounds of the time step; those from 0 to infinity bound nothing.

    JSON has no infinity: `transformers` writes {"__float__": "Infinity"}.
    """
    if limits is None:
        return "any"
    plain = (limit["__float__"] if isinstance(limit, dict) else limit for limit in limits)
    low, high = (float(limit) for limit in plain)
    return "any" if low <= 0.0 and high == float("inf") else (low, high)


LIMITS = config_keys.Form(_read_limits, lambda limits: None if limits == "any" else list(limits))


class Mamba2Family(MambaFamily):
    """Mamba-2."""

    name = "mamba2"
    classes = {"mamba2": "Mamba2"}
    keys = {
        **KEYS,
        "num_heads": Key("mixer.heads", 128),
        "head_dim": Key("mixer.head_size", 64),
        "state_size": Key("mixer.state_size", 128),
        "n_groups": Key("mixer.groups", 8),
        "time_step_limit": Key("mixer.time_step", None, LIMITS, written="changed"),
        "tie_word_embeddings": config_keys.UNTIED,
    }
    mixer = mamba2.Mamba2
    layer = {
        **MambaFamily.layer,
        "mixer.dt_bias": "mixer.dt_bias",
        "mixer.norm_weight": "mixer.norm.weight",
    }

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        inner = config_json.get("num_heads", 128) * config_json.get("head_dim", 64)
        whole = int(config_json.get("expand", 2) * config_json["hidden_size"])
        if inner != whole:
            raise ConfigError(
                f"num_heads * head_dim is {inner}, and expand * hidden_size is {whole}",
                "make them equal",
            )
        return DecoderFamily.complete(self, config_json)

    def read_inner(self, parts: Parts, index: int) -> Inner:  # noqa: ARG002
        return mamba2.Mamba2(eps=parts.norm.eps, **parts.mixer)

    def model_type(self, parts: Parts) -> str:  # noqa: ARG002
        return "mamba2"


MAMBA2 = Mamba2Family()
