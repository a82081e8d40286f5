"""BERT and RoBERTa: encoders with a norm after each sublayer and learned positions."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.family import EncoderFamily, Sources
from manyheads.errors import ConfigError
from manyheads.models import readout
from manyheads.parts import feedforward, norms

POOLED = ("pooler.dense.weight", "pooler.dense.bias")
NEXT_SENTENCE = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
# Positions and types that are counted up.
BUFFERS = ("embeddings.position_ids", "embeddings.token_type_ids")
# Where several names mean one of our activations, we write the first.
ACTIVATIONS: dict[str, feedforward.Activation] = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
ACTIVATION = config_keys.Key("feedforward.activation", "gelu", config_keys.one_of(ACTIVATIONS))
KEYS: dict[str, config_keys.Key] = {
    "hidden_size": config_keys.WIDTH,
    "num_hidden_layers": config_keys.DEPTH,
    "num_attention_heads": config_keys.HEADS,
    "intermediate_size": config_keys.HIDDEN,
    "hidden_act": ACTIVATION,
    "vocab_size": config_keys.VOCABULARY,
    "max_position_embeddings": config_keys.POSITIONS,
    "type_vocab_size": config_keys.Key("embedding.types", 2),
    "layer_norm_eps": config_keys.Key("norm.eps", 1e-12, config_keys.EPS),
    "hidden_dropout_prob": config_keys.Key("embedding.dropout", 0.1, config_keys.FLOAT),
    "attention_probs_dropout_prob": config_keys.Key("attention.dropout", 0.1, config_keys.FLOAT),
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


def masked_heads(prefix: str, pooler: str) -> dict[type[readout.Readout], dict[str, Sources]]:
    """The heads of BERT, with this prefix and pooler."""
    return {
        readout.LanguageHead: {
            "readout.transform.dense": "cls.predictions.transform.dense",
            "readout.transform.norm": "cls.predictions.transform.LayerNorm",
        },
        readout.ClassHead: {"readout.transform.dense": prefix + pooler, "readout": "classifier"},
        readout.TokenHead: {"readout": "classifier"},
        readout.SpanHead: {"readout": "qa_outputs"},
    }


class BertFamily(EncoderFamily):
    """BERT."""

    name = "bert"
    classes: Mapping[str, str] = {"bert": "Bert"}
    keys: Mapping[str, config_keys.Key] = KEYS

    prefix = "bert."
    other_prefixes: tuple[str, ...] = ("roberta.",)
    embedding: Mapping[str, Sources] = EMBEDDING
    layers = "encoder.layer"
    layer: Mapping[str, Sources] = LAYER
    heads: Mapping[type[readout.Readout], Mapping[str, Sources]] = masked_heads(
        "bert.", "pooler.dense"
    )
    words = "cls.predictions"
    tied_copies: tuple[str, ...] = (
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
    )
    unused = POOLED
    unused_heads: tuple[str, ...] = NEXT_SENTENCE
    buffers: tuple[str, ...] = BUFFERS
    older: Mapping[str, str] = {
        "LayerNorm.gamma": "LayerNorm.weight",
        "LayerNorm.beta": "LayerNorm.bias",
    }

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        if config_json.get("is_decoder") or config_json.get("add_cross_attention"):
            raise ConfigError("is_decoder=true is not supported", "use a bidirectional encoder")
        positions = config_json.get("position_embedding_type", "absolute")
        if positions != "absolute":
            raise ConfigError(
                f"position_embedding_type={positions!r} is not supported", "use 'absolute'"
            )
        return config_json


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
    classes: Mapping[str, str] = {"roberta": "Roberta"}
    keys: Mapping[str, config_keys.Key] = {**KEYS, "pad_token_id": OFFSET}
    prefix = "roberta."
    other_prefixes: tuple[str, ...] = ("bert.",)
    heads: Mapping[type[readout.Readout], Mapping[str, Sources]] = {
        **BERT.heads,
        readout.LanguageHead: {
            "readout.transform.dense": "lm_head.dense",
            "readout.transform.norm": "lm_head.layer_norm",
        },
        readout.ClassHead: {
            "readout.transform.dense": "classifier.dense",
            "readout": "classifier.out_proj",
        },
    }
    words = "lm_head"
    tied_copies = ("lm_head.decoder.weight", "lm_head.decoder.bias")

    def transforms(
        self, parts: config_keys.Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> Mapping[type[readout.Readout], readout.ReadoutTransform]:
        """The language head is GELU whatever the layers are."""
        transforms = super().transforms(parts, norm, config_json)
        return {
            **transforms,
            readout.LanguageHead: replace(transforms[readout.LanguageHead], activation="gelu"),
        }

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:  # noqa: ARG002
        """Positions without an offset are those of BERT."""
        return {} if getattr(parts.position, "offset", 0) else None


ROBERTA = RobertaFamily()
