"""Reformer (arXiv 2001.04451): local and LSH attention on two residual streams."""

from collections.abc import Iterable, Iterator, Mapping
from math import lcm
from typing import Any, Literal

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import (
    HIDDEN_ACTIVATIONS,
    Family,
    activation_name,
    activation_of,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Entry, Packed
from manyheads.errors import ConfigError
from manyheads.mixers.lsh_attention import LshAttention
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.masks import And, Blocks, Causal
from manyheads.parts.norms import LayerNorm, PreNorm
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


class ReformerFamily(Family):
    """The Reformer with a language head."""

    name = "reformer"

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        theirs = {**DEFAULTS, **theirs}
        _check(theirs)
        width, dropout = theirs["hidden_size"], float(theirs["hidden_dropout_prob"])
        norm = LayerNorm(eps=eps_of(theirs, "layer_norm_eps"))
        feedforward = MLP(
            width=width,
            hidden=theirs["feed_forward_size"],
            activation=activation_of(theirs, "hidden_act", HIDDEN_ACTIVATIONS),
            dropout=dropout,
        )
        layers = []
        for kind in theirs["attn_layers"]:
            local = _local(theirs) if kind == "local" else None
            layers.append(
                LayerConfig(
                    attention=Branch(local, PreNorm(norm), dropout) if local else None,
                    mixer=None if local else Branch(_lsh(theirs), PreNorm(norm), dropout),
                    feedforward=Branch(feedforward, PreNorm(norm), dropout),
                    residual="reversible",
                )
            )
        return DecoderConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=_position(theirs),
                dropout=dropout,
            ),
            stack=StackConfig(width=width, layers=tuple(layers), final_norm=norm),
            readout=LanguageHead(tied=False),
            init=Initialization(std=float(theirs["initializer_range"])),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.reversible:
            return None
        position, norm, kinds = config.embedding.position, config.stack.final_norm, []
        heads: list[LshAttention | AttentionConfig] = []
        said: dict[str, Any] = {}
        for layer in config.stack.layers:
            branch = layer.mixer or layer.attention
            if branch is None or not isinstance(branch.inner, LshAttention | AttentionConfig):
                return None
            lsh = isinstance(branch.inner, LshAttention)
            kinds.append("lsh" if lsh else "local")
            heads.append(branch.inner)
            said |= _described(branch.inner) or {}
        feedforward = config.stack.layers[0].feedforward
        if feedforward is None or not isinstance(feedforward.inner, MLP):
            return None
        return {
            "model_type": "reformer",
            "architectures": ["ReformerModelWithLMHead"],
            "is_decoder": True,
            "hidden_size": config.stack.width,
            "vocab_size": config.embedding.vocabulary,
            "num_attention_heads": heads[0].heads,
            "attention_head_size": heads[0].size,
            "attn_layers": kinds,
            "feed_forward_size": feedforward.inner.hidden,
            "hidden_act": activation_name(feedforward.inner.activation),
            "hidden_dropout_prob": config.embedding.dropout,
            "layer_norm_eps": norm.eps if isinstance(norm, LayerNorm) else 1e-12,
            "initializer_range": config.init.std,
            "max_position_embeddings": position.longest
            if isinstance(position, Learned | Axial)
            else DEFAULTS["max_position_embeddings"],
            **_described_position(position),
            **said,
            "tie_word_embeddings": False,
            "bos_token_id": None,
            "eos_token_id": None,
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry | Packed]:
        assert isinstance(config, DecoderConfig)
        names = [
            ("embedding.tokens.weight", "reformer.embeddings.word_embeddings.weight"),
            (
                "embedding.positions.weight",
                "reformer.embeddings.position_embeddings.embedding.weight",
            ),
            ("readout.weight", "lm_head.decoder.weight"),
            ("stack.final_norm.weight", "reformer.encoder.layer_norm.weight"),
            ("stack.final_norm.bias", "reformer.encoder.layer_norm.bias"),
        ]
        have = set(ours)
        table: list[Entry | Packed] = [Entry(own, (other,)) for own, other in names if own in have]
        position = config.embedding.position
        if isinstance(position, Axial):
            table += _axial_tables(position)
        for index, layer in enumerate(config.stack.layers):
            table += _layer_map(layer, f"stack.layers.{index}", f"reformer.encoder.layers.{index}")
        return table

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:  # noqa: ARG002
        """`transformers` stores a bias of the language head and does not add it."""
        return {"lm_head.bias": "lm_head.bias"}

    def canonical_name(self, name: str) -> str | None:
        """Old files hold the numbers that stand for minus infinity."""
        return None if "mask_value_float" in name else name


REFORMER = ReformerFamily()


def _check(theirs: Mapping[str, Any]) -> None:
    kinds = set(theirs["attn_layers"])
    if not kinds or kinds - {"local", "lsh"}:
        raise ConfigError(
            f"attn_layers must be of local and lsh, got {theirs['attn_layers']!r:.200}"
        )
    if not theirs["is_decoder"]:
        raise ConfigError(
            "is_decoder=False: a Reformer that reads both ways is not supported",
            "use is_decoder=True",
        )
    for kind in sorted(kinds):
        if theirs[f"{kind}_num_chunks_after"]:
            raise ConfigError(
                f"{kind}_num_chunks_after must be 0 in a decoder, got "
                f"{theirs[f'{kind}_num_chunks_after']!r:.20}",
                "use 0",
            )
    if theirs["tie_word_embeddings"]:
        raise ConfigError(
            "tie_word_embeddings=True: the head reads two streams of the width of the embedding",
            "use false",
        )


