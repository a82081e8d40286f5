"""BERT and RoBERTa: encoders with a norm after each sublayer and learned positions."""

from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.families.family import EncoderFamily, Sources, Transforms
from manyheads.errors import ConfigError
from manyheads.models import readout

POOLED = ("pooler.dense.weight", "pooler.dense.bias")
NEXT_SENTENCE = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
# Positions and types that are counted up.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
KEYS: dict[str, config_keys.Key] = {
    **config_keys.SIZES,
    "hidden_act": config_keys.activation("gelu"),
    "max_position_embeddings": config_keys.POSITIONS,
    "type_vocab_size": config_keys.Key("embedding.types", 2),
    "layer_norm_eps": config_keys.eps(1e-12),
    "hidden_dropout_prob": config_keys.dropout("embedding", 0.1),
    "attention_probs_dropout_prob": config_keys.dropout("attention", 0.1),
    "tie_word_embeddings": config_keys.TIED,
    "initializer_range": config_keys.UNWRITTEN_STD,
}
EMBEDDING: dict[str, Sources] = {
    "embedding.tokens": "embeddings.word_embeddings",
    "embedding.positions": "embeddings.position_embeddings",
    "embedding.types": "embeddings.token_type_embeddings",
    "embedding.norm": "embeddings.LayerNorm",
}
PROJECTIONS = tuple(f"attention.self.{part}" for part in ("query", "key", "value"))
# The layers of BERT, and of those that have a mixer in place of its attention.
LAYER: dict[str, Sources] = {
    "attention.project": PROJECTIONS,
    "attention.output": "attention.output.dense",
    "mixer.project": PROJECTIONS,
    "mixer.output": "attention.output.dense",
    "attention_residual.norm": "attention.output.LayerNorm",
    "feedforward.expand": "intermediate.dense",
    "feedforward.contract": "output.dense",
    "feedforward_residual.norm": "output.LayerNorm",
}


def transform(dense: str, norm: str) -> dict[str, Sources]:
    """Where the transform before a language head is."""
    return {"readout.transform.dense": dense, "readout.transform.norm": norm}


def masked_heads(prefix: str, pooler: str) -> dict[type[readout.Readout], dict[str, Sources]]:
    """The heads of BERT, with this prefix and pooler."""
    words = "cls.predictions.transform"
    return {
        readout.LanguageHead: transform(f"{words}.dense", f"{words}.LayerNorm"),
        readout.ClassHead: {"readout.transform.dense": prefix + pooler, "readout": "classifier"},
        readout.TokenHead: {"readout": "classifier"},
        readout.SpanHead: {"readout": "qa_outputs"},
    }


class BertFamily(EncoderFamily):
    """BERT."""

    name = "bert"
    classes = {"bert": "Bert"}
    keys = KEYS

    prefix = "bert."
    other_prefixes: tuple[str, ...] = ("roberta.",)
    embedding = EMBEDDING
    layers = "encoder.layer"
    layer = LAYER
    heads = masked_heads("bert.", "pooler.dense")
    words = "cls.predictions"
    tied_copies: tuple[str, ...] = (
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    )
    unused: tuple[str, ...] = POOLED
    unused_heads: tuple[str, ...] = NEXT_SENTENCE
    buffers: tuple[str, ...] = BUFFERS
    older = {"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"}

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        if config_json.get("is_decoder") or config_json.get("add_cross_attention"):
            raise ConfigError("is_decoder=true is not supported", "use a bidirectional encoder")
        positions = config_json.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise ConfigError(
                f"position_embedding_type={positions!r} is not supported", "use 'absolute'"
            )
        return super().complete(config_json)


BERT = BertFamily()


def _read_offset(key: str, padding: Any) -> int:
    if type(padding) is not int:
        raise ConfigError(
            f"{key}={padding!r:.50} hides where positions begin", "give the number of the pad token"
        )
    return padding + 1


# Positions are counted from the padding token on.
OFFSET = config_keys.Key(
    "position.offset", 1, config_keys.Form(_read_offset, lambda offset: offset - 1)
)


class RobertaFamily(BertFamily):
    """RoBERTa."""

    name = "roberta"
    classes = {"roberta": "Roberta"}
    keys = {**KEYS, "pad_token_id": OFFSET}
    prefix = "roberta."
    other_prefixes: tuple[str, ...] = ("bert.",)
    heads = {
        **BERT.heads,
        readout.LanguageHead: transform("lm_head.dense", "lm_head.layer_norm"),
        readout.ClassHead: {
            "readout.transform.dense": "classifier.dense",
            "readout": "classifier.out_proj",
        },
    }
    words = "lm_head"
    tied_copies = ("lm_head.decoder.weight", "lm_head.decoder.bias")

    def transforms(self, parts: Parts) -> Transforms:
        """The language head is GELU whatever the layers are."""
        transforms = super().transforms(parts)
        words = replace(transforms[readout.LanguageHead], activation="gelu")
        return {**transforms, readout.LanguageHead: words}

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        """Positions without an offset are those of BERT."""
        return {} if getattr(parts.position, "offset", 0) else None


ROBERTA = RobertaFamily()
