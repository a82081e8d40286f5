"""FNet: BERT with a Fourier transform in place of attention."""

from manyheads.checkpoints.families.config_keys import Key, Parts, activation
from manyheads.checkpoints.families.encoders import bert
from manyheads.checkpoints.families.family import embedding_of
from manyheads.mixers.fourier import Fourier
from manyheads.models.embedding import Embedding

NO_ATTENTION = ("num_attention_heads", "attention_probs_dropout_prob")


class FNetFamily(bert.BertFamily):
    """FNet. A text gives the same as alone; in `transformers` padding changes it."""

    name = "fnet"
    classes = {"fnet": "FNet"}
    # The optimizations for TPUs, which have keys too, compute the same transform.
    keys = {
        **{name: key for name, key in bert.KEYS.items() if name not in NO_ATTENTION},
        "hidden_act": activation("gelu_new"),
        "type_vocab_size": Key("embedding.types", 4),
    }

    dropouts = ("", "embedding")

    prefix = "fnet."
    embedding = {**bert.EMBEDDING, "embedding.project": "embeddings.projection"}
    layer = {**bert.LAYER, "attention_residual.norm": "fourier.output.LayerNorm"}
    heads = bert.masked_heads("fnet.", "pooler.dense")
    buffers = ("position_ids", "token_type_ids", "dft_mat_hidden", "dft_mat_seq")

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts, norm=parts.norm, projected=True)

    def read_inner(self, parts: Parts, index: int) -> Fourier:  # noqa: ARG002
        return Fourier(width=parts.width)


FNET = FNetFamily()
