"""Bloom: ALiBi, a norm after the embedding, and queries, keys and values of a head side by side."""

from collections.abc import Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.decoders.gpt_neox import GPT_NEOX
from manyheads.checkpoints.tensor_map import MapEntry
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, TokenHead
from manyheads.parts.feedforward import MLP
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm
from manyheads.parts.positions import Alibi

# Other names that `transformers` reads, which the published files have.
ALIASES: Mapping[str, str] = {
    "n_embed": "hidden_size",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
}


class BloomFamily(family.DecoderFamily):
    """Bloom."""

    name = "bloom"
    classes = {"bloom": "Bloom"}
    keys = {
        "hidden_size": config_keys.WIDTH,
        "n_head": config_keys.HEADS,
        "n_layer": config_keys.DEPTH,
        "vocab_size": config_keys.VOCABULARY,
        "layer_norm_epsilon": config_keys.eps(1e-5),
        "attention_dropout": config_keys.dropout("attention"),
        "hidden_dropout": config_keys.dropout("residual"),
        "tie_word_embeddings": config_keys.TIED,
        "initializer_range": config_keys.STD,
    }
    only = {"apply_residual_connection_post_layernorm": False}
    constants = {"bos_token_id": None, "eos_token_id": None}
    norm = LayerNorm

    root = "transformer."
    embedding = {
        "embedding.tokens": "word_embeddings",
        "embedding.norm": "word_embeddings_layernorm",
        "stack.final_norm": "ln_f",
    }
    layers = "h"
    layer = {
        **GPT_NEOX.layer,
        "attention.project": "self_attention.query_key_value",
        "attention.output": "self_attention.dense",
    }
    heads = {
        LanguageHead: {"readout": "lm_head"},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "classifier"},
    }
    tied_copies = ("lm_head.weight",)

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        renamed = {new: config_json[old] for old, new in ALIASES.items() if old in config_json}
        return super().complete({**renamed, **config_json})

    def read_embedding(self, parts: Parts) -> Embedding:
        return family.embedding_of(parts, norm=parts.norm)

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        return AttentionConfig(position=Alibi(), mask=Causal(), bias="all", **parts.attention)

    def read_feedforward(self, parts: Parts, index: int) -> MLP:  # noqa: ARG002
        return MLP(width=parts.width, hidden=4 * parts.width, activation="gelu_tanh")

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        return GPT_NEOX.entry(name, sources, layer)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        return {} if isinstance(getattr(parts.attention, "position", None), Alibi) else None


BLOOM = BloomFamily()
