"""BERT and RoBERTa: encoders with a norm after each sublayer and learned positions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from manyheads.attention import AttentionConfig
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
from manyheads.parts.positions import Learned

POOLED = ("pooler.dense.weight", "pooler.dense.bias")
NEXT_SENTENCE = ("cls.seq_relationship.weight", "cls.seq_relationship.bias")
# Where several names mean one of our activations, we write the first.
ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "relu": "relu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "silu": "silu",
}
POOLER = ReadoutTransform(activation="tanh", norm=NoNorm())
CLASSES = {"bert": "Bert", "roberta": "Roberta"}
HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForMaskedLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
    SpanHead: "ForQuestionAnswering",
}
# Ours below a layer and theirs below encoder.layer.N.
LAYER = (
    ("attention.project", tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    ("attention.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("attention.output.LayerNorm",)),
    ("feedforward.expand", ("intermediate.dense",)),
    ("feedforward.contract", ("output.dense",)),
    ("feedforward_residual.norm", ("output.LayerNorm",)),
)
EMBEDDING = (
    ("embedding.tokens", "embeddings.word_embeddings"),
    ("embedding.positions", "embeddings.position_embeddings"),
    ("embedding.types", "embeddings.token_type_embeddings"),
    ("embedding.norm", "embeddings.LayerNorm"),
)
# Ours below readout and theirs.
READOUT: dict[tuple[str, type[Readout]], tuple[tuple[str, str], ...]] = {
    ("bert", LanguageHead): (
        (".transform.dense", "cls.predictions.transform.dense"),
        (".transform.norm", "cls.predictions.transform.LayerNorm"),
    ),
    ("bert", ClassHead): (("", "classifier"),),
    ("bert", TokenHead): (("", "classifier"),),
    ("bert", SpanHead): (("", "qa_outputs"),),
    ("roberta", LanguageHead): (
        (".transform.dense", "lm_head.dense"),
        (".transform.norm", "lm_head.layer_norm"),
    ),
    ("roberta", ClassHead): (
        (".transform.dense", "classifier.dense"),
        ("", "classifier.out_proj"),
    ),
    ("roberta", TokenHead): (("", "classifier"),),
    ("roberta", SpanHead): (("", "qa_outputs"),),
}
WORDS = {"bert": "cls.predictions", "roberta": "lm_head"}


@dataclass(frozen=True, slots=True)
class Repeated(Entry):
    """One tensor stored under several names; `transformers` computes with the first."""

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        return parts[0].clone()

    def part(self, ours: Tensor) -> dict[str, Tensor]:
        return {name: ours.clone() for name in self.theirs}

    def shapes(self, ours: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
        return dict.fromkeys(self.theirs, ours)


class BertFamily(Family):
    """BERT and RoBERTa."""

    name = "bert"
    tied_copies = (
        "cls.predictions.decoder.weight",
        "cls.predictions.decoder.bias",
        "lm_head.decoder.weight",
        "lm_head.decoder.bias",
    )

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        _refuse_foreign(theirs)
        width, dropout = theirs["hidden_size"], float(theirs.get("hidden_dropout_prob", 0.1))
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-12))
        attention = AttentionConfig(
            width=width,
            heads=theirs["num_attention_heads"],
            bias="all",
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
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=theirs["max_position_embeddings"], offset=_offset(theirs)),
                types=theirs.get("type_vocab_size", 2),
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
        if not isinstance(embedding.position, Learned) or not isinstance(embedding.norm, LayerNorm):
            return None
        if first.attention is None or first.feedforward is None or not embedding.types:
            return None
        attention, feedforward = first.attention.inner, first.feedforward.inner
        activation = getattr(feedforward, "activation", None)
        if activation not in ACTIVATIONS.values() or attention.size * attention.heads != width:
            return None
        family = _family(config)
        padding = {"pad_token_id": embedding.position.offset - 1} if family == "roberta" else {}
        return {
            "model_type": family,
            "architectures": [CLASSES[family] + HEADS[type(config.readout)]],
            "hidden_size": width,
            "num_hidden_layers": len(config.stack.layers),
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
            **padding,
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, family, prefix = set(ours), _family(config), _prefix(config)
        kinds, readout = ("weight", "bias"), type(config.readout)
        table = [
            Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
            for mine, theirs in _body(config)
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
        head = [
            Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",))
            for mine, theirs in READOUT.get((family, readout), ())
            for kind in kinds
        ]
        if isinstance(config.readout, LanguageHead):
            head += language_entries(config.readout, WORDS[family])
        return [entry for entry in (*table, *head) if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which some files lack; gamma and beta by their newer names."""
        if name.endswith(("embeddings.position_ids", "embeddings.token_type_ids")):
            return None
        for old, new in (
            ("LayerNorm.gamma", "LayerNorm.weight"),
            ("LayerNorm.beta", "LayerNorm.bias"),
        ):
            name = name.removesuffix(old) + new if name.endswith(old) else name
        return name.removeprefix("bert.").removeprefix("roberta.")

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """BERT classifies sequences with the pooler; nothing here uses the next-sentence head."""
        assert isinstance(config, EncoderConfig)
        pooler = () if _pools(config) else POOLED
        return {name: _prefix(config) + name for name in pooler} | {
            name: name for name in NEXT_SENTENCE
        }


