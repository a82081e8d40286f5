"""DistilBERT: BERT with half of the layers and without token types."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.encoders.bert import ACTIVATIONS
from manyheads.checkpoints.families.family import (
    Family,
    activation_of,
    class_count,
    default_labels,
    span_head,
)
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import (
    ClassHead,
    LanguageHead,
    NoReadout,
    Readout,
    ReadoutTransform,
    SpanHead,
    TokenHead,
)
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm
from manyheads.parts.positions import Learned

# The family has no key for it.
NORM = LayerNorm(eps=1e-12)
PRE_CLASSIFIER = ReadoutTransform(activation="relu", norm=NoNorm())
HEADS: dict[type[Readout], str] = {
    NoReadout: "DistilBertModel",
    LanguageHead: "DistilBertForMaskedLM",
    ClassHead: "DistilBertForSequenceClassification",
    TokenHead: "DistilBertForTokenClassification",
    SpanHead: "DistilBertForQuestionAnswering",
}
EMBEDDING = (
    ("embedding.tokens", "embeddings.word_embeddings"),
    ("embedding.positions", "embeddings.position_embeddings"),
    ("embedding.norm", "embeddings.LayerNorm"),
)
# Ours below a layer and theirs below transformer.layer.N.
LAYER = (
    ("attention.project", ("attention.q_lin", "attention.k_lin", "attention.v_lin")),
    ("attention.output", ("attention.out_lin",)),
    ("attention_residual.norm", ("sa_layer_norm",)),
    ("feedforward.expand", ("ffn.lin1",)),
    ("feedforward.contract", ("ffn.lin2",)),
    ("feedforward_residual.norm", ("output_layer_norm",)),
)
# Ours below readout and theirs.
READOUT: dict[type[Readout], tuple[tuple[str, str], ...]] = {
    NoReadout: (),
    LanguageHead: (
        (".transform.dense", "vocab_transform"),
        (".transform.norm", "vocab_layer_norm"),
        ("", "vocab_projector"),
    ),
    ClassHead: ((".transform.dense", "pre_classifier"), ("", "classifier")),
    TokenHead: (("", "classifier"),),
    SpanHead: (("", "qa_outputs"),),
}


class DistilBertFamily(Family):
    """DistilBERT."""

    name = "distilbert"
    tied_copies = ("vocab_projector.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, dropout = theirs["dim"], float(theirs.get("dropout", 0.1))
        attention = AttentionConfig(
            width=width,
            heads=theirs["n_heads"],
            bias="all",
            dropout=float(theirs.get("attention_dropout", 0.1)),
        )
        feedforward = MLP(
            width=width,
            hidden=theirs["hidden_dim"],
            activation=activation_of(theirs, "activation", ACTIVATIONS),
        )
        layer = LayerConfig(
            attention=Branch(attention, PostNorm(NORM)),
            feedforward=Branch(feedforward, PostNorm(NORM), dropout),
        )
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                # A sinusoidal table is stored too.
                position=Learned(count=theirs["max_position_embeddings"]),
                norm=NORM,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=(layer,) * theirs["n_layers"]),
            readout=_readout(theirs),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first, width = config.embedding, config.stack.layers[0], config.stack.width
        if not isinstance(embedding.position, Learned) or type(config.readout) not in HEADS:
            return None
        if first.attention is None or first.feedforward is None or embedding.types:
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        activation = getattr(feedforward, "activation", None)
        if activation not in ACTIVATIONS.values() or attention.size * attention.heads != width:
            return None
        return {
            "model_type": "distilbert",
            "architectures": [HEADS[type(config.readout)]],
            "dim": width,
            "n_layers": len(config.stack.layers),
            "n_heads": attention.heads,
            "hidden_dim": feedforward.hidden,
            "activation": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
            "vocab_size": embedding.vocabulary,
            "max_position_embeddings": embedding.position.count,
            "dropout": embedding.dropout,
            "attention_dropout": attention.dropout,
            "initializer_range": config.init.std,
            "tie_word_embeddings": getattr(config.readout, "tied", True),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have = set(ours)
        prefix = "" if isinstance(config.readout, NoReadout) else "distilbert."
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in EMBEDDING
            ]
            table += [
                Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",))
                for mine, theirs in READOUT[type(config.readout)]
            ]
            for index, layer in enumerate(config.stack.layers):
                assert layer.attention is not None
                rows = tuple(layer.attention.inner.rows().values())
                for mine, parts in LAYER:
                    names = tuple(f"transformer.layer.{index}.{part}.{kind}" for part in parts)
                    name = f"stack.layers.{index}.{mine}.{kind}"
                    table.append(Entry(name, names, rows, prefix=prefix))
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack; positions counted up are not weights."""
        return None if name.endswith("position_ids") else name.removeprefix("distilbert.")


DISTILBERT = DistilBertFamily()


def _readout(theirs: Mapping[str, Any]) -> Readout:
    name = (theirs.get("architectures") or ["DistilBertModel"])[0]
    match name.removeprefix("DistilBert"):
        case "Model":
            return NoReadout()
        case "ForMaskedLM":
            activation = activation_of(theirs, "activation", ACTIVATIONS)
            transform = ReadoutTransform(activation=activation, norm=NORM)
            tied = bool(theirs.get("tie_word_embeddings", True))
            return LanguageHead(tied=tied, transform=transform, bias=True)
        case "ForSequenceClassification":
            return ClassHead(classes=class_count(theirs), transform=PRE_CLASSIFIER)
        case "ForTokenClassification":
            return TokenHead(classes=class_count(theirs))
        case "ForQuestionAnswering":
            return span_head(theirs)
    raise ConfigError(
        f"the head of {name} is not supported", f"use one of {', '.join(HEADS.values())}"
    )
