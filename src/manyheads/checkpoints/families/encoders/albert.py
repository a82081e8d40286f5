"""ALBERT (arXiv 1909.11942): BERT with shared layers and token vectors narrower than the model."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import FLOAT, Key, Parts
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import EncoderFamily, Sources, embedding_of, layer_of
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import LanguageHead, Readout, ReadoutTransform
from manyheads.models.stack import StackConfig
from manyheads.parts import feedforward, norms

SHARING = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


class AlbertFamily(EncoderFamily):
    """ALBERT."""

    name = "albert"
    classes: Mapping[str, str] = {"albert": "Albert"}
    keys: Mapping[str, Key] = {
        **bert.KEYS,
        "embedding_size": Key("embedding.table_width", 128, computed="embedding.size"),
        "hidden_act": replace(bert.ACTIVATION, default="gelu_new"),
        "max_position_embeddings": Key("position.count", 512),
        "hidden_dropout_prob": Key("embedding.dropout", 0.0, FLOAT),
        "attention_probs_dropout_prob": Key("attention.dropout", 0.0, FLOAT),
    }

    prefix = "albert."
    embedding: Mapping[str, Sources] = {
        **bert.EMBEDDING,
        "embedding.project": "encoder.embedding_hidden_mapping_in",
    }
    layer: Mapping[str, Sources] = {
        "attention.project": tuple(f"attention.{part}" for part in ("query", "key", "value")),
        "attention.output": "attention.dense",
        "attention_residual.norm": "attention.LayerNorm",
        "feedforward.expand": "ffn",
        "feedforward.contract": "ffn_output",
        "feedforward_residual.norm": "full_layer_layer_norm",
    }
    heads: Mapping[type[Readout], Mapping[str, Sources]] = {
        **bert.masked_heads("albert.", "pooler"),
        LanguageHead: {
            "readout.transform.dense": "predictions.dense",
            "readout.transform.norm": "predictions.LayerNorm",
        },
    }
    words = "predictions"
    tied_copies = ("predictions.decoder.weight", "predictions.decoder.bias")
    unused = ("pooler.weight", "pooler.bias")
    # The order of sentences.
    unused_heads = ("sop_classifier.classifier.weight", "sop_classifier.classifier.bias")
    buffers = ("position_ids", "token_type_ids")

    def read_embedding(self, parts: Parts, norm: norms.LayerNorm) -> Embedding:
        return embedding_of(parts, norm=norm, projected=True)

    def read_stack(
        self, parts: Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> StackConfig:
        owners = _owners(*(config_json.get(key, 1) for key in SHARING))
        layer = layer_of(
            AttentionConfig(bias="all", **parts.attention),
            feedforward.MLP(**parts.feedforward),
            norms.PostNorm(norm),
            attention_dropout=parts.embedding["dropout"],
        )
        return StackConfig(width=parts.width, layers=(layer,) * len(owners), weights_of=owners)

    def transforms(
        self, parts: Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> Mapping[type[Readout], ReadoutTransform]:
        transforms, size = (
            super().transforms(parts, norm, config_json),
            parts.embedding["table_width"],
        )
        return {**transforms, LanguageHead: replace(transforms[LanguageHead], width=size)}

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        sharing = _sharing(config.stack)
        return None if sharing is None else dict(zip(SHARING, sharing, strict=True))

    def layer_places(self, config: Any) -> Iterator[tuple[str, str, LayerConfig]]:
        sharing = _sharing(config.stack)
        assert sharing is not None
        for number, index in enumerate(sorted(set(config.stack.owners))):
            group, place = divmod(number, sharing[2])
            source = f"encoder.albert_layer_groups.{group}.albert_layers.{place}"
            yield f"stack.layers.{index}", source, config.stack.layers[index]


ALBERT = AlbertFamily()


def _owners(layers: int, groups: int, inner: int) -> tuple[int, ...]:
    """For each depth the first one with its weights: groups follow one another, and each of their
    layers runs a group's `inner` layers."""
    if not 1 <= groups <= layers or inner < 1:
        raise ConfigError(
            f"num_hidden_groups must be in 1 to num_hidden_layers={layers}, and inner_group_num "
            f"at least 1, got {groups} and {inner}"
        )
    kinds = [
        (int(index / (layers / groups)), part) for index in range(layers) for part in range(inner)
    ]
    return tuple(kinds.index(kind) for kind in kinds)


def _sharing(stack: StackConfig) -> tuple[int, int, int] | None:
    """The numbers of layers, groups and layers in a group, if such numbers can say it."""
    depth, owners = len(stack.layers), len(set(stack.owners))
    for inner in range(1, owners + 1):
        if depth % inner == 0 and owners % inner == 0:
            sharing = depth // inner, owners // inner, inner
            if _owners(*sharing) == stack.owners:
                return sharing
    return None
