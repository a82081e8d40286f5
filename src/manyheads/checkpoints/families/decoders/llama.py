"""Llama, Mistral and Qwen2, and what Qwen3, Mixtral and others share with them."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.rope import (
    LONGEST,
    describe_rope,
    longest_of,
    read_rope,
    rope_of,
)
from manyheads.checkpoints.families.decoders.windows import FULL, SLIDING, layer_kinds
from manyheads.checkpoints.families.family import (
    CAUSAL_HEADS,
    Family,
    causal_readout,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.masks import Causal, Mask, Window
from manyheads.parts.norms import NoNorm, PreNorm, RMSNorm
from manyheads.parts.positions.rotary import NoScaling, Rotary

CLASSES = {
    "llama": "Llama",
    "mistral": "Mistral",
    "qwen2": "Qwen2",
    "qwen3": "Qwen3",
    "mixtral": "Mixtral",
    "qwen3_moe": "Qwen3Moe",
}
# The families that normalize queries and keys.
NORMED = ("qwen3", "qwen3_moe", "qwen3_next")
# What `transformers` assumes where config.json does not say it.
WINDOW = 4096
THETAS = {"mixtral": 1_000_000.0}
LENGTHS = {"llama": 2048, "mistral": 131_072, "mixtral": 131_072}


class LlamaFamily(Family):
    """Llama, Mistral and Qwen2."""

    name = "llama"
    tied_copies = ("lm_head.weight",)
    per_layer_keys = ("num_attention_heads", "num_key_value_heads", "intermediate_size")
    # Our norms of a layer, and theirs.
    norms: Mapping[str, str] = {
        "attention_residual.norm": "input_layernorm",
        "feedforward_residual.norm": "post_attention_layernorm",
    }
    # Whether queries, keys and values, and both halves of a feed-forward, are one matrix each.
    joined = False

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
        family, norm = theirs["model_type"], RMSNorm(eps=eps_of(theirs, "rms_norm_eps"))
        if theirs.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={theirs['hidden_act']!r} is not supported", "use silu")
        position = _rotary(theirs)

        def layer(index: int) -> LayerConfig:
            attention = AttentionConfig(
                width=width,
                heads=heads,
                kv_heads=theirs.get("num_key_value_heads") or heads,
                head_size=theirs.get("head_dim") or width // heads,
                position=position,
                mask=_mask(theirs, index),
                query_norm=norm if family in NORMED else NoNorm(),
                key_norm=norm if family in NORMED else NoNorm(),
                bias=_bias(theirs),
                dropout=float(theirs.get("attention_dropout", 0.0)),
            )
            # Only Llama's own class reads it.
            biased = family == "llama" and theirs.get("mlp_bias", False)
            feedforward = SwiGLU(width=width, hidden=theirs["intermediate_size"], bias=biased)
            return LayerConfig(
                attention=Branch(attention, PreNorm(norm)),
                feedforward=Branch(feedforward, PreNorm(norm)),
            )

        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width),
            stack=StackConfig(
                width=width,
                layers=tuple(layer(index) for index in range(theirs["num_hidden_layers"])),
                final_norm=norm,
            ),
            readout=causal_readout(
                theirs, LanguageHead(tied=bool(theirs.get("tie_word_embeddings", False)))
            ),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        first = config.stack.layers[0]
        norm, head = config.stack.final_norm, config.readout
        if first.attention is None or first.feedforward is None or not isinstance(norm, RMSNorm):
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        rope = describe_rope(attention.position)
        if rope is None or not isinstance(feedforward, SwiGLU):
            return None
        family = _family(config, attention)
        return {
            "model_type": family,
            "architectures": [CLASSES[family] + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "head_dim": attention.size,
            "intermediate_size": feedforward.hidden,
            "vocab_size": config.embedding.vocabulary,
            "rms_norm_eps": norm.eps,
            "rope_parameters": rope,
            "tie_word_embeddings": getattr(head, "tied", False),
            "attention_bias": attention.bias == "all",
            "mlp_bias": feedforward.bias,
            "attention_dropout": attention.dropout,
            "max_position_embeddings": longest_of(attention.position),
            "hidden_act": "silu",
            # Without them `transformers` uses 1 and 2, whatever these are in this vocabulary.
            "bos_token_id": None,
            "eos_token_id": None,
            **_describe_windows(config, family),
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        head = "lm_head" if isinstance(config.readout, LanguageHead) else "score"
        table = [
            Entry("embedding.tokens.weight", ("model.embed_tokens.weight",)),
            Entry("stack.final_norm.weight", ("model.norm.weight",)),
            Entry("readout.weight", (f"{head}.weight",)),
            Entry("readout.bias", (f"{head}.bias",)),
        ]
        for index, layer in enumerate(config.stack.layers):
            assert layer.feedforward is not None
            # The layers of a hybrid that have a mixer have no such tensors.
            rows = tuple(layer.attention.inner.rows().values()) if layer.attention else ()
            inside = (layer.feedforward.inner.hidden,) * 2
            theirs = f"model.layers.{index}"
            inputs: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
            halves: tuple[str, ...] = ("gate_proj", "up_proj")
            if self.joined:
                inputs, halves = ("qkv_proj",), ("gate_up_proj",)
            for mine, parts, sizes in (
                ("attention.project", tuple(f"self_attn.{each}" for each in inputs), rows),
                ("attention.output", ("self_attn.o_proj",), ()),
                ("attention.query_norm", ("self_attn.q_norm",), ()),
                ("attention.key_norm", ("self_attn.k_norm",), ()),
                ("feedforward.expand", tuple(f"mlp.{each}" for each in halves), inside),
                ("feedforward.contract", ("mlp.down_proj",), ()),
                *((mine, (theirs_norm,), ()) for mine, theirs_norm in self.norms.items()),
            ):
                for kind in ("weight", "bias"):
                    names = tuple(f"{theirs}.{part}.{kind}" for part in parts)
                    table.append(Entry(f"stack.layers.{index}.{mine}.{kind}", names, sizes))
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Files of the bare model lack the prefix; old ones hold the rotary frequencies."""
        if name.endswith(".rotary_emb.inv_freq"):
            return None
        return name if name.startswith(("model.", "lm_head.", "score.")) else f"model.{name}"


