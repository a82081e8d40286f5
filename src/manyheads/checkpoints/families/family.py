"""What the library must know about a family of models to read and write its folders."""

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import Key, Parts, parts_of, read_keys, write_keys
from manyheads.checkpoints.tensor_map import Either, Entry, Packed, Repeated, TensorMap
from manyheads.errors import ConfigError
from manyheads.mixers.build import MixerConfig
from manyheads.models import decoder, encoder, initialization, provenance, stack
from manyheads.models.embedding import Embedding
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
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
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.norms import LayerNorm, NoNorm, Placement, PostNorm, RMSNorm
from manyheads.parts.positions import Learned, NoPosition

# A module or tensor of a file, or several of which one of the model's is made.
Sources = str | tuple[str, ...]

# How the names of classes end in `transformers`; GPT-2 has another name for its language head.
CAUSAL_HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForCausalLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
    SpanHead: "ForQuestionAnswering",
}
MASKED_HEADS: dict[type[Readout], str] = {**CAUSAL_HEADS, LanguageHead: "ForMaskedLM"}
# The activations of feed-forwards by their names in config.json; the first of ours is written.
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
POOLER = ReadoutTransform(activation="tanh", norm=NoNorm())


class Family(ABC):
    """How one family stores its models: tables of names and keys, and methods for the rest."""

    name: str

    # config.json
    # Each model_type, and how the names of its classes in `transformers` begin.
    classes: Mapping[str, str] = {}
    class_ends: Mapping[type[Readout], str] = CAUSAL_HEADS
    config_types: tuple[type, ...] = ()
    keys: Mapping[str, Key] = {}
    # The only value that is supported for a key, and what is written besides.
    only: Mapping[str, Any] = {}
    constants: Mapping[str, Any] = {}
    # The keys that `per_layer_config` may have for single layers.
    per_layer_keys: tuple[str, ...] = ()

    # Tensors: names in a model, and those in a file.
    # Files of a bare model are written without the prefix; those of every model have the root.
    prefix: str = ""
    other_prefixes: tuple[str, ...] = ()
    root: str = ""
    embedding: Mapping[str, Sources] = {}
    # Where the layers of a file are, and the names below a layer.
    layers: str = ""
    layer: Mapping[str, Sources] = {}
    heads: Mapping[type[Readout], Mapping[str, Sources]] = {}
    # Tensors that a file may hold in addition to the token embedding they are tied to.
    tied_copies: tuple[str, ...] = ()
    # Whether the file alone decides if the head is tied, whatever config.json says.
    file_decides_tying: bool = False
    # Tensors that no part of the model uses, below the prefix and beside it.
    unused: tuple[str, ...] = ()
    unused_heads: tuple[str, ...] = ()
    # How names end that are not weights, and parts of names in older files.
    buffers: tuple[str, ...] = ()
    older: Mapping[str, str] = {}
    # Modules of `transformers` below a layer that files name otherwise, and where its layers are.
    modules: Mapping[str, str] = {}
    module_layers: str = ""

    @abstractmethod
    def read_config(self, config_json: Mapping[str, Any]) -> ModelConfig:
        """Our config for the content of a config.json."""

    def complete(self, config_json: Mapping[str, Any]) -> Mapping[str, Any]:
        """A config.json with what the family derives from other keys, if all of it is supported."""
        for key, value in self.only.items():
            if config_json.get(key, value) != value:
                raise ConfigError(
                    f"{key}={config_json[key]!r:.200} is not supported", f"use {value}"
                )
        return config_json

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        """The content of a config.json, or None where the family has no such model.

        It may be a guess from the first layer: the caller reads it back and compares.
        """
        parts = parts_of(config) if isinstance(config, self.config_types) else None
        if parts is None or type(config.readout) not in self.class_ends:
            return None
        plain = write_keys(self.keys, parts)
        described = None if plain is None else self.describe(config, parts)
        if plain is None or described is None:
            return None
        kind = self.model_type(parts)
        names = {
            "model_type": kind,
            "architectures": [self.classes[kind] + self.class_ends[type(config.readout)]],
        }
        labels = default_labels(config.readout)
        return names | plain | dict(self.only) | dict(self.constants) | described | labels

    def model_type(self, parts: Parts) -> str:  # noqa: ARG002
        """The model_type that a model is written as."""
        return next(iter(self.classes))

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        """What config.json says besides `keys`; None where the family has no such model."""
        return {}

    def tensor_map(self, config: ModelConfig, names: Iterable[str]) -> TensorMap:
        """Where the tensors of a model with these names are in a file."""
        have, prefix = set(names), self.prefix_of(config)
        body = [*self.entries(self.embedding, have, source=self.root), *self.model_entries(config)]
        for name, source, layer in self.layer_places(config):
            table = self.layer_table(layer)
            body += self.entries(table, have, f"{name}.", f"{source}.", layer)
            body += self.layer_entries(layer, name, source)
        head = [*self.entries(self.heads.get(type(config.readout), {}), have)]
        head += self.head_entries(config)
        table_of_all = [*(entry.with_prefix(prefix) for entry in body), *head]
        return [entry for entry in table_of_all if entry.name in have]

    def entries(
        self,
        table: Mapping[str, Sources],
        have: set[str],
        name: str = "",
        source: str = "",
        layer: LayerConfig | None = None,
    ) -> Iterator[Entry | Either]:
        """The entries of a table below `name` and `source`, for modules and single tensors."""
        for own, files in table.items():
            for kind in ("", ".weight", ".bias"):
                if (whole := f"{name}{own}{kind}") in have:
                    parts = (files,) if isinstance(files, str) else files
                    # Parts of the body that a head uses have the prefix.
                    prefix = self.prefix if self.prefix and parts[0].startswith(self.prefix) else ""
                    sources = tuple(f"{source}{part[len(prefix) :]}{kind}" for part in parts)
                    entry = self.entry(whole, sources, layer)
                    yield entry.with_prefix(prefix) if prefix else entry

    def entry(
        self, name: str, sources: tuple[str, ...], layer: LayerConfig | None
    ) -> Entry | Either:
        """The entry of a tensor of the model; queries may have more rows than keys."""
        projects = len(sources) > 1 and ".attention.project." in name
        attention = layer.attention if layer is not None and projects else None
        return Entry(name, sources, tuple(attention.inner.rows().values()) if attention else ())

    def model_entries(self, config: Any) -> Iterable[Entry | Packed | Either]:  # noqa: ARG002
        """Further entries outside the layers."""
        return ()

    def layer_places(self, config: Any) -> Iterator[tuple[str, str, LayerConfig]]:
        """Each layer with its name in the model and in a file."""
        for index, layer in enumerate(config.stack.layers):
            yield f"stack.layers.{index}", f"{self.root}{self.layers}.{index}", layer

    def layer_table(self, layer: LayerConfig) -> Mapping[str, Sources]:  # noqa: ARG002
        """The names below a layer, where they depend on what it has."""
        return self.layer

    def layer_entries(
        self,
        layer: LayerConfig,  # noqa: ARG002
        name: str,  # noqa: ARG002
        source: str,  # noqa: ARG002
    ) -> Iterable[Entry | Packed | Either]:
        """Further entries of a layer, whose names begin with `name` and `source`."""
        return ()

    def head_entries(self, config: ModelConfig) -> Iterable[Entry]:  # noqa: ARG002
        """Further entries of the readout."""
        return ()

    def prefix_of(self, config: ModelConfig) -> str:
        """Files of the bare model are written without the prefix that the others have."""
        return "" if isinstance(config.readout, NoReadout) else self.prefix

    def canonical_name(self, name: str) -> str | None:
        """The newest name of a tensor, whatever the file's age; None for what is not a weight."""
        if name.endswith(self.buffers):
            return None
        for prefix in (self.prefix, *self.other_prefixes):
            name = name.removeprefix(prefix)
        if self.root:
            heads = (source for table in self.heads.values() for source in table.values())
            places = (self.root, *(f"{str(head).partition('.')[0]}." for head in heads))
            name = name if name.startswith(places) else self.root + name
        for old, new in self.older.items():
            name = name.replace(old, new)
        place = re.escape(self.module_layers or self.layers)
        match = (
            re.fullmatch(rf"{place}\.(\d+)\.(.+)\.(weight|bias)", name) if self.modules else None
        )
        if match is None:
            return name
        index, part, kind = match.groups()
        return f"{self.layers}.{index}.{self.modules.get(part, part)}.{kind}"

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:
        """Tensors that no part of the model uses, by canonical name, and their names in a file.

        They are carried along, so that a folder is written back with all that it had.
        """
        used = self.heads.get(type(config.readout), {}).values()
        prefix = self.prefix_of(config)
        names = [name for name in self.unused if prefix + name.rpartition(".")[0] not in used]
        return {name: prefix + name for name in names} | {name: name for name in self.unused_heads}

    def rewritten(self, config_json: Mapping[str, Any], config: ModelConfig) -> dict[str, Any]:  # noqa: ARG002
        """A config.json as we write it, where one config can be stored in several ways."""
        return dict(config_json)

    def opened_by(self, config_json: Mapping[str, Any]) -> str:  # noqa: ARG002
        """The library that opens a folder with this config.json."""
        return "transformers"

    def module_name(self, stem: str) -> str:
        """The module of `transformers` whose weight a file calls `stem`.weight."""
        prefixes = "|".join(map(re.escape, ("", self.prefix, *self.other_prefixes)))
        pattern = rf"({prefixes}){re.escape(self.layers)}\.(\d+)\.(.+)"
        match = re.fullmatch(pattern, stem) if self.modules else None
        if match is None:
            return stem
        prefix, index, part = match.groups()
        new = next((new for new, old in self.modules.items() if old == part), part)
        return f"{prefix}{self.module_layers or self.layers}.{index}.{new}"