def _local(theirs: Mapping[str, Any]) -> AttentionConfig:
    return AttentionConfig(
        width=theirs["hidden_size"],
        heads=theirs["num_attention_heads"],
        head_size=theirs["attention_head_size"],
        mask=Blocks(theirs["local_attn_chunk_length"], theirs["local_num_chunks_before"], 0)
        & Causal(),
        dropout=float(theirs["local_attention_probs_dropout_prob"]),
    )


def _lsh(theirs: Mapping[str, Any]) -> LshAttention:
    chunk, seed, buckets = (
        theirs["lsh_attn_chunk_length"],
        theirs["hash_seed"],
        theirs["num_buckets"],
    )
    if buckets is None and theirs["max_position_embeddings"] // chunk > (chunk + 1) ** 2:
        raise ConfigError(
            f"num_buckets is not set for texts of {theirs['max_position_embeddings']} tokens in "
            f"chunks of {chunk}",
            "set num_buckets",
        )
    # `transformers` pads texts so that all layers can cut them evenly.
    local = "local" in theirs["attn_layers"]
    whole = lcm(chunk, theirs["local_attn_chunk_length"]) if local else chunk
    many: tuple[int, ...] | Literal["auto"] = "auto"
    if buckets is not None:
        many = tuple(buckets) if isinstance(buckets, list | tuple) else (buckets,)
    return LshAttention(
        width=theirs["hidden_size"],
        heads=theirs["num_attention_heads"],
        head_size=theirs["attention_head_size"],
        chunk=chunk,
        before=theirs["lsh_num_chunks_before"],
        rounds=theirs["num_hashes"],
        buckets=many,
        seed="random" if seed is None else seed,
        dropout=float(theirs["lsh_attention_probs_dropout_prob"] or 0.0),
        round_to="chunk" if whole == chunk else whole,
    )


def _position(theirs: Mapping[str, Any]) -> Axial | Learned:
    if not theirs["axial_pos_embds"]:
        return Learned(count=theirs["max_position_embeddings"])
    shape, sizes = theirs["axial_pos_shape"], theirs["axial_pos_embds_dim"]
    if len(shape) != 2 or len(sizes) != 2:
        raise ConfigError(f"axial_pos_shape must have two numbers, got {shape!r:.100}")
    return Axial(rows=shape[0], columns=shape[1], row_size=sizes[0], column_size=sizes[1])


def _described(inner: LshAttention | AttentionConfig) -> dict[str, Any] | None:
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
        return None
    return {
        "local_attn_chunk_length": blocks.size,
        "local_num_chunks_before": blocks.before,
        "local_num_chunks_after": blocks.after,
        "local_attention_probs_dropout_prob": inner.dropout,
    }


def _described_position(position: object) -> dict[str, Any]:
    if not isinstance(position, Axial):
        return {"axial_pos_embds": False}
    return {
        "axial_pos_embds": True,
        "axial_pos_shape": [position.rows, position.columns],
        "axial_pos_embds_dim": [position.row_size, position.column_size],
    }


def _axial_tables(at: Axial) -> list[Packed]:
    """Theirs have an axis of one for the other direction."""
    rows, columns = (at.rows, at.row_size), (at.columns, at.column_size)
    theirs = "reformer.embeddings.position_embeddings.weights"
    return [
        Packed({"embedding.axial.rows.weight": rows}, f"{theirs}.0", (rows[0], 1, rows[1])),
        Packed({"embedding.axial.columns.weight": columns}, f"{theirs}.1", (1, *columns)),
    ]


def _layer_map(layer: LayerConfig, ours: str, theirs: str) -> Iterator[Entry]:
    attends = f"{theirs}.attention.self_attention"
    branch = layer.mixer or layer.attention
    assert branch is not None
    inner = branch.inner
    assert isinstance(inner, LshAttention | AttentionConfig)
    lsh = isinstance(inner, LshAttention)
    kind = "mixer" if lsh else "attention"
    parts = ("query_key", "value") if lsh else ("query", "key", "value")
    rows = (inner.heads * inner.size,) * len(parts)
    projected = tuple(f"{attends}.{part}.weight" for part in parts)
    yield Entry(f"{ours}.{kind}.project.weight", projected, rows)
    yield Entry(f"{ours}.{kind}.output.weight", (f"{theirs}.attention.output.dense.weight",))
    names = {
        "attention_residual.norm": "attention.layer_norm",
        "feedforward_residual.norm": "feed_forward.layer_norm",
        "feedforward.expand": "feed_forward.dense.dense",
        "feedforward.contract": "feed_forward.output.dense",
    }
    for own, other in names.items():
        for part in ("weight", "bias"):
            yield Entry(f"{ours}.{own}.{part}", (f"{theirs}.{other}.{part}",))