LLAMA = LlamaFamily()


def _bias(theirs: Mapping[str, Any]) -> Literal["none", "inputs", "all"]:
    if theirs["model_type"] == "qwen2":
        return "inputs"
    uses_it = theirs["model_type"] in ("llama", *NORMED)
    return "all" if uses_it and theirs.get("attention_bias", False) else "none"


def _mask(theirs: Mapping[str, Any], index: int) -> Mask:
    family, window = theirs["model_type"], theirs.get("sliding_window", WINDOW)
    if family in ("llama", "qwen3_next"):
        return Causal()
    if family == "mixtral":
        window = theirs.get("sliding_window")
    elif family.startswith("qwen") and not theirs.get("use_sliding_window", False):
        window = None
    slides = _slides(theirs, index, window) if family in ("qwen2", "qwen3") else True
    return Causal() if window is None or not slides else Window(window - 1)


def _slides(theirs: Mapping[str, Any], index: int, window: int | None) -> bool:
    """Whether a layer of Qwen2 or Qwen3 sees a window."""
    if theirs.get("layer_types") is None:
        return bool(index >= theirs.get("max_window_layers", 28))
    kinds = layer_kinds(theirs)
    if window is None and SLIDING in kinds:
        raise ConfigError(
            f"layer_types has {SLIDING}, and no window is in use", "set use_sliding_window to true"
        )
    return kinds[index] == SLIDING


def _rotary(theirs: Mapping[str, Any]) -> Rotary:
    family = theirs["model_type"]
    longest = theirs.get("max_position_embeddings", LENGTHS.get(family, LONGEST))
    rotary = read_rope(
        rope_of(theirs),
        theta=theirs.get("rope_theta", THETAS.get(family, 10_000.0)),
        fraction=theirs.get("partial_rotary_factor", 1.0),
        longest=longest,
    )
    # The other families rotate whole heads, whatever this says, and fail on it with a scaling.
    if family != "qwen3_next" and rotary.fraction != 1.0:
        if rotary.scaling != NoScaling():
            raise ConfigError(
                f"partial_rotary_factor={rotary.fraction!r} is not supported for a scaled {family}",
                "remove it",
            )
        return replace(rotary, fraction=1.0)
    return rotary


def _family(config: DecoderConfig, attention: AttentionConfig) -> str:
    if isinstance(attention.query_norm, RMSNorm):
        return "qwen3"
    if attention.bias == "inputs":
        return "qwen2"
    # `transformers` refuses a Llama whose heads do not divide the width, whatever their size. A
    # Mistral without a window computes the same and may have any number of heads.
    uneven = config.stack.width % attention.heads != 0
    return "mistral" if uneven or all(_windows(config)) else "llama"


def _windows(config: DecoderConfig) -> list[Window | None]:
    masks = [
        layer.attention.inner.mask if layer.attention else None for layer in config.stack.layers
    ]
    return [mask if isinstance(mask, Window) else None for mask in masks]


def _describe_windows(config: DecoderConfig, family: str) -> dict[str, Any]:
    windows = _windows(config)
    widths = [window.before + 1 for window in windows if window is not None]
    if family == "mistral":
        return {"sliding_window": widths[0] if widths else None}
    if family == "llama":
        return {}
    kinds = [FULL if window is None else SLIDING for window in windows]
    window = widths[0] if widths else None
    sliding = {"sliding_window": window, "use_sliding_window": bool(widths), "max_window_layers": 0}
    return {**sliding, "layer_types": kinds}
