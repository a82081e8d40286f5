"""BigBird: BERT with block-sparse attention in long texts."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import FLOAT, Form, Key, Parts, flag
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import EncoderFamily, Sources, embedding_of, layer_of
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, Readout, ReadoutTransform
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm

FULL, SPARSE = "original_full", "block_sparse"


class BigBirdFamily(EncoderFamily):
    """BigBird. Every text has the attention of its own length.

    `transformers` makes a model fully attentive for good once it has read a short text.
    """

    name = "big_bird"
    classes: Mapping[str, str] = {"big_bird": "BigBird"}
    keys: Mapping[str, Key] = {
        **bert.KEYS,
        "hidden_act": replace(bert.ACTIVATION, default="gelu_new"),
        "max_position_embeddings": Key("position.count", 4096),
        "num_attention_heads": Key("attention.heads", computed="residual.inner.heads"),
        "attention_probs_dropout_prob": Key(
            "attention.dropout", 0.1, FLOAT, "residual.inner.dropout"
        ),
        "use_bias": Key("attention.bias", True, flag("all", "output"), "residual.inner.bias"),
        # The root of the width, or one.
        "rescale_embeddings": Key("embedding.scale", False, Form(write=lambda scale: scale != 1.0)),
    }

    prefix = "bert."
    embedding: Mapping[str, Sources] = bert.EMBEDDING
    layers = "encoder.layer"
    layer: Mapping[str, Sources] = bert.LAYER
    # A classifier of sequences has the names of RoBERTa's, every other head those of BERT's.
    heads: Mapping[type[Readout], Mapping[str, Sources]] = {
        **bert.BERT.heads,
        ClassHead: bert.ROBERTA.heads[ClassHead],
    }
    words = bert.BERT.words
    tied_copies = bert.BERT.tied_copies
    # No head uses the pooler.
    unused = ("pooler.weight", "pooler.bias")
    unused_heads = bert.NEXT_SENTENCE
    buffers = bert.BUFFERS

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        if config_json.get("is_decoder") or config_json.get("add_cross_attention"):
            raise ConfigError("is_decoder=true is not supported", "use a bidirectional encoder")
        if "BigBirdForQuestionAnswering" in (config_json.get("architectures") or ()):
            raise ConfigError(
                "the head of BigBirdForQuestionAnswering is not supported, it has a feed-forward",
                "use BigBirdModel, BigBirdForMaskedLM or a classifier",
            )
        kind = config_json.get("attention_type", SPARSE)
        if kind not in (FULL, SPARSE):
            raise ConfigError(
                f"attention_type={kind!r:.50} is not supported", f"use {FULL} or {SPARSE}"
            )
        return config_json

    def read_embedding(self, parts: Parts, norm: LayerNorm) -> Embedding:
        scale = parts.width**0.5 if parts.embedding["scale"] else 1.0
        return embedding_of(parts, norm=norm, scale=scale)

    def read_layers(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> Iterator[LayerConfig]:
        dropout, feedforward = parts.embedding["dropout"], MLP(**parts.feedforward)
        for index in range(parts.depth):
            inner: AttentionConfig | BigBird
            if config_json.get("attention_type", SPARSE) == FULL:
                inner = AttentionConfig(**parts.attention)
            else:
                inner = BigBird(
                    block=config_json.get("block_size", 64),
                    random_blocks=config_json.get("num_random_blocks", 3),
                    seed=index,
                    draw="training",
                    max_length=parts.position["count"],
                    **parts.attention,
                )
            yield layer_of(inner, feedforward, PostNorm(norm), dropout)

    def transforms(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> Mapping[type[Readout], ReadoutTransform]:
        transforms = super().transforms(parts, norm, config_json)
        return {**transforms, ClassHead: replace(transforms[LanguageHead], norm=NoNorm())}

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        mixer = parts.mixer
        if not isinstance(mixer, BigBird):
            return {"attention_type": FULL}
        blocks = {"block_size": mixer.block, "num_random_blocks": mixer.random_blocks}
        return {"attention_type": SPARSE, **blocks}


BIG_BIRD = BigBirdFamily()
