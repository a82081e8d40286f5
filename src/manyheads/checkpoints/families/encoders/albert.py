"""ALBERT (arXiv 1909.11942): BERT with shared layers and token vectors narrower than the model."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.config_keys import Key, Parts, activation, dropout
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import EncoderFamily, Transforms, embedding_of
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.stack import StackConfig

SHARING = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


class AlbertFamily(EncoderFamily):
    """ALBERT."""

    name = "albert"
    classes = {"albert": "Albert"}
    keys = {
        **bert.KEYS,
        "embedding_size": Key("embedding.table_width", 128, computed="embedding.size"),
        "hidden_act": activation("gelu_new"),
        "max_position_embeddings": Key("position.count", 512),
        "hidden_dropout_prob": dropout("embedding"),
        "attention_probs_dropout_prob": dropout("attention"),
    }

    dropouts = ("embedding", "")

    prefix = "albert."
    embedding = {**bert.EMBEDDING, "embedding.project": "encoder.embedding_hidden_mapping_in"}
    layer = {
        "attention.project": tuple(f"attention.{part}" for part in ("query", "key", "value")),
        "attention.output": "attention.dense",
        "attention_residual.norm": "attention.LayerNorm",
        "feedforward.expand": "ffn",
        "feedforward.contract": "ffn_output",
        "feedforward_residual.norm": "full_layer_layer_norm",
    }
    heads = {
        **bert.masked_heads("albert.", "pooler"),
        LanguageHead: bert.transform("predictions.dense", "predictions.LayerNorm"),
    }
    words = "predictions"
    tied_copies = ("predictions.decoder.weight", "predictions.decoder.bias")
    unused = ("pooler.weight", "pooler.bias")
    # The order of sentences.
    unused_heads = ("sop_classifier.classifier.weight", "sop_classifier.classifier.bias")
    buffers = ("position_ids", "token_type_ids")

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts, norm=parts.norm, projected=True)

    def read_stack(self, parts: Parts) -> StackConfig:
        owners = _owners(*(parts.json.get(key, 1) for key in SHARING))
        layers = (next(self.read_layers(parts)),) * len(owners)
        return StackConfig(width=parts.width, layers=layers, weights_of=owners)

    def transforms(self, parts: Parts) -> Transforms:
        transforms, size = super().transforms(parts), parts.embedding["table_width"]
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
