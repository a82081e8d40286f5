"""MPNet: BERT's layers with T5's buckets, and positions counted as in RoBERTa."""

from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import Parts
from manyheads.checkpoints.families.encoders.bert import (
    EMBEDDING,
    KEYS,
    LAYER,
    RobertaFamily,
)
from manyheads.checkpoints.families.family import embedding_of
from manyheads.models.embedding import Embedding
from manyheads.parts.positions import Learned
from manyheads.parts.positions.relative import T5Buckets

# The code of `transformers` has these, whatever config.json says.
OFFSET, BUCKETS, REACH = 2, 32, 128


class MPNetFamily(RobertaFamily):
    """MPNet."""

    name = "mpnet"
    classes = {"mpnet": "MPNet"}
    keys = {name: key for name, key in KEYS.items() if name != "type_vocab_size"}
    only = {"relative_attention_num_buckets": BUCKETS}
    constants = {"pad_token_id": OFFSET - 1}

    prefix = "mpnet."
    other_prefixes = ()
    embedding = {
        **EMBEDDING,
        # The first layer owns what all of them share.
        "stack.layers.0.attention.table.table": "encoder.relative_attention_bias.weight",
    }
    layer = {
        **LAYER,
        "attention.project": tuple(f"attention.attn.{part}" for part in "qkv"),
        "attention.output": "attention.attn.o",
        "attention_residual.norm": "attention.LayerNorm",
    }
    unused_heads = ()

    def read_embedding(self, parts: Parts) -> Embedding:
        position = Learned(offset=OFFSET, **parts.position)
        return embedding_of(parts, norm=parts.norm, position=position)

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        buckets = T5Buckets(buckets=BUCKETS, reach=REACH)
        return AttentionConfig(position=buckets, bias="all", **parts.attention)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        position = getattr(parts.attention, "position", None)
        return {} if isinstance(position, T5Buckets) else None


MPNET = MPNetFamily()
