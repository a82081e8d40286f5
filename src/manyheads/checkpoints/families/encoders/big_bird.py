"""BigBird: BERT with block-sparse attention in long texts."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.encoders.bert import (
    ACTIVATIONS,
    EMBEDDING,
    HEADS,
    NEXT_SENTENCE,
    READOUT,
    WORDS,
    language_entries,
    readout_of,
)
from manyheads.checkpoints.families.family import Family, activation_of, default_labels, eps_of
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.big_bird import BigBird
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, ReadoutTransform
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, NoNorm, PostNorm
from manyheads.parts.positions import Learned

FULL, SPARSE = "original_full", "block_sparse"
# Ours below a layer and theirs below encoder.layer.N; a mixer stands where full attention would.
LAYER = (
    ("{}.project", tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    ("{}.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("attention.output.LayerNorm",)),
    ("feedforward.expand", ("intermediate.dense",)),
    ("feedforward.contract", ("output.dense",)),
    ("feedforward_residual.norm", ("output.LayerNorm",)),
)
POOLED = ("pooler.weight", "pooler.bias")
# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "attention_type": SPARSE,
    "block_size": 64,
    "num_random_blocks": 3,
    "use_bias": True,
    "rescale_embeddings": False,
    "hidden_act": "gelu_new",
    "max_position_embeddings": 4096,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


class BigBirdFamily(Family):
    """BigBird. Every text has the attention of its own length.

    `transformers` makes a model fully attentive for good once it has read a short text.
    """

    name = "big_bird"
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        _refuse_foreign(theirs)
        width, dropout = theirs["hidden_size"], float(theirs["hidden_dropout_prob"])
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps"))
        activation = activation_of(theirs, "hidden_act", ACTIVATIONS)
        readout = readout_of(
            theirs,
            "BigBird",
            ReadoutTransform(activation=activation, norm=norm),
            ReadoutTransform(activation=activation, norm=NoNorm()),
        )
        feedforward = MLP(width=width, hidden=theirs["intermediate_size"], activation=activation)
        after: Branch[FeedForwardConfig] = Branch(feedforward, PostNorm(norm), dropout)
        attentions = [_attention(theirs, index) for index in range(theirs["num_hidden_layers"])]
        layers = tuple(
            LayerConfig(attention=Branch(each, PostNorm(norm), dropout), feedforward=after)
            if isinstance(each, AttentionConfig)
            else LayerConfig(
                attention=None, mixer=Branch(each, PostNorm(norm), dropout), feedforward=after
            )
            for each in attentions
        )
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=theirs["max_position_embeddings"]),
                types=theirs["type_vocab_size"],
                norm=norm,
                scale=width**0.5 if theirs["rescale_embeddings"] else 1.0,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=layers),
            readout=readout,
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first = config.embedding, config.stack.layers[0]
        if not isinstance(embedding.position, Learned) or not isinstance(embedding.norm, LayerNorm):
            return None
        branch = first.attention or first.mixer
        if branch is None or first.feedforward is None or not embedding.types:
            return None
        attention, feedforward = branch.inner, first.feedforward.inner
        activation = getattr(feedforward, "activation", None)
        if activation not in ACTIVATIONS.values():
            return None
        if not isinstance(attention, AttentionConfig | BigBird):
            return None
        sparse = isinstance(attention, BigBird)
        return {
            "model_type": "big_bird",
            "architectures": ["BigBird" + HEADS[type(config.readout)]],
            "attention_type": SPARSE if sparse else FULL,
            **(
                {"block_size": attention.block, "num_random_blocks": attention.random_blocks}
                if isinstance(attention, BigBird)
                else {}
            ),
            "use_bias": attention.bias == "all",
            "rescale_embeddings": embedding.scale != 1.0,
            "hidden_size": config.stack.width,
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
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, prefix, width = set(ours), _prefix(config), config.stack.width
        # A classifier of sequences has the names of RoBERTa's, every other head those of BERT's.
        readout = type(config.readout)
        head = READOUT.get(("roberta" if readout is ClassHead else "bert", readout), ())
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in EMBEDDING
            ]
            for index, layer in enumerate(config.stack.layers):
                place = "attention" if layer.mixer is None else "mixer"
                for mine, parts in LAYER:
                    names = tuple(f"encoder.layer.{index}.{part}.{kind}" for part in parts)
                    name = f"stack.layers.{index}.{mine.format(place)}.{kind}"
                    table.append(Entry(name, names, (width,) * len(parts), prefix=prefix))
            table += [
                Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",)) for mine, theirs in head
            ]
        if isinstance(config.readout, LanguageHead):
            table += language_entries(config.readout, WORDS["bert"])
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack."""
        if name.endswith(("embeddings.position_ids", "embeddings.token_type_ids")):
            return None
        return name.removeprefix("bert.")

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """No head uses the pooler."""
        assert isinstance(config, EncoderConfig)
        return {name: _prefix(config) + name for name in POOLED} | {
            name: name for name in NEXT_SENTENCE
        }


BIG_BIRD = BigBirdFamily()


def _attention(theirs: Mapping[str, Any], index: int) -> AttentionConfig | BigBird:
    width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
    dropout = float(theirs["attention_probs_dropout_prob"])
    bias: Literal["all", "output"] = "all" if theirs["use_bias"] else "output"
    if theirs["attention_type"] == FULL:
        return AttentionConfig(width=width, heads=heads, bias=bias, dropout=dropout)
    return BigBird(
        width=width,
        heads=heads,
        block=theirs["block_size"],
        random_blocks=theirs["num_random_blocks"],
        seed=index,
        draw="training",
        max_length=theirs["max_position_embeddings"],
        bias=bias,
        dropout=dropout,
    )


def _refuse_foreign(theirs: Mapping[str, Any]) -> None:
    if theirs.get("is_decoder") or theirs.get("add_cross_attention"):
        raise ConfigError("is_decoder=true is not supported", "use a bidirectional encoder")
    if "BigBirdForQuestionAnswering" in (theirs.get("architectures") or ()):
        raise ConfigError(
            "the head of BigBirdForQuestionAnswering is not supported, it has a feed-forward",
            "use BigBirdModel, BigBirdForMaskedLM or a classifier",
        )
    if theirs["attention_type"] not in (FULL, SPARSE):
        raise ConfigError(
            f"attention_type={theirs['attention_type']!r:.50} is not supported",
            f"use {FULL} or {SPARSE}",
        )


def _prefix(config: EncoderConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else "bert."
