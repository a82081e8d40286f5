"""Reformer (arXiv 2001.04451): local and LSH attention on two residual streams."""

from collections.abc import Iterator
from dataclasses import replace
from math import lcm
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.mixers.lsh_attention import LshAttention
from manyheads.models.embedding import Embedding
from manyheads.models.readout import LanguageHead, Readout
from manyheads.parts.feedforward import MLP
from manyheads.parts.masks import And, Blocks, Causal
from manyheads.parts.norms import LayerNorm
from manyheads.parts.positions import Axial, Learned

# What `transformers` assumes where config.json does not say it.
DEFAULTS: dict[str, Any] = {
    "attention_head_size": 64,
    "attn_layers": ["local", "lsh", "local", "lsh", "local", "lsh"],
    "axial_pos_embds": True,
    "axial_pos_shape": [64, 64],
    "axial_pos_embds_dim": [64, 192],
    "feed_forward_size": 512,
    "hash_seed": None,
    "hidden_act": "relu",
    "hidden_dropout_prob": 0.05,
    "hidden_size": 256,
    "initializer_range": 0.02,
    "is_decoder": False,
    "layer_norm_eps": 1e-12,
    "local_num_chunks_before": 1,
    "local_num_chunks_after": 0,
    "local_attention_probs_dropout_prob": 0.05,
    "local_attn_chunk_length": 64,
    "lsh_attn_chunk_length": 64,
    "lsh_attention_probs_dropout_prob": 0.0,
    "lsh_num_chunks_before": 1,
    "lsh_num_chunks_after": 0,
    "max_position_embeddings": 4096,
    "num_attention_heads": 12,
    "num_buckets": None,
    "num_hashes": 1,
    "vocab_size": 320,
    "tie_word_embeddings": False,
}
ATTENTION = "attention.self_attention"
COUNT = config_keys.Form(lambda _, kinds: len(kinds))


