"""What the library must know about a family of models to read and write its folders."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, Protocol, runtime_checkable

from manyheads.checkpoints.tensor_map import TensorMap
from manyheads.errors import ConfigError
from manyheads.models.provenance import DEFAULT_LABEL
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
from manyheads.parts.feedforward import Activation


@runtime_checkable
class Family(Protocol):
    """How one family stores its models: "theirs" is the family's layout, "ours" the library's.

    The four abstract methods are what every family needs. The others have a default here.
    """

    name: str
    # Tensors that a file may hold in addition to the token embedding they are tied to.
    tied_copies: tuple[str, ...] = ()
    # Whether the file alone decides if the head is tied, whatever config.json says.
    file_decides_tying: bool = False
    # The keys of config.json that `per_layer_config` may have for single layers.
    per_layer_keys: tuple[str, ...] = ()

    @abstractmethod
    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        """Our config for the content of a config.json."""

    @abstractmethod
    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        """The content of a config.json, or None where the family has no such model.

        It may be a guess from the first layer: the caller reads it back and compares.
        """

    @abstractmethod
    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> TensorMap:
        """Where each of our tensors is in a file of theirs."""

    @abstractmethod
    def canonical_name(self, name: str) -> str | None:
        """The newest name of a tensor, whatever the file's age; None for what is not a weight."""

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:  # noqa: ARG002
        """Tensors that no part of the model uses, by canonical name, and their names in a file.

        They are carried along, so that a folder is written back with all that it had.
        """
        return {}

    def rewritten(self, theirs: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:  # noqa: ARG002
        """A config.json as we write it, where one config can be stored in several ways."""
        return dict(theirs)

    def opened_by(self, theirs: Mapping[str, Any]) -> str:  # noqa: ARG002
        """The library that opens a folder with this config.json."""
        return "transformers"

    def module_name(self, stem: str) -> str:
        """The module of `transformers` whose weight a file calls `stem`.weight."""
        return stem


# How the name of a decoder's class ends; GPT-2 has another name for its language head.
CAUSAL_HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForCausalLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
    SpanHead: "ForQuestionAnswering",
}


def causal_readout(theirs: Mapping[str, Any], language_head: LanguageHead) -> Readout:
    """The readout that the first of `architectures` names; a language head where it names none.

    A sequence is classified by its last token. A bare model with a tied language head keeps it, as
    `transformers` does when such a model generates text.
    """
    name = str((theirs.get("architectures") or [""])[0])
    if name.endswith(CAUSAL_HEADS[ClassHead]):
        return ClassHead(classes=class_count(theirs), pool="last", bias=False)
    if name.endswith(CAUSAL_HEADS[TokenHead]):
        return TokenHead(classes=class_count(theirs))
    bare = name.endswith(CAUSAL_HEADS[NoReadout]) and not name.endswith("LMHeadModel")
    return NoReadout() if bare and not language_head.tied else language_head


def activation_of(
    theirs: Mapping[str, Any], key: str, names: Mapping[str, Activation]
) -> Activation:
    """Our name for the activation under this key of a config.json; the default is GELU."""
    name = theirs.get(key, "gelu")
    if name not in names:
        raise ConfigError(f"{key}={name!r} is not supported", f"use {', '.join(names)}")
    return names[name]


# The activations of decoders' feed-forwards by their names in config.json.
HIDDEN_ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
    "swish": "silu",
    "tanh": "tanh",
}


def activation_name(activation: Activation) -> str:
    """The name of an activation in config.json."""
    return next(name for name, each in HIDDEN_ACTIVATIONS.items() if each == activation)


def eps_of(theirs: Mapping[str, Any], key: str, default: float | None = None) -> float:
    """The eps of a norm; like `transformers`, refuse what is not a decimal number."""
    value = theirs[key] if default is None else theirs.get(key, default)
    if not isinstance(value, float) or not 0 <= value < 1e6:
        raise ConfigError(f"{key} must be a number such as 1e-6, got {value!r:.200}")
    return value


def class_count(theirs: Mapping[str, Any]) -> int:
    """The number of classes; `transformers` leaves it out where it is two."""
    labels = theirs.get("id2label")
    return len(labels) if labels else int(theirs.get("num_labels", 2))


def span_head(theirs: Mapping[str, Any], transform: ReadoutTransform | None = None) -> SpanHead:
    """The head of question answering, whose two classes are start and end."""
    count = class_count(theirs)
    if count != 2:
        raise ConfigError(f"question answering has 2 labels, got {count}", "use num_labels=2")
    return SpanHead(transform=transform)


def label_maps(names: Sequence[str]) -> dict[str, Any]:
    """The names of classes as config.json has them, in both directions."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def default_labels(readout: Readout) -> dict[str, Any]:
    """What `transformers` calls classes that have no names."""
    if not isinstance(readout, ClassHead | TokenHead):
        return {}
    return label_maps(unnamed(readout.classes))


def unnamed(count: int) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(f"{DEFAULT_LABEL}{index}" for index in range(count))
