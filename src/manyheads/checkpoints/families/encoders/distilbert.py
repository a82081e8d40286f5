"""DistilBERT: BERT with half of the layers and without token types."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.encoders.bert import ACTIVATION, EMBEDDING
from manyheads.models import readout
from manyheads.models.layer import LayerConfig
from manyheads.parts import feedforward, norms

PRE_CLASSIFIER = readout.ReadoutTransform(activation="relu", norm=norms.NoNorm())


class DistilBertFamily(family.EncoderFamily):
    """DistilBERT."""

    name = "distilbert"
    classes: Mapping[str, str] = {"distilbert": "DistilBert"}
    keys: Mapping[str, config_keys.Key] = {
        "dim": config_keys.WIDTH,
        "n_layers": config_keys.DEPTH,
        "n_heads": config_keys.HEADS,
        "hidden_dim": config_keys.HIDDEN,
        "activation": ACTIVATION,
        "vocab_size": config_keys.VOCABULARY,
        # A sinusoidal table is stored too.
        "max_position_embeddings": config_keys.POSITIONS,
        "dropout": config_keys.Key("embedding.dropout", 0.1, config_keys.FLOAT),
        "attention_dropout": config_keys.Key("attention.dropout", 0.1, config_keys.FLOAT),
        "initializer_range": config_keys.STD,
        "tie_word_embeddings": config_keys.TIED,
    }

    prefix = "distilbert."
    embedding: Mapping[str, family.Sources] = EMBEDDING
    layers = "transformer.layer"
    layer: Mapping[str, family.Sources] = {
        "attention.project": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": "attention.out_lin",
        "attention_residual.norm": "sa_layer_norm",
        "feedforward.expand": "ffn.lin1",
        "feedforward.contract": "ffn.lin2",
        "feedforward_residual.norm": "output_layer_norm",
    }
    heads: Mapping[type[readout.Readout], Mapping[str, family.Sources]] = {
        readout.LanguageHead: {
            "readout.transform.dense": "vocab_transform",
            "readout.transform.norm": "vocab_layer_norm",
            "readout": "vocab_projector",
        },
        readout.ClassHead: {"readout.transform.dense": "pre_classifier", "readout": "classifier"},
        readout.TokenHead: {"readout": "classifier"},
        readout.SpanHead: {"readout": "qa_outputs"},
    }
    tied_copies = ("vocab_projector.weight",)
    buffers = ("position_ids",)

    def read_norm(self, parts: config_keys.Parts) -> norms.LayerNorm:  # noqa: ARG002
        """The family has no key for it."""
        return norms.LayerNorm(eps=1e-12)

    def read_layers(
        self,
        parts: config_keys.Parts,
        norm: norms.LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[LayerConfig]:
        layer = family.layer_of(
            AttentionConfig(bias="all", **parts.attention),
            feedforward.MLP(**parts.feedforward),
            norms.PostNorm(norm),
            parts.embedding["dropout"],
            attention_dropout=0.0,
        )
        return (layer,) * parts.depth

    def transforms(
        self, parts: config_keys.Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> Mapping[type[readout.Readout], readout.ReadoutTransform]:
        return {**super().transforms(parts, norm, config_json), readout.ClassHead: PRE_CLASSIFIER}


DISTILBERT = DistilBertFamily()
