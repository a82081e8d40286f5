"""Longformer: RoBERTa whose attention is a window, with global tokens."""

from collections.abc import Iterable, Mapping
from typing import Any, Literal

from manyheads.checkpoints.families.encoders.bert import (
    ACTIVATIONS,
    EMBEDDING,
    HEADS,
    POOLED,
    POOLER,
    READOUT,
    WORDS,
    language_entries,
    readout_of,
)
from manyheads.checkpoints.families.family import Family, activation_of, default_labels, eps_of
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.mixers.sparse.longformer import Longformer
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
)
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Learned

# Ours below a layer and theirs below encoder.layer.N.
LAYER = (
    ("mixer.project", tuple(f"attention.self.{part}" for part in ("query", "key", "value"))),
    ("mixer.project_global_query", ("attention.self.query_global",)),
    ("mixer.project_global", ("attention.self.key_global", "attention.self.value_global")),
    ("mixer.output", ("attention.output.dense",)),
    ("attention_residual.norm", ("attention.output.LayerNorm",)),
    ("feedforward.expand", ("intermediate.dense",)),
    ("feedforward.contract", ("output.dense",)),
    ("feedforward_residual.norm", ("output.LayerNorm",)),
)
# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "attention_window": 512,
    "hidden_act": "gelu",
    "pad_token_id": 1,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


class LongformerFamily(Family):
    """Longformer, with the global tokens that `transformers` chooses if it is not told others.

    That is the first token for a classifier of sequences, the question for answers, else none.
    """

    name = "longformer"
    tied_copies = ("lm_head.decoder.weight", "lm_head.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        width, dropout = theirs["hidden_size"], float(theirs["hidden_dropout_prob"])
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps"))
        readout = readout_of(theirs, "Longformer", ReadoutTransform(norm=norm), POOLER)
        feedforward = MLP(
            width=width,
            hidden=theirs["intermediate_size"],
            activation=activation_of(theirs, "hidden_act", ACTIVATIONS),
        )

        def layer(window: int) -> LayerConfig:
            mixer = Longformer(
                width=width,
                heads=theirs["num_attention_heads"],
                window=window // 2,
                global_positions=_global_positions(readout),
                dropout=float(theirs["attention_probs_dropout_prob"]),
            )
            return LayerConfig(
                attention=None,
                mixer=Branch(mixer, PostNorm(norm), dropout),
                feedforward=Branch(feedforward, PostNorm(norm), dropout),
            )

        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=theirs["max_position_embeddings"], offset=_offset(theirs)),
                types=theirs["type_vocab_size"],
                norm=norm,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=tuple(layer(each) for each in _windows(theirs))),
            readout=readout,
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first = config.embedding, config.stack.layers[0]
        if not isinstance(embedding.position, Learned) or not isinstance(embedding.norm, LayerNorm):
            return None
        inner = [None if each.mixer is None else each.mixer.inner for each in config.stack.layers]
        mixers = [each for each in inner if isinstance(each, Longformer)]
        if len(mixers) < len(inner) or first.feedforward is None or not embedding.types:
            return None
        feedforward = first.feedforward.inner
        activation = getattr(feedforward, "activation", None)
        if activation not in ACTIVATIONS.values():
            return None
        return {
            "model_type": "longformer",
            "architectures": ["Longformer" + HEADS[type(config.readout)]],
            "attention_window": [2 * mixer.window for mixer in mixers],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(mixers),
            "num_attention_heads": mixers[0].heads,
            "intermediate_size": feedforward.hidden,
            "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
            "vocab_size": embedding.vocabulary,
            "max_position_embeddings": embedding.position.count,
            "pad_token_id": embedding.position.offset - 1,
            "type_vocab_size": embedding.types,
            "layer_norm_eps": embedding.norm.eps,
            "hidden_dropout_prob": embedding.dropout,
            "attention_probs_dropout_prob": mixers[0].dropout,
            "tie_word_embeddings": getattr(config.readout, "tied", True),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, prefix, width = set(ours), _prefix(config), config.stack.width
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in EMBEDDING
            ]
            for index in range(len(config.stack.layers)):
                for mine, parts in LAYER:
                    names = tuple(f"encoder.layer.{index}.{part}.{kind}" for part in parts)
                    name, rows = f"stack.layers.{index}.{mine}.{kind}", (width,) * len(parts)
                    table.append(Entry(name, names, rows, prefix=prefix))
            table += [
                Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",))
                for mine, theirs in READOUT.get(("roberta", type(config.readout)), ())
            ]
        if isinstance(config.readout, LanguageHead):
            table += language_entries(config.readout, WORDS["roberta"])
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack; positions counted up are not weights."""
        return None if name.endswith("position_ids") else name.removeprefix("longformer.")

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Nothing uses the pooler of a bare model."""
        assert isinstance(config, EncoderConfig)
        return {name: _prefix(config) + name for name in POOLED}


LONGFORMER = LongformerFamily()


def _global_positions(readout: Readout) -> tuple[int, ...] | Literal["given"]:
    if isinstance(readout, SpanHead):
        return "given"
    return (0,) if isinstance(readout, ClassHead) else ()


def _windows(theirs: Mapping[str, Any]) -> list[int]:
    """The width of each layer's window, both sides together."""
    windows, count = theirs["attention_window"], theirs["num_hidden_layers"]
    windows = [windows] * count if isinstance(windows, int) else list(windows)
    if len(windows) != count:
        raise ConfigError(
            f"attention_window has {len(windows)} entries, and num_hidden_layers={count}",
            "give one window per layer",
        )
    for window in windows:
        if not isinstance(window, int) or window < 2 or window % 2:
            raise ConfigError(f"attention_window must be even and above 0, got {window!r:.50}")
    return windows


def _offset(theirs: Mapping[str, Any]) -> int:
    padding = theirs["pad_token_id"]
    if type(padding) is not int:
        raise ConfigError(
            f"pad_token_id={padding!r:.50} hides where positions begin",
            "give the number of the pad token",
        )
    return padding + 1


def _prefix(config: EncoderConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else "longformer."
