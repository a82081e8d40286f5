"""ALBERT (arXiv 1909.11942): BERT with shared layers and token vectors narrower than the model."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.encoders.bert import (
    ACTIVATIONS,
    EMBEDDING,
    HEADS,
    POOLER,
    language_entries,
    readout_of,
)
from manyheads.checkpoints.families.family import Family, activation_of, default_labels, eps_of
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
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Learned

# Ours below a layer and theirs below encoder.albert_layer_groups.N.albert_layers.M.
LAYER = (
    ("attention.project", tuple(f"attention.{part}" for part in ("query", "key", "value"))),
    ("attention.output", ("attention.dense",)),
    ("attention_residual.norm", ("attention.LayerNorm",)),
    ("feedforward.expand", ("ffn",)),
    ("feedforward.contract", ("ffn_output",)),
    ("feedforward_residual.norm", ("full_layer_layer_norm",)),
)
# Ours below readout and theirs.
READOUT: dict[type[Readout], tuple[tuple[str, str], ...]] = {
    LanguageHead: (
        (".transform.dense", "predictions.dense"),
        (".transform.norm", "predictions.LayerNorm"),
    ),
    ClassHead: (("", "classifier"),),
    TokenHead: (("", "classifier"),),
    SpanHead: (("", "qa_outputs"),),
}
SENTENCE_ORDER = ("sop_classifier.classifier.weight", "sop_classifier.classifier.bias")
# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "embedding_size": 128,
    "num_hidden_groups": 1,
    "inner_group_num": 1,
    "hidden_act": "gelu_new",
    "type_vocab_size": 2,
    "max_position_embeddings": 512,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
    "initializer_range": 0.02,
}


class AlbertFamily(Family):
    """ALBERT."""

    name = "albert"
    tied_copies = ("predictions.decoder.weight", "predictions.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        width, dropout = theirs["hidden_size"], float(theirs["hidden_dropout_prob"])
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps"))
        activation = activation_of(theirs, "hidden_act", ACTIVATIONS)
        attention = AttentionConfig(
            width=width,
            heads=theirs["num_attention_heads"],
            bias="all",
            dropout=float(theirs["attention_probs_dropout_prob"]),
        )
        feedforward = MLP(width=width, hidden=theirs["intermediate_size"], activation=activation)
        layer = LayerConfig(
            attention=Branch(attention, PostNorm(norm), dropout),
            feedforward=Branch(feedforward, PostNorm(norm)),
        )
        owners = _owners(*(theirs[key] for key in SHARING))
        size = theirs["embedding_size"]
        words = ReadoutTransform(activation=activation, norm=norm, width=size)
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=theirs["max_position_embeddings"]),
                types=theirs["type_vocab_size"],
                norm=norm,
                projected=True,
                table_width=size,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=(layer,) * len(owners), weights_of=owners),
            readout=readout_of(theirs, "Albert", words, POOLER),
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first = config.embedding, config.stack.layers[0]
        if not isinstance(embedding.position, Learned) or not isinstance(embedding.norm, LayerNorm):
            return None
        if first.attention is None or first.feedforward is None or not embedding.projected:
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        activation, sharing = getattr(feedforward, "activation", None), _sharing(config.stack)
        if activation not in ACTIVATIONS.values() or sharing is None:
            return None
        return {
            "model_type": "albert",
            "architectures": ["Albert" + HEADS[type(config.readout)]],
            "hidden_size": config.stack.width,
            "embedding_size": embedding.size,
            **dict(zip(SHARING, sharing, strict=True)),
            "num_attention_heads": attention.heads,
            "intermediate_size": feedforward.hidden,
            "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
            "vocab_size": embedding.vocabulary,
            "max_position_embeddings": embedding.position.count,
            "type_vocab_size": embedding.types,
            "layer_norm_eps": embedding.norm.eps,
            "hidden_dropout_prob": embedding.dropout,
            "attention_probs_dropout_prob": attention.dropout,
            "tie_word_embeddings": getattr(config.readout, "tied", True),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, prefix = set(ours), _prefix(config)
        sharing = _sharing(config.stack)
        assert sharing is not None
        body: list[tuple[str, tuple[str, ...], tuple[int, ...]]] = [
            *((mine, (theirs,), ()) for mine, theirs in EMBEDDING),
            ("embedding.project", ("encoder.embedding_hidden_mapping_in",), ()),
        ]
        if isinstance(config.readout, ClassHead):
            body.append(("readout.transform.dense", ("pooler",), ()))
        inner, made = sharing[2], sorted(set(config.stack.owners))
        for number, index in enumerate(made):
            attention = config.stack.attention(index)
            assert attention is not None
            group = f"encoder.albert_layer_groups.{number // inner}"
            below = f"{group}.albert_layers.{number % inner}"
            rows = tuple(attention.rows().values())
            for mine, parts in LAYER:
                names = tuple(f"{below}.{part}" for part in parts)
                body.append((f"stack.layers.{index}.{mine}", names, rows))
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            for mine, parts, rows in body:
                names = tuple(f"{part}.{kind}" for part in parts)
                table.append(Entry(f"{mine}.{kind}", names, rows, prefix=prefix))
            table += [
                Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",))
                for mine, theirs in READOUT.get(type(config.readout), ())
            ]
        if isinstance(config.readout, LanguageHead):
            table += language_entries(config.readout, "predictions")
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack."""
        if name.endswith(("position_ids", "token_type_ids")):
            return None
        return name.removeprefix("albert.")

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Only a classifier of sequences uses the pooler, nothing the order of sentences."""
        assert isinstance(config, EncoderConfig)
        pooler = () if isinstance(config.readout, ClassHead) else ("pooler.weight", "pooler.bias")
        return {name: _prefix(config) + name for name in pooler} | {
            name: name for name in SENTENCE_ORDER
        }


ALBERT = AlbertFamily()

SHARING = ("num_hidden_layers", "num_hidden_groups", "inner_group_num")


def _owners(layers: int, groups: int, inner: int) -> tuple[int, ...]:
    """For each depth the first one with its weights: groups follow one another, and each of their
    layers runs a group's `inner` layers."""
    if not 1 <= groups <= layers or inner < 1:
        raise ConfigError(
            f"num_hidden_groups must be in 1 to num_hidden_layers={layers}, and inner_group_num "
            f"at least 1, got {groups} and {inner}"
        )
    kinds = [
        (int(index / (layers / groups)), part) for index in range(layers) for part in range(inner)
    ]
    return tuple(kinds.index(kind) for kind in kinds)


def _sharing(stack: StackConfig) -> tuple[int, int, int] | None:
    """Their numbers of layers, groups and layers in a group, if they can say it."""
    depth, made = len(stack.layers), len(set(stack.owners))
    for inner in range(1, made + 1):
        if depth % inner == 0 and made % inner == 0:
            found = depth // inner, made // inner, inner
            if _owners(*found) == stack.owners:
                return found
    return None


def _prefix(config: EncoderConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else "albert."