BERT = BertFamily()


def _body(config: EncoderConfig) -> list[tuple[str, str]]:
    """Ours and theirs outside the layers, where theirs have the prefix, as BERT's pooler does."""
    pooler = [("readout.transform.dense", "pooler.dense")] if _pools(config) else []
    return [*EMBEDDING, *pooler]


def _pools(config: EncoderConfig) -> bool:
    return isinstance(config.readout, ClassHead) and _family(config) == "bert"


def _prefix(config: EncoderConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else f"{_family(config)}."


def language_entries(head: LanguageHead, theirs: str) -> list[Entry]:
    """The bias of a language head below `theirs`, and its weight if it is not tied."""
    if head.tied:
        return [Entry("readout.bias", (f"{theirs}.bias",))]
    # An untied head has a second bias that is stored and never read.
    return [
        Entry("readout.weight", (f"{theirs}.decoder.weight",)),
        Repeated("readout.bias", (f"{theirs}.decoder.bias", f"{theirs}.bias")),
    ]


def _family(config: EncoderConfig) -> str:
    """RoBERTa's positions have an offset."""
    position = config.embedding.position
    return "roberta" if isinstance(position, Learned) and position.offset else "bert"


def _offset(theirs: Mapping[str, Any]) -> int:
    return int(theirs.get("pad_token_id", 1)) + 1 if theirs["model_type"] == "roberta" else 0


def _readout(theirs: Mapping[str, Any], norm: LayerNorm) -> Readout:
    # RoBERTa's head is GELU whatever its layers are.
    roberta = theirs["model_type"] == "roberta"
    activation = "gelu" if roberta else activation_of(theirs, "hidden_act", ACTIVATIONS)
    words = ReadoutTransform(activation=activation, norm=norm)
    return readout_of(theirs, CLASSES[theirs["model_type"]], words, POOLER)


def readout_of(
    theirs: Mapping[str, Any], classes: str, words: ReadoutTransform, pooler: ReadoutTransform
) -> Readout:
    """The readout that `architectures` names; the names of all heads begin with `classes`."""
    name = (theirs.get("architectures") or [f"{classes}Model"])[0]
    match name.removeprefix(classes):
        case "Model":
            return NoReadout()
        # The next-sentence head of pretraining has no counterpart here.
        case "ForMaskedLM" | "ForPreTraining":
            tied = bool(theirs.get("tie_word_embeddings", True))
            return LanguageHead(tied=tied, transform=words, bias=True)
        case "ForSequenceClassification":
            return ClassHead(classes=class_count(theirs), transform=pooler)
        case "ForTokenClassification":
            return TokenHead(classes=class_count(theirs))
        case "ForQuestionAnswering":
            return span_head(theirs)
    known = ", ".join(classes + head for head in HEADS.values())
    raise ConfigError(f"the head of {name} is not supported", f"use one of {known}")


def _refuse_foreign(theirs: Mapping[str, Any]) -> None:
    if theirs.get("is_decoder") or theirs.get("add_cross_attention"):
        raise ConfigError("is_decoder=true is not supported", "use a bidirectional encoder")
    positions = theirs.get("position_embedding_type", "absolute")
    if positions != "absolute":
        raise ConfigError(
            f"position_embedding_type={positions!r} is not supported", "use 'absolute'"
        )
    padding = theirs.get("pad_token_id", 1)
    if theirs["model_type"] == "roberta" and type(padding) is not int:
        raise ConfigError(
            f"pad_token_id={padding!r:.50} hides where positions begin",
            "give the number of the pad token",
        )
