"""DeBERTa v2 and v3: encoders with disentangled attention."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Form, Key, Parts
from manyheads.checkpoints.families.encoders.bert import BERT, EMBEDDING, KEYS, LAYER, BertFamily
from manyheads.checkpoints.families.family import Transforms, embedding_of
from manyheads.checkpoints.tensor_map import Entry, TensorMap
from manyheads.errors import ConfigError
from manyheads.models import encoder, readout, recipes
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.parts.convolution import Convolution
from manyheads.parts.norms import NoNorm
from manyheads.parts.positions import Disentangled, Learned, NoPosition

# The activation of the pooler of classifiers, and of the convolution.
ACTIVATION = config_keys.one_of(config_keys.HIDDEN_ACTIVATIONS)
# The names of each choice of terms.
TERMS: dict[frozenset[str], Literal["both", "content_to_position", "position_to_content"]] = {
    frozenset({"c2p", "p2c"}): "both",
    frozenset({"c2p"}): "content_to_position",
    frozenset({"p2c"}): "position_to_content",
}
POSITIONS = "embeddings.position_embeddings.weight"
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

    def part(self, tensor: Tensor) -> dict[str, Tensor]:
        return {self.written: tensor}


class DebertaFamily(BertFamily):
    """DeBERTa v2, whose class also opens v3."""

    name = "deberta-v2"
    classes = {"deberta-v2": "DebertaV2"}
    keys = {
        **KEYS,
        "max_position_embeddings": Key("position.count", 512, written="never"),
        "position_biased_input": Key(
            "embedding.position", True, Form(write=lambda position: isinstance(position, Learned))
        ),
        "type_vocab_size": Key("embedding.types", 0),
        "layer_norm_eps": config_keys.eps(1e-7),
        "initializer_range": config_keys.STD,
    }

    prefix = "deberta."
    embedding = {
        **EMBEDDING,
        # The first layer owns what all of them share.
        "stack.layers.0.attention.table.norm": "encoder.LayerNorm",
        "stack.layers.0.attention.table.vectors": "encoder.rel_embeddings.weight",
        "stack.layers.0.convolution.convolve": "encoder.conv.conv",
        "stack.layers.0.convolution.norm": "encoder.conv.LayerNorm",
    }
    layer = {
        **LAYER,
        "attention.project": tuple(
            f"attention.self.{part}_proj" for part in ("query", "key", "value")
        ),
        "attention.distances.key": "attention.self.pos_key_proj",
        "attention.distances.query": "attention.self.pos_query_proj",
    }
    heads = {
        **BERT.heads,
        readout.ClassHead: {"readout.transform.dense": "pooler.dense", "readout": "classifier"},
    }
    buffers = ("position_ids",)

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        _refuse_foreign(config_json)
        # The newer head has no table of its own.
        tied = bool(config_json.get("tie_word_embeddings", True))
        tied = tied or not config_json.get("legacy", True)
        return {**config_json, "tie_word_embeddings": tied}

    def read_embedding(self, parts: Parts) -> Embedding:
        added = parts.embedding["position"]
        position = Learned(**parts.position) if added else NoPosition()
        return embedding_of(parts, norm=parts.norm, position=position)

    def read_layers(self, parts: Parts) -> Iterator[LayerConfig]:
        """A convolution is beside the first layer only."""
        first, *rest = super().read_layers(parts)
        return iter((replace(first, convolution=_convolution(parts)), *rest))

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        terms, size = _terms(parts.json), parts.width // parts.attention["heads"]
        return AttentionConfig(
            position=_position(parts),
            bias="all",
            # The terms share the scale, whether they are used or not.
            scale=(size * (1 + len(terms))) ** -0.5 if terms else "root",
            **parts.attention,
        )

    def transforms(self, parts: Parts) -> Transforms:
        name = parts.json.get("pooler_hidden_act", "gelu")
        activation = ACTIVATION.read("pooler_hidden_act", name)
        pooler = readout.ReadoutTransform(activation=activation, norm=NoNorm())
        return {**super().transforms(parts), readout.ClassHead: pooler}

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        position, head = getattr(parts.attention, "position", None), config.readout
        if not isinstance(position, Disentangled):
            return None
        described = _describe_position(position) | {"legacy": not getattr(head, "tied", True)}
        longest = described["max_relative_positions"]
        described["max_position_embeddings"] = getattr(parts.position, "count", longest)
        if isinstance(head, readout.ClassHead) and head.transform is not None:
            described["pooler_hidden_act"] = ACTIVATION.write(head.transform.activation)
        convolution = config.stack.layers[0].convolution
        if convolution is not None:
            described |= {
                "conv_kernel_size": convolution.size,
                "conv_groups": convolution.groups,
                "conv_act": ACTIVATION.write(convolution.activation),
            }
        return described

    def tensor_map(self, config: recipes.ModelConfig, names: Iterable[str]) -> TensorMap:
        table = super().tensor_map(config, names)
        if not isinstance(config.readout, readout.LanguageHead) or not config.readout.tied:
            return table
        return [
            WrittenAs(entry.name, entry.sources, written=NEWER_HEAD[entry.sources[0]])
            if isinstance(entry, Entry) and entry.sources[0] in NEWER_HEAD
            else entry
            for entry in table
        ]

    def canonical_name(self, name: str) -> str | None:
        """A head of either age; a task of pretraining has no place here."""
        if name.startswith("mask_predictions."):
            return None
        return OLDER_HEAD.get(name, super().canonical_name(name))

    def unused_tensors(self, config: recipes.ModelConfig) -> dict[str, str]:
        """Positions that are not added, and the language head beside another or none."""
        assert isinstance(config, encoder.EncoderConfig)
        added = isinstance(config.embedding.position, Learned)
        unused = {} if added else {POSITIONS: self.prefix_of(config) + POSITIONS}
        return unused | ({} if isinstance(config.readout, readout.LanguageHead) else NEWER_HEAD)

    def rewritten(self, config_json: ConfigJson, config: recipes.ModelConfig) -> dict[str, Any]:
        """A language head is written as the newer one, which an untied head cannot be."""
        head = config.readout
        newer = {"legacy": not head.tied} if isinstance(head, readout.LanguageHead) else {}
        return {**config_json, **newer}


DEBERTA = DebertaFamily()


def _terms(config_json: ConfigJson) -> frozenset[str]:
    named = config_json.get("pos_att_type") or []
    named = named.lower().split("|") if isinstance(named, str) else named
    terms = frozenset(str(term).strip() for term in named)
    unknown = sorted(terms - {"c2p", "p2c"})
    if unknown:
        raise ConfigError(
            f"pos_att_type has {', '.join(unknown)}, which is not supported", "use c2p and p2c"
        )
    return terms


def _convolution(parts: Parts) -> Convolution | None:
    size = parts.json.get("conv_kernel_size", 0)
    if size <= 0:
        return None
    return Convolution(
        width=parts.width,
        size=size,
        groups=parts.json.get("conv_groups", 1),
        activation=ACTIVATION.read("conv_act", parts.json.get("conv_act", "tanh")),
        norm=parts.norm,
        dropout=parts.dropout("embedding"),
    )


def _position(parts: Parts) -> Disentangled | NoPosition:
    config_json = parts.json
    if not config_json.get("relative_attention", False):
        return NoPosition()
    terms = TERMS.get(_terms(config_json))
    if terms is None:
        raise ConfigError(
            "relative_attention=true without pos_att_type has no effect",
            "use c2p, p2c or both, or relative_attention=false",
        )
    reach, buckets = (
        int(config_json.get(key, -1)) for key in ("max_relative_positions", "position_buckets")
    )
    reach = reach if reach > 0 else parts.position["count"]
    normed = "layer_norm" in str(config_json.get("norm_rel_ebd", "none")).lower().split("|")
    return Disentangled(
        buckets=buckets if buckets > 0 else reach,
        reach=reach if buckets > 0 else "linear",
        terms=terms,
        projections="shared" if config_json.get("share_att_key", False) else "own",
        norm=parts.norm if normed else NoNorm(),
        dropout=parts.dropout("embedding"),
    )


def _describe_position(position: Disentangled) -> dict[str, Any]:
    linear = position.reach == "linear"
    terms = next(names for names, terms in TERMS.items() if terms == position.terms)
    return {
        "relative_attention": True,
        "position_buckets": -1 if linear else position.buckets,
        "max_relative_positions": position.buckets if linear else position.reach,
        "pos_att_type": sorted(terms, reverse=True),
        "share_att_key": position.projections == "shared",
        "norm_rel_ebd": "none" if isinstance(position.norm, NoNorm) else "layer_norm",
    }


def _refuse_foreign(config_json: ConfigJson) -> None:
    width = config_json["hidden_size"]
    sizes = {
        "embedding_size": width,
        "pooler_hidden_size": width,
        "attention_head_size": width // config_json["num_attention_heads"],
    }
    for key, size in sizes.items():
        if config_json.get(key, size) != size:
            raise ConfigError(f"{key}={config_json[key]!r:.200} is not supported", f"use {size}")