class DecoderFamily(Family):
    """A family of decoders."""

    config_types = (decoder.DecoderConfig,)
    init = initialization.Initialization()

    def read_config(self, config_json: Mapping[str, Any]) -> decoder.DecoderConfig:
        config_json = self.complete(config_json)
        parts = read_keys(self.keys, config_json)
        norm = self.read_norm(parts)
        return decoder.DecoderConfig(
            embedding=self.read_embedding(parts),
            stack=stack.StackConfig(
                width=parts.width,
                layers=tuple(self.read_layers(parts, norm, config_json)),
                final_norm=norm,
            ),
            readout=self.read_readout(parts, config_json),
            init=replace(self.init, **parts.init),
        )

    def read_norm(self, parts: Parts) -> LayerNorm | RMSNorm:
        return RMSNorm(**parts.norm)

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts)

    @abstractmethod
    def read_layers(
        self, parts: Parts, norm: Any, config_json: Mapping[str, Any]
    ) -> Iterable[LayerConfig]:
        """The layers of a model."""

    def read_readout(self, parts: Parts, config_json: Mapping[str, Any]) -> Readout:
        return causal_readout(config_json, LanguageHead(**parts.readout))


class EncoderFamily(Family):
    """A family of encoders: those of BERT's kind unless a method says otherwise."""

    config_types = (encoder.EncoderConfig,)
    class_ends: Mapping[type[Readout], str] = MASKED_HEADS
    init = initialization.Initialization()
    # Where the weight and the bias of a language head are.
    words: str = ""

    def read_config(self, config_json: Mapping[str, Any]) -> encoder.EncoderConfig:
        config_json = self.complete(config_json)
        parts = read_keys(self.keys, config_json)
        norm = self.read_norm(parts)
        return encoder.EncoderConfig(
            embedding=self.read_embedding(parts, norm),
            stack=self.read_stack(parts, norm, config_json),
            readout=self.read_readout(parts, norm, config_json),
            init=replace(self.init, **parts.init),
        )

    def read_norm(self, parts: Parts) -> LayerNorm:
        return LayerNorm(**parts.norm)

    def read_embedding(self, parts: Parts, norm: LayerNorm) -> Embedding:
        return embedding_of(parts, norm=norm)

    def read_stack(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> stack.StackConfig:
        layers = tuple(self.read_layers(parts, norm, config_json))
        return stack.StackConfig(width=parts.width, layers=layers)

    def read_layers(
        self,
        parts: Parts,
        norm: LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Iterable[LayerConfig]:
        attention = AttentionConfig(bias="all", **parts.attention)
        dropout = parts.embedding["dropout"]
        layer = layer_of(attention, MLP(**parts.feedforward), PostNorm(norm), dropout)
        return (layer,) * parts.depth

    def transforms(
        self,
        parts: Parts,
        norm: LayerNorm,
        config_json: Mapping[str, Any],  # noqa: ARG002
    ) -> Mapping[type[Readout], ReadoutTransform]:
        """What comes before the readouts that have a transform."""
        words = ReadoutTransform(activation=parts.feedforward["activation"], norm=norm)
        return {LanguageHead: words, ClassHead: POOLER}

    def read_readout(
        self, parts: Parts, norm: LayerNorm, config_json: Mapping[str, Any]
    ) -> Readout:
        kind = readout_class(self, config_json)
        transform = self.transforms(parts, norm, config_json).get(kind)
        if kind is LanguageHead:
            return LanguageHead(transform=transform, bias=True, **parts.readout)
        if kind is ClassHead:
            return ClassHead(classes=class_count(config_json), transform=transform)
        if kind is TokenHead:
            return TokenHead(classes=class_count(config_json), transform=transform)
        return span_head(config_json, transform) if kind is SpanHead else NoReadout()

    def head_entries(self, config: ModelConfig) -> Iterator[Entry]:
        head = config.readout
        if not self.words or not isinstance(head, LanguageHead):
            return
        if head.tied:
            yield Entry("readout.bias", (f"{self.words}.bias",))
        else:
            # An untied head has a second bias that is stored and never read.
            yield Entry("readout.weight", (f"{self.words}.decoder.weight",))
            biases = (f"{self.words}.decoder.bias", f"{self.words}.bias")
            yield Repeated("readout.bias", biases)


def layer_of(
    inner: AttentionConfig | MixerConfig,
    feedforward: FeedForwardConfig,
    norm: Placement,
    dropout: float = 0.0,
    *,
    attention_dropout: float | None = None,
    **more: Any,
) -> LayerConfig:
    """A layer of attention, or of a mixer in its place, and a feed-forward with the same norms."""
    branch: Any = Branch(inner, norm, dropout if attention_dropout is None else attention_dropout)
    attends = isinstance(inner, AttentionConfig)
    return LayerConfig(
        attention=branch if attends else None,
        mixer=None if attends else branch,
        feedforward=Branch(feedforward, norm, dropout),
        **more,
    )


def embedding_of(parts: Parts, **more: Any) -> Embedding:
    """The embedding that a config.json describes, with learned positions if it has some."""
    position = Learned(**parts.position) if parts.position else NoPosition()
    return Embedding(**{"position": position, **parts.embedding, **more})


def readout_class(family: Family, config_json: Mapping[str, Any]) -> type[Readout]:
    """The readout that `architectures` names; none where it names none."""
    stems = family.classes
    stem = stems.get(config_json.get("model_type", ""), next(iter(stems.values())))
    names = {stem + end: kind for kind, end in family.class_ends.items()}
    name = (config_json.get("architectures") or [f"{stem}Model"])[0]
    # The other head of pretraining has no counterpart.
    masked = name.replace("ForPreTraining", family.class_ends.get(LanguageHead, ""))
    if masked not in names:
        known = " or ".join(names) if len(names) == 2 else f"one of {', '.join(names)}"
        raise ConfigError(f"the head of {name} is not supported", f"use {known}")
    return names[masked]


def causal_readout(config_json: Mapping[str, Any], language_head: LanguageHead) -> Readout:
    """The readout that the first of `architectures` names; a language head where it names none.

    A sequence is classified by its last token. A bare model with a tied language head keeps it, as
    `transformers` does when such a model generates text.
    """
    name = str((config_json.get("architectures") or [""])[0])
    if name.endswith(CAUSAL_HEADS[ClassHead]):
        return ClassHead(classes=class_count(config_json), pool="last", bias=False)
    if name.endswith(CAUSAL_HEADS[TokenHead]):
        return TokenHead(classes=class_count(config_json))
    bare = name.endswith(CAUSAL_HEADS[NoReadout]) and not name.endswith("LMHeadModel")
    return NoReadout() if bare and not language_head.tied else language_head


def class_count(config_json: Mapping[str, Any]) -> int:
    """The number of classes; `transformers` leaves it out where it is two."""
    labels = config_json.get("id2label")
    return len(labels) if labels else int(config_json.get("num_labels", 2))


def span_head(
    config_json: Mapping[str, Any], transform: ReadoutTransform | None = None
) -> SpanHead:
    """The head of question answering, whose two classes are start and end."""
    count = class_count(config_json)
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
    return tuple(f"{provenance.DEFAULT_LABEL}{index}" for index in range(count))
