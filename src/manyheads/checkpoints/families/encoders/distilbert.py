"""DistilBERT: BERT with half of the layers and without token types."""

from functools import partial

from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import EncoderFamily, Transforms
from manyheads.models import readout
from manyheads.parts import norms

PRE_CLASSIFIER = readout.ReadoutTransform(activation="relu", norm=norms.NoNorm())


class DistilBertFamily(EncoderFamily):
    """DistilBERT."""

    name = "distilbert"
    classes = {"distilbert": "DistilBert"}
    keys = {
        "dim": config_keys.WIDTH,
        "n_layers": config_keys.DEPTH,
        "n_heads": config_keys.HEADS,
        "hidden_dim": config_keys.HIDDEN,
        "activation": config_keys.activation("gelu"),
        "vocab_size": config_keys.VOCABULARY,
        # A sinusoidal table is stored too.
        "max_position_embeddings": config_keys.POSITIONS,
        "dropout": config_keys.dropout("embedding", 0.1),
        "attention_dropout": config_keys.dropout("attention", 0.1),
        "initializer_range": config_keys.STD,
        "tie_word_embeddings": config_keys.TIED,
    }

    # The family has no key for its eps.
    norm = partial(norms.LayerNorm, eps=1e-12)
    dropouts = ("", "embedding")

    prefix = "distilbert."
    embedding = bert.EMBEDDING
    layers = "transformer.layer"
    layer = {
        "attention.project": ("attention.q_lin", "attention.k_lin", "attention.v_lin"),
        "attention.output": "attention.out_lin",
        "attention_residual.norm": "sa_layer_norm",
        "feedforward.expand": "ffn.lin1",
        "feedforward.contract": "ffn.lin2",
        "feedforward_residual.norm": "output_layer_norm",
    }
    heads = {
        readout.LanguageHead: {
            **bert.transform("vocab_transform", "vocab_layer_norm"),
            "readout": "vocab_projector",
        },
        readout.ClassHead: {"readout.transform.dense": "pre_classifier", "readout": "classifier"},
        readout.TokenHead: {"readout": "classifier"},
        readout.SpanHead: {"readout": "qa_outputs"},
    }
    tied_copies = ("vocab_projector.weight",)
    buffers = ("position_ids",)

    def transforms(self, parts: config_keys.Parts) -> Transforms:
        return {**super().transforms(parts), readout.ClassHead: PRE_CLASSIFIER}


DISTILBERT = DistilBertFamily()
