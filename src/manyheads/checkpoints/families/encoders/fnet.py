"""FNet: BERT with a Fourier transform in place of attention."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.config_keys import Key, Parts
from manyheads.checkpoints.families.encoders.bert import (
    ACTIVATION,
    BERT,
    EMBEDDING,
    KEYS,
    LAYER,
    NEXT_SENTENCE,
    POOLED,
    masked_heads,
)
from manyheads.checkpoints.families.family import EncoderFamily, Sources, embedding_of, layer_of
from manyheads.mixers.fourier import Fourier
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import Readout
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, PostNorm

NO_ATTENTION = ("num_attention_heads", "attention_probs_dropout_prob")


class FNetFamily(EncoderFamily):
    """FNet. A text gives the same as alone; in `transformers` padding changes it."""

    name = "fnet"
    classes: Mapping[str, str] = {"fnet": "FNet"}
    # The optimizations for TPUs, which have keys too, compute the same transform.
    keys: Mapping[str, Key] = {
        **{name: key for name, key in KEYS.items() if name not in NO_ATTENTION},
        "hidden_act": replace(ACTIVATION, default="gelu_new"),
        "type_vocab_size": Key("embedding.types", 4),
    }

    prefix = "fnet."
    embedding: Mapping[str, Sources] = {
        **EMBEDDING,
        "embedding.project": "embeddings.projection",
    }
    layers = "encoder.layer"
    layer: Mapping[str, Sources] = {
        **LAYER,
        "attention_residual.norm": "fourier.output.LayerNorm",
    }
    heads: Mapping[type[Readout], Mapping[str, Sources]] = masked_heads("fnet.", "pooler.dense")
    words = BERT.words
    tied_copies = BERT.tied_copies
    unused = POOLED
    unused_heads = NEXT_SENTENCE
    buffers = ("position_ids", "token_type_ids", "dft_mat_hidden", "dft_mat_seq")

    def read_embedding(self, parts: Parts, norm: LayerNorm) -> Embedding:
        return embedding_of(parts, norm=norm, projected=True)

    def read_layers(
        self,
        parts: Parts,
        norm: LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[LayerConfig]:
        dropout = parts.embedding["dropout"]
        layer = layer_of(
            Fourier(width=parts.width),
            MLP(**parts.feedforward),
            PostNorm(norm),
            dropout,
            attention_dropout=0.0,
        )
        return (layer,) * parts.depth


FNET = FNetFamily()
