"""What the library must know about a family of models to read and write its folders."""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import (
    ConfigJson,
    Key,
    Parts,
    parts_of,
    read_keys,
    write_keys,
)
from manyheads.checkpoints.tensor_map import Entry, MapEntry, Repeated, TensorMap
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
from manyheads.parts.feedforward import MLP, GeGLU, SwiGLU
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import LayerNorm, NoNorm, Placement, PostNorm, PreNorm, RMSNorm
from manyheads.parts.positions import Learned, NoPosition

# A module or tensor of a file, or several of which one of the model's is made.
Sources = str | tuple[str, ...]
Inner = AttentionConfig | MixerConfig
Transforms = Mapping[type[Readout], ReadoutTransform]

# How the names of classes end in `transformers`; GPT-2 has another name for its language head.
CAUSAL_HEADS: dict[type[Readout], str] = {
    NoReadout: "Model",
    LanguageHead: "ForCausalLM",
    ClassHead: "ForSequenceClassification",
    TokenHead: "ForTokenClassification",
    SpanHead: "ForQuestionAnswering",
}
MASKED_HEADS: dict[type[Readout], str] = {**CAUSAL_HEADS, LanguageHead: "ForMaskedLM"}
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
    # Where the layers of a file are, and the names below a layer; of several stacks, each by name.
    layers: str = ""
    stacks: Mapping[str, str] = {}
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
    def read_config(self, config_json: ConfigJson) -> ModelConfig:
        """Our config for the content of a config.json."""

    def complete(self, config_json: ConfigJson) -> ConfigJson:
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
        labels = {}
        if isinstance(config.readout, ClassHead | TokenHead):
            # What `transformers` calls classes that have no names.
            labels = label_maps(unnamed(config.readout.classes))
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
    ) -> Iterator[MapEntry]:
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

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        """The entry of a tensor of the model; queries may have more rows than keys."""
        projects = len(sources) > 1 and ".attention.project." in name
        attention = layer.attention if layer is not None and projects else None
        return Entry(name, sources, tuple(attention.inner.rows().values()) if attention else ())

    def model_entries(self, config: Any) -> Iterable[MapEntry]:  # noqa: ARG002
        """Further entries outside the layers."""
        return ()

    def layer_places(self, config: Any) -> Iterator[tuple[str, str, LayerConfig]]:
        """Each layer with its name in the model and in a file."""
        places = self.stacks or {"stack": f"{self.root}{self.layers}.{{}}"}
        for name, place in places.items():
            stack = getattr(config, name, None)
            for index, layer in enumerate(stack.layers if stack is not None else ()):
                yield f"{name}.layers.{index}", place.format(index), layer

    def layer_table(self, layer: LayerConfig) -> Mapping[str, Sources]:  # noqa: ARG002
        """The names below a layer, where they depend on what it has."""
        return self.layer

    def layer_entries(
        self,
        layer: LayerConfig,  # noqa: ARG002
        name: str,  # noqa: ARG002
        source: str,  # noqa: ARG002
    ) -> Iterable[MapEntry]:
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

    def rewritten(self, config_json: ConfigJson, config: ModelConfig) -> dict[str, Any]:  # noqa: ARG002
        """A config.json as we write it, where one config can be stored in several ways."""
        return dict(config_json)

    def opened_by(self, config_json: ConfigJson) -> str:  # noqa: ARG002
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


class StackFamily(Family):
    """A family of models with one stack, whose layers have attention and a feed-forward.

    What they are made of is in `parts`: the arguments of each part, as `keys` read them.
    """

    init = initialization.Initialization()
    norm: Callable[..., Any] = LayerNorm
    final_norm: bool = False
    placement: Callable[[Any], Placement] = PreNorm
    feedforward: Callable[..., FeedForwardConfig] = MLP
    # The parts whose dropout attention and feed-forward have on the residual stream.
    dropouts: tuple[str, str] = ("residual", "residual")

    def read_config(self, config_json: ConfigJson) -> ModelConfig:
        parts = read_keys(self.keys, self.complete(config_json), self.norm)
        config: ModelConfig = self.config_types[0](
            **self.read_inputs(parts),
            stack=self.read_stack(parts),
            readout=self.read_readout(parts),
            init=replace(self.init, **parts.init),
        )
        return config

    def read_inputs(self, parts: Parts) -> dict[str, Any]:
        """What makes vectors of the inputs."""
        return {"embedding": self.read_embedding(parts)}

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts)

    def read_stack(self, parts: Parts) -> stack.StackConfig:
        return stack.StackConfig(
            width=parts.width,
            layers=tuple(self.read_layers(parts)),
            final_norm=parts.norm if self.final_norm else NoNorm(),
        )

    def read_layers(self, parts: Parts) -> Iterator[LayerConfig]:
        dropouts = [parts.dropout(part) for part in self.dropouts]
        for index in range(parts.depth):
            inner = self.read_inner(parts, index)
            norm = self.read_placement(parts, inner)
            branch: Any = Branch(inner, norm, dropouts[0])
            attends = isinstance(inner, AttentionConfig)
            yield LayerConfig(
                attention=branch if attends else None,
                mixer=None if attends else branch,
                feedforward=Branch(self.read_feedforward(parts, index), norm, dropouts[1]),
                residual=self.read_residual(parts),
            )

    def read_placement(self, parts: Parts, inner: Inner) -> Placement:  # noqa: ARG002
        """The norms of a layer, and where they are."""
        return type(self).placement(parts.norm)

    def read_inner(self, parts: Parts, index: int) -> Inner:  # noqa: ARG002
        """The attention of a layer, or its mixer."""
        return AttentionConfig(bias="all", **parts.attention)

    def read_feedforward(self, parts: Parts, index: int) -> FeedForwardConfig:  # noqa: ARG002
        return type(self).feedforward(**parts.feedforward)

    def read_residual(self, parts: Parts) -> Any:  # noqa: ARG002
        """How the branches of a layer are added."""
        return "serial"

    @abstractmethod
    def read_readout(self, parts: Parts) -> Readout: ...