class ReformerFamily(family.DecoderFamily):
    """The Reformer with a language head."""

    name = "reformer"
    classes = {"reformer": "Reformer"}
    class_ends = {LanguageHead: "ModelWithLMHead"}
    keys = {
        "hidden_size": config_keys.WIDTH,
        "vocab_size": config_keys.VOCABULARY,
        "feed_forward_size": config_keys.HIDDEN,
        "attn_layers": replace(config_keys.DEPTH, form=COUNT, written="never"),
        "hidden_act": config_keys.activation(),
        "hidden_dropout_prob": config_keys.dropout("embedding", config_keys.MISSING),
        "layer_norm_eps": config_keys.eps(),
        "initializer_range": config_keys.STD,
    }
    constants = {
        "is_decoder": True,
        "tie_word_embeddings": False,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    norm = LayerNorm
    dropouts = ("embedding", "embedding")

    root = "reformer."
    embedding = {
        "embedding.tokens": "embeddings.word_embeddings",
        "embedding.positions": "embeddings.position_embeddings.embedding",
        "stack.final_norm": "encoder.layer_norm",
    }
    layers = "encoder.layers"
    layer = {
        "attention.project": tuple(f"{ATTENTION}.{part}" for part in ("query", "key", "value")),
        "attention.output": "attention.output.dense",
        "mixer.project": (f"{ATTENTION}.query_key", f"{ATTENTION}.value"),
        "mixer.output": "attention.output.dense",
        "attention_residual.norm": "attention.layer_norm",
        "feedforward_residual.norm": "feed_forward.layer_norm",
        "feedforward.expand": "feed_forward.dense.dense",
        "feedforward.contract": "feed_forward.output.dense",
    }
    heads = {LanguageHead: {"readout": "lm_head.decoder"}}
    # `transformers` stores a bias of the language head and does not add it.
    unused_heads = ("lm_head.bias",)

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        complete = {**DEFAULTS, **config_json}
        _check(complete)
        return complete

    def read_embedding(self, parts: Parts) -> Embedding:
        return family.embedding_of(parts, position=_position(parts.json))

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig | LshAttention:
        local = parts.json["attn_layers"][index] == "local"
        return _local(parts.json) if local else _lsh(parts.json)

    def read_feedforward(self, parts: Parts, index: int) -> MLP:  # noqa: ARG002
        return MLP(dropout=parts.dropout("embedding"), **parts.feedforward)

    def read_residual(self, parts: Parts) -> str:  # noqa: ARG002
        return "reversible"

    def read_readout(self, parts: Parts) -> Readout:  # noqa: ARG002
        return LanguageHead(tied=False)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        kinds: list[str] = []
        described: dict[str, Any] = {}
        for layer in config.stack.layers:
            inner = getattr(layer.mixer or layer.attention, "inner", None)
            if not isinstance(inner, LshAttention | AttentionConfig):
                return None
            kinds.append("lsh" if isinstance(inner, LshAttention) else "local")
            described |= _describe_attention(inner)
        first = parts.mixer or parts.attention
        longest = getattr(parts.position, "longest", DEFAULTS["max_position_embeddings"])
        return described | {
            "num_attention_heads": first.heads,
            "attention_head_size": first.size,
            "attn_layers": kinds,
            "max_position_embeddings": longest,
            **_describe_position(parts.position),
        }

    def model_entries(self, config: Any) -> Iterator[Packed]:
        """The tables of a file have an axis of one for the other direction."""
        position = config.embedding.position
        if isinstance(position, Axial):
            rows = (position.rows, position.row_size)
            columns = (position.columns, position.column_size)
            source = "reformer.embeddings.position_embeddings.weights"
            name = "embedding.axial"
            yield Packed({f"{name}.rows.weight": rows}, f"{source}.0", (rows[0], 1, rows[1]))
            yield Packed({f"{name}.columns.weight": columns}, f"{source}.1", (1, *columns))

    def canonical_name(self, name: str) -> str | None:
        """Old files hold the numbers that stand for minus infinity."""
        return None if "mask_value_float" in name else name


REFORMER = ReformerFamily()


def _check(config_json: ConfigJson) -> None:
    kinds = set(config_json["attn_layers"])
    if not kinds or kinds - {"local", "lsh"}:
        raise ConfigError(
            f"attn_layers must be of local and lsh, got {config_json['attn_layers']!r:.200}"
        )
    if not config_json["is_decoder"]:
        raise ConfigError(
            "is_decoder=False: a Reformer that reads both ways is not supported",
            "use is_decoder=True",
        )
    for kind in sorted(kinds):
        if config_json[f"{kind}_num_chunks_after"]:
            raise ConfigError(
                f"{kind}_num_chunks_after must be 0 in a decoder, got "
                f"{config_json[f'{kind}_num_chunks_after']!r:.20}",
                "use 0",
            )
    if config_json["tie_word_embeddings"]:
        raise ConfigError(
            "tie_word_embeddings=True: the head reads two streams of the width of the embedding",
            "use false",
        )


def _local(config_json: ConfigJson) -> AttentionConfig:
    blocks = config_json["local_attn_chunk_length"], config_json["local_num_chunks_before"]
    dropout = float(config_json["local_attention_probs_dropout_prob"])
    return AttentionConfig(
        mask=Blocks(*blocks, 0) & Causal(), dropout=dropout, **_sizes(config_json)
    )


def _sizes(config_json: ConfigJson) -> dict[str, Any]:
    return {
        "width": config_json["hidden_size"],
        "heads": config_json["num_attention_heads"],
        "head_size": config_json["attention_head_size"],
    }


def _lsh(config_json: ConfigJson) -> LshAttention:
    chunk, buckets = config_json["lsh_attn_chunk_length"], config_json["num_buckets"]
    seed, longest = config_json["hash_seed"], config_json["max_position_embeddings"]
    if buckets is None and longest // chunk > (chunk + 1) ** 2:
        raise ConfigError(
            f"num_buckets is not set for texts of {longest} tokens in chunks of {chunk}",
            "set num_buckets",
        )
    # `transformers` pads texts so that all layers can cut them evenly.
    local = "local" in config_json["attn_layers"]
    whole = lcm(chunk, config_json["local_attn_chunk_length"]) if local else chunk
    many: tuple[int, ...] | Literal["auto"] = "auto"
    if buckets is not None:
        many = tuple(buckets) if isinstance(buckets, list | tuple) else (buckets,)
    return LshAttention(
        **_sizes(config_json),
        chunk=chunk,
        before=config_json["lsh_num_chunks_before"],
        rounds=config_json["num_hashes"],
        buckets=many,
        seed="random" if seed is None else seed,
        dropout=float(config_json["lsh_attention_probs_dropout_prob"] or 0.0),
        round_to="chunk" if whole == chunk else whole,
    )


def _position(config_json: ConfigJson) -> Axial | Learned:
    if not config_json["axial_pos_embds"]:
        return Learned(count=config_json["max_position_embeddings"])
    shape, sizes = config_json["axial_pos_shape"], config_json["axial_pos_embds_dim"]
    if len(shape) != 2 or len(sizes) != 2:
        raise ConfigError(f"axial_pos_shape must have two numbers, got {shape!r:.100}")
    return Axial(rows=shape[0], columns=shape[1], row_size=sizes[0], column_size=sizes[1])


def _describe_attention(inner: LshAttention | AttentionConfig) -> dict[str, Any]:
    """What config.json says about one kind of attention."""
    if isinstance(inner, LshAttention):
        many = None if inner.buckets == "auto" else list(inner.buckets)
        return {
            "lsh_attn_chunk_length": inner.chunk,
            "lsh_num_chunks_before": inner.before,
            "lsh_num_chunks_after": inner.after,
            "lsh_attention_probs_dropout_prob": inner.dropout,
            "num_hashes": inner.rounds,
            "num_buckets": many[0] if many is not None and len(many) == 1 else many,
            "hash_seed": None if inner.seed == "random" else inner.seed,
        }
    parts = (inner.mask.first, inner.mask.second) if isinstance(inner.mask, And) else ()
    blocks = next((part for part in parts if isinstance(part, Blocks)), None)
    if blocks is None:
        return {}
    return {
        "local_attn_chunk_length": blocks.size,
        "local_num_chunks_before": blocks.before,
        "local_num_chunks_after": blocks.after,
        "local_attention_probs_dropout_prob": inner.dropout,
    }


def _describe_position(position: object) -> dict[str, Any]:
    if not isinstance(position, Axial):
        return {"axial_pos_embds": False}
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": [position.rows, position.columns],
        "axial_pos_embds_dim": [position.row_size, position.column_size],
    }
