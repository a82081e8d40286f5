"""DistilBERT: BERT with half of the layers and without token types."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import (
    DEPTH,
    FLOAT,
    HEADS,
    HIDDEN,
    POSITIONS,
    STD,
    TIED,
    VOCABULARY,
    WIDTH,
    Key,
    Parts,
)
from manyheads.checkpoints.families.encoders.bert import ACTIVATION, EMBEDDING
from manyheads.checkpoints.families.family import EncoderFamily, Sources, layer_of
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    Readout,
    ReadoutTransform,
    SpanHead,
    TokenHead,
)
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm

PRE_CLASSIFIER = ReadoutTransform(activation="relu", norm=NoNorm())


class DistilBertFamily(EncoderFamily):
    """DistilBERT."""

    name = "distilbert"
    classes: Mapping[str, str] = {"distilbert": "DistilBert"}
    keys: Mapping[str, Key] = {
        "dim": WIDTH,
        "n_layers": DEPTH,
        "n_heads": HEADS,
        "hidden_dim": HIDDEN,
        "activation": ACTIVATION,
        "vocab_size": VOCABULARY,
        # A sinusoidal table is stored too.
        "max_position_embeddings": POSITIONS,
        "dropout": Key("embedding.dropout", 0.1, FLOAT),
        "attention_dropout": Key("attention.dropout", 0.1, FLOAT),
        "initializer_range": STD,
        "tie_word_embeddings": TIED,
    }

    prefix = "distilbert."
    embedding: Mapping[str, Sources] = EMBEDDING
    layers = "transformer.layer"
    layer: Mapping[str, Sources] = {
        "attention.project": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": "attention.out_lin",
        "attention_residual.norm": "sa_layer_norm",
        "feedforward.expand": "ffn.lin1",
        "feedforward.contract": "ffn.lin2",
        "feedforward_residual.norm": "output_layer_norm",
    }
    heads: Mapping[type[Readout], Mapping[str, Sources]] = {
        LanguageHead: {
            "readout.transform.dense": "vocab_transform",
            "readout.transform.norm": "vocab_layer_norm",
            "readout": "vocab_projector",
        },
        ClassHead: {"readout.transform.dense": "pre_classifier", "readout": "classifier"},
        TokenHead: {"readout": "classifier"},
        SpanHead: {"readout": "qa_outputs"},
    }
    tied_copies = ("vocab_projector.weight",)
    buffers = ("position_ids",)

    def read_norm(self, parts: Parts) -> LayerNorm:  # noqa: ARG002
        """The family has no key for it."""
        return LayerNorm(eps=1e-12)

    def read_layers(
        self,
        parts: Parts,
        norm: LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[LayerConfig]:
        layer = layer_of(
            AttentionConfig(bias="all", **parts.attention),
            MLP(**parts.feedforward),
            PostNorm(norm),
            parts.embedding["dropout"],
            attention_dropout=0.0,
        )
        return (layer,) * parts.depth

    def transforms(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> Mapping[type[Readout], ReadoutTransform]:
        return {**super().transforms(parts, norm, config_json), ClassHead: PRE_CLASSIFIER}


DISTILBERT = DistilBertFamily()