class DecoderFamily(StackFamily):
    """A family of decoders."""

    config_types = (decoder.DecoderConfig,)
    norm: Callable[..., Any] = RMSNorm
    final_norm = True

    def read_readout(self, parts: Parts) -> Readout:
        return causal_readout(parts.json, LanguageHead(**parts.readout))


class EncoderFamily(StackFamily):
    """A family of encoders: those of BERT's kind unless a method says otherwise."""

    config_types = (encoder.EncoderConfig,)
    class_ends = MASKED_HEADS
    placement: Callable[[Any], Placement] = PostNorm
    dropouts = ("embedding", "embedding")
    # Where the weight and the bias of a language head are.
    words: str = ""

    def read_embedding(self, parts: Parts) -> Embedding:
        return embedding_of(parts, norm=parts.norm)

    def transforms(self, parts: Parts) -> Transforms:
        """What comes before the readouts that have a transform."""
        words = ReadoutTransform(activation=parts.feedforward["activation"], norm=parts.norm)
        return {LanguageHead: words, ClassHead: POOLER}

    def read_readout(self, parts: Parts) -> Readout:
        kind = readout_class(self, parts.json)
        transform = self.transforms(parts).get(kind)
        if kind is LanguageHead:
            return LanguageHead(transform=transform, bias=True, **parts.readout)
        if kind is NoReadout:
            return NoReadout()
        classes = class_count(parts.json)
        if kind is ClassHead:
            return ClassHead(classes=classes, transform=transform)
        if kind is TokenHead:
            return TokenHead(classes=classes, transform=transform)
        if classes != 2:
            raise ConfigError(f"question answering has 2 labels, got {classes}", "use num_labels=2")
        return SpanHead(transform=transform)

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


def seq2seq_layer(
    shared: Mapping[str, Any],
    feedforward: FeedForwardConfig,
    norm: Placement,
    dropout: float,
    *,
    decodes: bool,
    **own: Any,
) -> LayerConfig:
    """A layer of an encoder, or of a decoder with another attention to the encoder.

    Both attentions have the arguments `shared`, the first one also `own`.
    """

    def attention(**arguments: Any) -> Branch[AttentionConfig]:
        return Branch(AttentionConfig(**shared, **arguments), norm, dropout)

    return LayerConfig(
        attention=attention(mask=Causal() if decodes else Full(), **own),
        cross=attention(keys_from="memory") if decodes else None,
        feedforward=Branch(feedforward, norm, dropout),
    )


def gated_feedforward(activation: Any, **arguments: Any) -> FeedForwardConfig:
    """A gated feed-forward; that of SiLU has its own name."""
    if activation == "silu":
        return SwiGLU(**arguments)
    return GeGLU(activation=activation, **arguments)


def embedding_of(parts: Parts, **more: Any) -> Embedding:
    """The embedding that a config.json describes, with learned positions if it has some."""
    position = Learned(**parts.position) if parts.position else NoPosition()
    return Embedding(**{"position": position, **parts.embedding, **more})


def readout_class(family: Family, config_json: ConfigJson) -> type[Readout]:
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


def causal_readout(config_json: ConfigJson, language_head: LanguageHead) -> Readout:
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


def class_count(config_json: ConfigJson) -> int:
    """The number of classes; `transformers` leaves it out where it is two."""
    labels = config_json.get("id2label")
    return len(labels) if labels else int(config_json.get("num_labels", 2))


def label_maps(names: Sequence[str]) -> dict[str, Any]:
    """The names of classes as config.json has them, in both directions."""
    return {
        "id2label": {str(index): name for index, name in enumerate(names)},
        "label2id": {name: index for index, name in enumerate(names)},
    }


def unnamed(count: int) -> tuple[str, ...]:
    """Names for classes that have none."""
    return tuple(f"{provenance.DEFAULT_LABEL}{index}" for index in range(count))
