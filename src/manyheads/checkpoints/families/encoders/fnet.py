"""FNet: BERT with a Fourier transform in place of attention."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.encoders import bert
from manyheads.mixers.fourier import Fourier
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import Readout
from manyheads.parts import feedforward, norms

NO_ATTENTION = ("num_attention_heads", "attention_probs_dropout_prob")


class FNetFamily(family.EncoderFamily):
    """FNet. A text gives the same as alone; in `transformers` padding changes it."""

    name = "fnet"
    classes: Mapping[str, str] = {"fnet": "FNet"}
    # The optimizations for TPUs, which have keys too, compute the same transform.
    keys: Mapping[str, config_keys.Key] = {
        **{name: key for name, key in bert.KEYS.items() if name not in NO_ATTENTION},
        "hidden_act": replace(bert.ACTIVATION, default="gelu_new"),
        "type_vocab_size": config_keys.Key("embedding.types", 4),
    }

    prefix = "fnet."
    embedding: Mapping[str, family.Sources] = {
        **bert.EMBEDDING,
        "embedding.project": "embeddings.projection",
    }
    layers = "encoder.layer"
    layer: Mapping[str, family.Sources] = {
        **bert.LAYER,
        "attention_residual.norm": "fourier.output.LayerNorm",
    }
    heads: Mapping[type[Readout], Mapping[str, family.Sources]] = bert.masked_heads(
        "fnet.", "pooler.dense"
    )
    words = bert.BERT.words
    tied_copies = bert.BERT.tied_copies
    unused = bert.POOLED
    unused_heads = bert.NEXT_SENTENCE
    buffers = ("position_ids", "token_type_ids", "dft_mat_hidden", "dft_mat_seq")

    def read_embedding(self, parts: config_keys.Parts, norm: norms.LayerNorm) -> Embedding:
        return family.embedding_of(parts, norm=norm, projected=True)

    def read_layers(
        self,
        parts: config_keys.Parts,
        norm: norms.LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[LayerConfig]:
        dropout = parts.embedding["dropout"]
        layer = family.layer_of(
            Fourier(width=parts.width),
            feedforward.MLP(**parts.feedforward),
            norms.PostNorm(norm),
            dropout,
            attention_dropout=0.0,
        )
        return (layer,) * parts.depth


FNET = FNetFamily()
