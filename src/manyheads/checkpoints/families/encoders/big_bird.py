"""BigBird: BERT with block-sparse attention in long texts."""

from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Form, Key, Parts
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import Inner, Transforms, embedding_of
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.models.embedding import Embedding
from manyheads.models.readout import ClassHead, LanguageHead
from manyheads.parts.norms import NoNorm

FULL, SPARSE = "original_full", "block_sparse"
BIAS = config_keys.flag("all", "output")


class BigBirdFamily(bert.BertFamily):
    """BigBird. Every text has the attention of its own length.

    `transformers` makes a model fully attentive for good once it has read a short text.
    """

    name = "big_bird"
    classes = {"big_bird": "BigBird"}
    keys = {
        **bert.KEYS,
        "hidden_act": config_keys.activation("gelu_new"),
        "max_position_embeddings": Key("position.count", 4096),
        "num_attention_heads": Key("attention.heads", computed="residual.inner.heads"),
        "attention_probs_dropout_prob": Key(
            "attention.dropout", 0.1, config_keys.FLOAT, "residual.inner.dropout"
        ),
        "use_bias": Key("attention.bias", True, BIAS, "residual.inner.bias"),
        # The root of the width, or one.
        "rescale_embeddings": Key("embedding.scale", False, Form(write=lambda scale: scale != 1.0)),
    }

    # A classifier of sequences has the names of RoBERTa's, every other head those of BERT's.
    heads = {**bert.BERT.heads, ClassHead: bert.ROBERTA.heads[ClassHead]}
    # No head uses the pooler.
    unused = ("pooler.weight", "pooler.bias")

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        config_json = super().complete(config_json)
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

    def read_embedding(self, parts: Parts) -> Embedding:
        scale = parts.width**0.5 if parts.embedding["scale"] else 1.0
        return embedding_of(parts, norm=parts.norm, scale=scale)

    def read_inner(self, parts: Parts, index: int) -> Inner:
        if parts.json.get("attention_type", SPARSE) == FULL:
            return AttentionConfig(**parts.attention)
        return BigBird(
            block=parts.json.get("block_size", 64),
            random_blocks=parts.json.get("num_random_blocks", 3),
            seed=index,
            draw="training",
            max_length=parts.position["count"],
            **parts.attention,
        )

    def transforms(self, parts: Parts) -> Transforms:
        transforms = super().transforms(parts)
        return {**transforms, ClassHead: replace(transforms[LanguageHead], norm=NoNorm())}

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        mixer = parts.mixer
        if not isinstance(mixer, BigBird):
            return {"attention_type": FULL}
        blocks = {"block_size": mixer.block, "num_random_blocks": mixer.random_blocks}
        return {"attention_type": SPARSE, **blocks}


BIG_BIRD = BigBirdFamily()
