"""DeBERTa v2 and v3: encoders with disentangled attention."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.encoders.bert import ACTIVATIONS, language_entries
from manyheads.checkpoints.families.family import (
    Family,
    activation_of,
    class_count,
    default_labels,
    eps_of,
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
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm
from manyheads.parts.positions import Disentangled, Learned, NoPosition

HEADS: dict[type[Readout], str] = {
    NoReadout: "DebertaV2Model",
    LanguageHead: "DebertaV2ForMaskedLM",
    ClassHead: "DebertaV2ForSequenceClassification",
    TokenHead: "DebertaV2ForTokenClassification",
    SpanHead: "DebertaV2ForQuestionAnswering",
}
# The pooler of classifiers has any of these activations.
POOLERS: dict[str, Activation] = {**ACTIVATIONS, "tanh": "tanh"}
# Theirs for each choice of terms.
TERMS: dict[frozenset[str], Literal["both", "content_to_position", "position_to_content"]] = {
    frozenset({"c2p", "p2c"}): "both",
    frozenset({"c2p"}): "content_to_position",
    frozenset({"p2c"}): "position_to_content",
}
EMBEDDING = (
    ("embedding.tokens", "embeddings.word_embeddings"),
    ("embedding.positions", "embeddings.position_embeddings"),
    ("embedding.types", "embeddings.token_type_embeddings"),
    ("embedding.norm", "embeddings.LayerNorm"),
    # The first layer owns what all of them share.
    ("stack.layers.0.attention.table.norm", "encoder.LayerNorm"),
)
VECTORS = "stack.layers.0.attention.table.vectors"
# Ours below a layer and theirs below encoder.layer.N.
LAYER = (
    (
        "attention.project",
        ("attention.self.query_proj", "attention.self.key_proj", "attention.self.value_proj"),
    ),
    ("attention.distances.key", ("attention.self.pos_key_proj",)),
    ("attention.distances.query", ("attention.self.pos_query_proj",)),
    ("attention.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("attention.output.LayerNorm",)),
    ("feedforward.expand", ("intermediate.dense",)),
    ("feedforward.contract", ("output.dense",)),
    ("feedforward_residual.norm", ("output.LayerNorm",)),
)
# The language head of newer files, by the names of the older one, which computes the same.
NEWER_HEAD = {
    "cls.predictions.transform.dense.weight": "lm_predictions.lm_head.dense.weight",
    "cls.predictions.transform.dense.bias": "lm_predictions.lm_head.dense.bias",
    "cls.predictions.transform.LayerNorm.weight": "lm_predictions.lm_head.LayerNorm.weight",
    "cls.predictions.transform.LayerNorm.bias": "lm_predictions.lm_head.LayerNorm.bias",
    "cls.predictions.bias": "lm_predictions.lm_head.bias",
}
OLDER_HEAD = {new: old for old, new in NEWER_HEAD.items()}


@dataclass(frozen=True, slots=True)
class WrittenAs(Entry):
    """An entry that is written under another name than the one it is read by."""

    written: str = ""

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        return {self.written: ours}


class DebertaFamily(Family):
    """DeBERTa v2, whose class also opens v3."""

    name = "deberta-v2"
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        _refuse_foreign(theirs)
        width, dropout = theirs["hidden_size"], float(theirs.get("hidden_dropout_prob", 0.1))
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-7))
        heads, terms = theirs["num_attention_heads"], _terms(theirs)
        attention = AttentionConfig(
            width=width,
            heads=heads,
            position=_position(theirs, norm, dropout),
            bias="all",
            # The terms share the scale, whether they are used or not.
            scale=(width // heads * (1 + len(terms))) ** -0.5 if terms else "root",
            dropout=float(theirs.get("attention_probs_dropout_prob", 0.1)),
        )
        feedforward = MLP(
            width=width,
            hidden=theirs["intermediate_size"],
            activation=activation_of(theirs, "hidden_act", ACTIVATIONS),
        )
        layer = LayerConfig(
            attention=Branch(attention, PostNorm(norm), dropout),
            feedforward=Branch(feedforward, PostNorm(norm), dropout),
        )
        counts = theirs.get("position_biased_input", True)
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=_longest(theirs)) if counts else NoPosition(),
                types=theirs.get("type_vocab_size", 0),
                norm=norm,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=(layer,) * theirs["num_hidden_layers"]),
            readout=_readout(theirs, norm),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first, width = config.embedding, config.stack.layers[0], config.stack.width
        if first.attention is None or first.feedforward is None:
            return None
        attention, feedforward, head = (
            first.attention.inner,
            first.feedforward.inner,
            config.readout,
        )
        if not isinstance(attention.position, Disentangled) or type(head) not in HEADS:
            return None
        if not isinstance(embedding.norm, LayerNorm) or not isinstance(feedforward, MLP):
            return None
        activation, counted = feedforward.activation, embedding.position
        if activation not in ACTIVATIONS.values() or attention.size * attention.heads != width:
            return None
        position = _describe_position(attention.position)
        longest = (
            counted.count if isinstance(counted, Learned) else position["max_relative_positions"]
        )
        return {
            "model_type": "deberta-v2",
            "architectures": [HEADS[type(head)]],
            "hidden_size": width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "intermediate_size": feedforward.hidden,
            "hidden_act": _their_name(activation),
            "vocab_size": embedding.vocabulary,
            "type_vocab_size": embedding.types,
            "max_position_embeddings": longest,
            "position_biased_input": isinstance(counted, Learned),
            **position,
            "layer_norm_eps": embedding.norm.eps,
            "hidden_dropout_prob": embedding.dropout,
            "attention_probs_dropout_prob": attention.dropout,
            "initializer_range": config.init.std,
            **_describe_head(head),
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, prefix, kinds = set(ours), _prefix(config), ("weight", "bias")
        table = [Entry(VECTORS, ("encoder.rel_embeddings.weight",), prefix=prefix)]
        table += [
            Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
            for mine, theirs in EMBEDDING
            for kind in kinds
        ]
        for index, layer in enumerate(config.stack.layers):
            assert layer.attention is not None
            rows = tuple(layer.attention.inner.rows().values())
            for mine, parts in LAYER:
                for kind in kinds:
                    names = tuple(f"encoder.layer.{index}.{part}.{kind}" for part in parts)
                    name = f"stack.layers.{index}.{mine}.{kind}"
                    table.append(Entry(name, names, rows, prefix=prefix))
        return [entry for entry in (*table, *_head_entries(config.readout)) if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, and a head of either age; a task of pretraining has no place here."""
        if name.startswith("mask_predictions.") or name.endswith("position_ids"):
            return None
        return OLDER_HEAD.get(name, name.removeprefix("deberta."))

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Positions that are not added, and the language head beside another or none."""
        assert isinstance(config, EncoderConfig)
        added = isinstance(config.embedding.position, Learned)
        positions = "embeddings.position_embeddings.weight"
        unused = {} if added else {positions: _prefix(config) + positions}
        return unused | ({} if isinstance(config.readout, LanguageHead) else NEWER_HEAD)

    def rewritten(self, theirs: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:
        """A language head is written as the newer one, which an untied head cannot be."""
        head = config.readout
        newer = {"legacy": not head.tied} if isinstance(head, LanguageHead) else {}
        return {**theirs, **newer}


DEBERTA = DebertaFamily()


def _prefix(config: ModelConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else "deberta."


def _head_entries(head: Readout) -> list[Entry]:
    kinds = ("weight", "bias")
    match head:
        case LanguageHead():
            table = language_entries(head, "cls.predictions")
            table += [
                Entry(
                    f"readout.transform.{mine}.{kind}", (f"cls.predictions.transform.{it}.{kind}",)
                )
                for mine, it in (("dense", "dense"), ("norm", "LayerNorm"))
                for kind in kinds
            ]
            if not head.tied:
                return table
            return [
                WrittenAs(entry.ours, entry.theirs, written=NEWER_HEAD[entry.theirs[0]])
                for entry in table
            ]
        case SpanHead():
            return [Entry(f"readout.{kind}", (f"qa_outputs.{kind}",)) for kind in kinds]
        case ClassHead() | TokenHead():
            parts = (("readout.transform.dense", "pooler.dense"), ("readout", "classifier"))
            return [
                Entry(f"{mine}.{kind}", (f"{it}.{kind}",)) for mine, it in parts for kind in kinds
            ]
        case _:
            return []


def _longest(theirs: Mapping[str, Any]) -> int:
    return int(theirs.get("max_position_embeddings", 512))


def _terms(theirs: Mapping[str, Any]) -> frozenset[str]:
    given = theirs.get("pos_att_type") or []
    named = given.lower().split("|") if isinstance(given, str) else given
    terms = frozenset(str(each).strip() for each in named)
    unknown = sorted(terms - {"c2p", "p2c"})
    if unknown:
        raise ConfigError(
            f"pos_att_type has {', '.join(unknown)}, which is not supported", "use c2p and p2c"
        )
    return terms


def _position(
    theirs: Mapping[str, Any], norm: LayerNorm, dropout: float
) -> Disentangled | NoPosition:
    if not theirs.get("relative_attention", False):
        return NoPosition()
    terms = TERMS.get(_terms(theirs))
    if terms is None:
        raise ConfigError(
            "relative_attention=true without pos_att_type has no effect",
            "use c2p, p2c or both, or relative_attention=false",
        )
    reach, buckets = (
        int(theirs.get(key, -1)) for key in ("max_relative_positions", "position_buckets")
    )
    reach = reach if reach > 0 else _longest(theirs)
    normed = "layer_norm" in str(theirs.get("norm_rel_ebd", "none")).lower().split("|")
    return Disentangled(
        buckets=buckets if buckets > 0 else reach,
        reach=reach if buckets > 0 else "linear",
        terms=terms,
        projections="shared" if theirs.get("share_att_key", False) else "own",
        norm=norm if normed else NoNorm(),
        dropout=dropout,
    )


def _describe_position(position: Disentangled) -> dict[str, Any]:
    linear = position.reach == "linear"
    terms = next(each for each, ours in TERMS.items() if ours == position.terms)
    return {
        "relative_attention": True,
        "position_buckets": -1 if linear else position.buckets,
        "max_relative_positions": position.buckets if linear else position.reach,
        "pos_att_type": sorted(terms, reverse=True),
        "share_att_key": position.projections == "shared",
        "norm_rel_ebd": "none" if isinstance(position.norm, NoNorm) else "layer_norm",
    }


def _their_name(activation: Activation) -> str:
    return next(name for name, ours in POOLERS.items() if ours == activation)


def _describe_head(head: Readout) -> dict[str, Any]:
    tied = getattr(head, "tied", True)
    described: dict[str, Any] = {"tie_word_embeddings": tied, "legacy": not tied}
    if isinstance(head, ClassHead) and head.transform is not None:
        described["pooler_hidden_act"] = _their_name(head.transform.activation)
    return described


def _readout(theirs: Mapping[str, Any], norm: LayerNorm) -> Readout:
    name = (theirs.get("architectures") or ["DebertaV2Model"])[0]
    match name.removeprefix("DebertaV2"):
        case "Model":
            return NoReadout()
        case "ForMaskedLM":
            activation = activation_of(theirs, "hidden_act", ACTIVATIONS)
            # The newer head has no table of its own.
            tied = bool(theirs.get("tie_word_embeddings", True)) or not theirs.get("legacy", True)
            transform = ReadoutTransform(activation=activation, norm=norm)
            return LanguageHead(tied=tied, transform=transform, bias=True)
        case "ForSequenceClassification":
            activation = activation_of(theirs, "pooler_hidden_act", POOLERS)
            pooler = ReadoutTransform(activation=activation, norm=NoNorm())
            return ClassHead(classes=class_count(theirs), transform=pooler)
        case "ForTokenClassification":
            return TokenHead(classes=class_count(theirs))
        case "ForQuestionAnswering":
            return span_head(theirs)
    raise ConfigError(
        f"the head of {name} is not supported", f"use one of {', '.join(HEADS.values())}"
    )


def _refuse_foreign(theirs: Mapping[str, Any]) -> None:
    width = theirs["hidden_size"]
    if theirs.get("conv_kernel_size", 0) > 0:
        raise ConfigError(
            f"conv_kernel_size={theirs['conv_kernel_size']}, a convolution beside the first layer, "
            "is not supported",
            "use a model without one, such as DeBERTa v3",
        )
    sizes = {
        "embedding_size": width,
        "pooler_hidden_size": width,
        "attention_head_size": width // theirs["num_attention_heads"],
    }
    for key, size in sizes.items():
        if theirs.get(key, size) != size:
            raise ConfigError(f"{key}={theirs[key]!r:.200} is not supported", f"use {size}")
