"""OLMo hybrid: gated delta nets in most layers, the attention of OLMo 3 in the others."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LlamaFamily
from manyheads.checkpoints.families.decoders.qwen_hybrid import (
    FULL,
    LINEAR,
    describe_delta,
    layer_kinds,
    read_delta,
)
from manyheads.checkpoints.families.decoders.rope import (
    describe_rope,
    longest_of,
    read_rope,
    rope_of,
)
from manyheads.checkpoints.families.family import CAUSAL_HEADS, Family, causal_readout, eps_of
from manyheads.checkpoints.tensor_map import Depthwise, Either, Entry
from manyheads.errors import ConfigError
from manyheads.mixers.recurrent.gated_delta import GatedDelta
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import SwiGLU
from manyheads.parts.masks import Causal
from manyheads.parts.norms import OutputNorm, PreNorm, RMSNorm
from manyheads.parts.positions import NoPosition, Rotary

# What `transformers` assumes where config.json does not say it.
LENGTH, THETA, EVERY = 65536, 10_000.0, 4
# The eps of the delta nets' own norm, whatever rms_norm_eps says.
DELTA_EPS = 1e-5
DELTA_NAMES = {
    "dt_bias": "dt_bias",
    "A_log": "A_log",
    "norm_weight": "o_norm.weight",
    "output.weight": "o_proj.weight",
}


class NormsOfBothKinds(LlamaFamily):
    """The names of Llama, but layers with attention norm what it writes, others what they read."""

    norms: Mapping[str, str] = {
        "attention_residual.norm": "attention_layer_norm",
        "feedforward_residual.norm": "feedforward_layer_norm",
        "attention_residual.second_norm": "feedforward_layer_norm",
        "feedforward_residual.second_norm": "post_feedforward_layernorm",
    }


PLAIN = NormsOfBothKinds()


class OlmoHybridFamily(Family):
    """OLMo hybrid."""

    name = "olmo_hybrid"
    tied_copies = PLAIN.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = _with_defaults(theirs)
        width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
        norm = RMSNorm(eps=eps_of(theirs, "rms_norm_eps", 1e-6))
        if theirs.get("hidden_act", "silu") != "silu":
            raise ConfigError(f"hidden_act={theirs['hidden_act']!r} is not supported", "use silu")
        feedforward = SwiGLU(width=width, hidden=theirs["intermediate_size"])
        attention = AttentionConfig(
            width=width,
            heads=heads,
            kv_heads=theirs.get("num_key_value_heads") or heads,
            head_size=theirs.get("head_dim") or width // heads,
            position=_position(theirs),
            mask=Causal(),
            query_norm=norm,
            key_norm=norm,
            norm_span="heads",
            bias="all" if theirs.get("attention_bias", False) else "none",
            dropout=float(theirs.get("attention_dropout", 0.0)),
        )
        turned = bool(theirs.get("linear_allow_neg_eigval", True))
        delta = read_delta(theirs, eps=DELTA_EPS, negative_eigenvalues=turned)
        layers = {
            FULL: LayerConfig(
                attention=Branch(attention, OutputNorm(norm)),
                feedforward=Branch(feedforward, OutputNorm(norm)),
            ),
            LINEAR: LayerConfig(
                attention=None,
                mixer=Branch(delta, PreNorm(norm)),
                feedforward=Branch(feedforward, PreNorm(norm)),
            ),
        }
        kinds = layer_kinds(theirs)
        if len(set(kinds)) < len(layers):
            raise ConfigError(
                f"all layers are {kinds[0]}", f"use both {FULL} and {LINEAR} in layer_types"
            )
        tied = bool(theirs.get("tie_word_embeddings", False))
        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width),
            stack=StackConfig(
                width=width, layers=tuple(layers[kind] for kind in kinds), final_norm=norm
            ),
            readout=causal_readout(theirs, LanguageHead(tied=tied)),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig):
            return None
        layers, norm, head = config.stack.layers, config.stack.final_norm, config.readout
        attentions = [layer.attention.inner for layer in layers if layer.attention is not None]
        deltas = [layer.mixer.inner for layer in layers if layer.mixer is not None]
        if not attentions or not deltas or not isinstance(norm, RMSNorm):
            return None
        attention, delta, feedforward = attentions[0], deltas[0], layers[0].feedforward
        rope = describe_rope(attention.position)
        if isinstance(attention.position, NoPosition):
            rope = {"rope_type": "default", "rope_theta": None}
        if rope is None or not isinstance(delta, GatedDelta):
            return None
        if feedforward is None or not isinstance(head, LanguageHead | NoReadout):
            return None
        described = {
            "model_type": "olmo_hybrid",
            "architectures": ["OlmoHybrid" + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "intermediate_size": feedforward.inner.hidden,
            "vocab_size": config.embedding.vocabulary,
            "rms_norm_eps": norm.eps,
            "rope_parameters": rope,
            "tie_word_embeddings": getattr(head, "tied", False),
            "attention_bias": attention.bias == "all",
            "attention_dropout": attention.dropout,
            "max_position_embeddings": longest_of(attention.position, LENGTH),
            "hidden_act": "silu",
            "initializer_range": config.init.std,
            "linear_allow_neg_eigval": delta.negative_eigenvalues,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **describe_delta(config),
        }
        if attention.size * attention.heads != config.stack.width:
            described["head_dim"] = attention.size
        return described

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Either]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table: list[Entry | Either] = [*PLAIN.tensor_map(config, have)]
        for index, layer in enumerate(config.stack.layers):
            if layer.mixer is not None and isinstance(layer.mixer.inner, GatedDelta):
                below = f"stack.layers.{index}.mixer", f"model.layers.{index}.linear_attn"
                table += _delta_entries(layer.mixer.inner, *below)
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """In memory `transformers` has other names for the norms than in files."""
        name = name.replace(".input_layernorm.", ".attention_layer_norm.")
        name = name.replace(".post_attention_layernorm.", ".feedforward_layer_norm.")
        return PLAIN.canonical_name(name)


OLMO_HYBRID = OlmoHybridFamily()


def _with_defaults(theirs: Mapping[str, Any]) -> dict[str, Any]:
    """With all that `transformers` derives where config.json does not say it."""
    given = {key: each for key, each in theirs.items() if each is not None}
    heads, count = given["num_attention_heads"], given["num_hidden_layers"]
    keys = given.get("linear_num_key_heads", heads)
    key_size = given.get("linear_key_head_dim", int(0.75 * given["hidden_size"] / keys))
    kinds = [FULL if index % EVERY == EVERY - 1 else LINEAR for index in range(count)]
    kinds[-1:] = kinds[-1:] if FULL in kinds else [FULL]
    assumed = {
        "layer_types": kinds,
        "full_attention_interval": EVERY,
        "linear_num_key_heads": keys,
        "linear_num_value_heads": heads,
        "linear_key_head_dim": key_size,
        "linear_value_head_dim": 2 * key_size,
        "linear_conv_kernel_dim": 4,
    }
    return {**assumed, **given}


def _position(theirs: Mapping[str, Any]) -> Rotary | NoPosition:
    """Released models say that they have no rotation by a theta that is null."""
    rope = rope_of(theirs)
    if "rope_theta" in rope and rope["rope_theta"] is None:
        return NoPosition()
    longest = theirs.get("max_position_embeddings", LENGTH)
    return read_rope(rope, theta=theirs.get("rope_theta", THETA), longest=longest)


def _delta_entries(mixer: GatedDelta, ours: str, theirs: str) -> Iterator[Entry | Either]:
    rows = mixer.rows()
    for mine, parts in (
        ("project", {"q": "query", "k": "key", "v": "value", "g": "gate"}),
        ("rates", {"b": "beta", "a": "dt"}),
    ):
        names = tuple(f"{theirs}.{part}_proj.weight" for part in parts)
        yield Entry(f"{ours}.{mine}.weight", names, tuple(rows[each] for each in parts.values()))
    names = tuple(f"{theirs}.{part}_conv1d.weight" for part in "qkv")
    sizes = rows["query"], rows["key"], rows["value"]
    # `transformers` reads any sizes, and writes three that are as equal as can be.
    third = -(-sum(sizes) // 3)
    thirds = third, third, sum(sizes) - 2 * third
    name = f"{ours}.convolution.weight"
    yield Either(Depthwise(name, names, sizes), Depthwise(name, names, thirds))
    for mine, other in DELTA_NAMES.items():
        yield Entry(f"{ours}.{mine}", (f"{theirs}.{other}",))
