"""FNet: BERT with a Fourier transform where attention stood."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.checkpoints.families.encoders.bert import (
    ACTIVATIONS,
    EMBEDDING,
    HEADS,
    NEXT_SENTENCE,
    POOLED,
    POOLER,
    READOUT,
    WORDS,
    language_entries,
    readout_of,
)
from manyheads.checkpoints.families.family import Family, activation_of, default_labels, eps_of
from manyheads.checkpoints.tensor_map import Entry
from manyheads.mixers.fourier import Fourier
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout, ReadoutTransform
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Learned

# Ours below a layer and theirs below encoder.layer.N.
LAYER = (
    ("attention_residual.norm", "fourier.output.LayerNorm"),
    ("feedforward.expand", "intermediate.dense"),
    ("feedforward.contract", "output.dense"),
    ("feedforward_residual.norm", "output.LayerNorm"),
)
# The defaults where config.json leaves them out.
DEFAULTS: dict[str, Any] = {
    "hidden_act": "gelu_new",
    "type_vocab_size": 4,
    "layer_norm_eps": 1e-12,
    "hidden_dropout_prob": 0.1,
    "initializer_range": 0.02,
}


class FNetFamily(Family):
    """FNet. A text gives the same as alone; in `transformers` padding changes it."""

    name = "fnet"
    tied_copies = ("cls.predictions.decoder.weight", "cls.predictions.decoder.bias")

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        # The optimizations for TPUs compute the same transform.
        theirs = {**DEFAULTS, **theirs}
        width, dropout = theirs["hidden_size"], float(theirs["hidden_dropout_prob"])
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps"))
        activation = activation_of(theirs, "hidden_act", ACTIVATIONS)
        feedforward = MLP(width=width, hidden=theirs["intermediate_size"], activation=activation)
        layer = LayerConfig(
            attention=None,
            mixer=Branch(Fourier(width=width), PostNorm(norm)),
            feedforward=Branch(feedforward, PostNorm(norm), dropout),
        )
        return EncoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Learned(count=theirs["max_position_embeddings"]),
                types=theirs["type_vocab_size"],
                norm=norm,
                projected=True,
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=(layer,) * theirs["num_hidden_layers"]),
            readout=readout_of(
                theirs, "FNet", ReadoutTransform(activation=activation, norm=norm), POOLER
            ),
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig) or not config.stack.layers:
            return None
        embedding, first = config.embedding, config.stack.layers[0]
        if not isinstance(embedding.position, Learned) or not isinstance(embedding.norm, LayerNorm):
            return None
        if first.mixer is None or first.feedforward is None or not embedding.types:
            return None
        feedforward = first.feedforward.inner
        activation = getattr(feedforward, "activation", None)
        if activation not in ACTIVATIONS.values() or not isinstance(first.mixer.inner, Fourier):
            return None
        return {
            "model_type": "fnet",
            "architectures": ["FNet" + HEADS[type(config.readout)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "intermediate_size": feedforward.hidden,
            "hidden_act": next(name for name, ours in ACTIVATIONS.items() if ours == activation),
            "vocab_size": embedding.vocabulary,
            "max_position_embeddings": embedding.position.count,
            "type_vocab_size": embedding.types,
            "layer_norm_eps": embedding.norm.eps,
            "hidden_dropout_prob": embedding.dropout,
            "tie_word_embeddings": getattr(config.readout, "tied", True),
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, EncoderConfig)
        have, prefix = set(ours), _prefix(config)
        body = [*EMBEDDING, ("embedding.project", "embeddings.projection")]
        for index in range(len(config.stack.layers)):
            body += [
                (f"stack.layers.{index}.{mine}", f"encoder.layer.{index}.{theirs}")
                for mine, theirs in LAYER
            ]
        if isinstance(config.readout, ClassHead):
            body.append(("readout.transform.dense", "pooler.dense"))
        head = READOUT.get(("bert", type(config.readout)), ())
        table: list[Entry] = []
        for kind in ("weight", "bias"):
            table += [
                Entry(f"{mine}.{kind}", (f"{theirs}.{kind}",), prefix=prefix)
                for mine, theirs in body
            ]
            table += [
                Entry(f"readout{mine}.{kind}", (f"{theirs}.{kind}",)) for mine, theirs in head
            ]
        if isinstance(config.readout, LanguageHead):
            table += language_entries(config.readout, WORDS["bert"])
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Without the prefix, which bare models lack."""
        if name.endswith(("position_ids", "token_type_ids", "dft_mat_hidden", "dft_mat_seq")):
            return None
        return name.removeprefix("fnet.")

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Only a classifier of sequences uses the pooler, nothing the next-sentence head."""
        assert isinstance(config, EncoderConfig)
        pooler = () if isinstance(config.readout, ClassHead) else POOLED
        return {name: _prefix(config) + name for name in pooler} | {
            name: name for name in NEXT_SENTENCE
        }


FNET = FNetFamily()


def _prefix(config: EncoderConfig) -> str:
    """Files of the bare model are written without the prefix that the others have."""
    return "" if isinstance(config.readout, NoReadout) else "fnet."
