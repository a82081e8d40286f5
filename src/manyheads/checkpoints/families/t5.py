"""T5 1.0 and 1.1, or only the encoder: RMS norms, unscaled scores, no biases."""

from collections.abc import Mapping
from typing import Any

from manyheads.checkpoints.families import config_keys
from manyheads.checkpoints.families.config_keys import ConfigJson, Key, Parts
from manyheads.checkpoints.families.family import Family, Sources, gated_feedforward, seq2seq_layer
from manyheads.errors import ConfigError
from manyheads.models import initialization, stack
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.layer import FeedForwardConfig, LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.parts import norms
from manyheads.parts.feedforward import MLP, Activation, GeGLU, SwiGLU
from manyheads.parts.positions.relative import T5Buckets

PLAIN: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "silu": "silu"}
# "gated-gelu" has always meant the tanh approximation of GELU.
GATED_GELU, GATED_SILU = "gated-gelu", "gated-silu"
ENCODER = "T5EncoderModel"
BUCKETS, REACH = "attention.position.buckets", "attention.position.reach"
BLOCKS = "{}.block.{{}}.layer".format
SELF, CROSS = "0.SelfAttention", "1.EncDecAttention"


class T5Family(Family):
    """T5."""

    name = "t5"
    classes = {"t5": "T5"}
    class_ends = {NoReadout: "EncoderModel", LanguageHead: "ForConditionalGeneration"}
    config_types = (EncoderConfig, Seq2SeqConfig)
    keys = {
        "d_model": config_keys.WIDTH,
        "d_kv": config_keys.HEAD_SIZE,
        "num_heads": config_keys.HEADS,
        "num_layers": config_keys.DEPTH,
        "d_ff": config_keys.HIDDEN,
        "vocab_size": config_keys.VOCABULARY,
        "relative_attention_num_buckets": Key("position.buckets", 32, computed=BUCKETS),
        "relative_attention_max_distance": Key("position.reach", 128, computed=REACH),
        "layer_norm_epsilon": config_keys.eps(1e-6),
        "dropout_rate": config_keys.dropout("embedding", 0.1),
    }
    # Every T5 has these.
    constants = {"pad_token_id": 0, "eos_token_id": 1}

    stacks = {
        "stack": BLOCKS("encoder"),
        "encoder": BLOCKS("encoder"),
        "decoder": BLOCKS("decoder"),
    }
    embedding = {
        "embedding.tokens": "shared",
        "stack.final_norm": "encoder.final_layer_norm",
        "encoder.final_norm": "encoder.final_layer_norm",
        "decoder.final_norm": "decoder.final_layer_norm",
    }
    layer = {
        # The first layer owns what all of them share.
        "attention.table.table": f"{SELF}.relative_attention_bias.weight",
        "attention.project": tuple(f"{SELF}.{part}" for part in "qkv"),
        "attention.output": f"{SELF}.o",
        "attention_residual.norm": "0.layer_norm",
        "cross.project": f"{CROSS}.q",
        "cross.project_memory": (f"{CROSS}.k", f"{CROSS}.v"),
        "cross.output": f"{CROSS}.o",
        "cross_residual.norm": "1.layer_norm",
    }
    heads = {LanguageHead: {"readout": "lm_head"}}
    tied_copies = ("lm_head.weight",)
    # `transformers` ties the head where the file has none, whatever config.json says.
    file_decides_tying = True
    # Files may repeat the embedding for each side; the oldest have a bias that is not used.
    buffers = (
        "encoder.embed_tokens.weight",
        "decoder.embed_tokens.weight",
        ".EncDecAttention.relative_attention_bias.weight",
    )

    def read_config(self, config_json: ConfigJson) -> EncoderConfig | Seq2SeqConfig:
        parts = config_keys.read_keys(self.keys, config_json, norms.RMSNorm)
        embedding, init = Embedding(**parts.embedding), initialization.Initialization(draw="t5")
        encoder = _stack(parts, parts.depth, decodes=False)
        if ENCODER in (config_json.get("architectures") or ()):
            return EncoderConfig(embedding=embedding, stack=encoder, readout=NoReadout(), init=init)
        if not config_json.get("is_encoder_decoder", True):
            raise ConfigError(
                "is_encoder_decoder=false contradicts architectures", f"use {ENCODER} or true"
            )
        depth = config_json.get("num_decoder_layers") or parts.depth
        return Seq2SeqConfig(
            embedding=embedding,
            encoder=encoder,
            decoder=_stack(parts, depth, decodes=True),
            readout=_readout(config_json),
            init=init,
        )

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        match parts.feedforward:
            case MLP(activation=activation) if activation in PLAIN:
                kind: str = activation
            case GeGLU():
                kind = GATED_GELU
            case SwiGLU():
                kind = GATED_SILU
            case _:
                return None
        if isinstance(config, EncoderConfig):
            return {"feed_forward_proj": kind, "is_encoder_decoder": False}
        head = config.readout
        if not isinstance(head, LanguageHead):
            return None
        return {
            "feed_forward_proj": kind,
            "is_encoder_decoder": True,
            "num_decoder_layers": len(config.decoder.layers),
            # Decoding starts from the padding.
            "decoder_start_token_id": 0,
            "tie_word_embeddings": head.scale != 1.0 or head.tied,
            **({"scale_decoder_outputs": False} if head.tied and head.scale == 1.0 else {}),
        }

    def layer_table(self, layer: LayerConfig) -> Mapping[str, Sources]:
        """The feed-forward is the last of two or three sublayers, with one matrix or a pair."""
        last = 1 if layer.cross is None else 2
        dense = f"{last}.DenseReluDense"
        plain = layer.feedforward is None or isinstance(layer.feedforward.inner, MLP)
        return {
            **self.layer,
            "feedforward.expand": f"{dense}.wi" if plain else (f"{dense}.wi_0", f"{dense}.wi_1"),
            "feedforward.contract": f"{dense}.wo",
            "feedforward_residual.norm": f"{last}.layer_norm",
        }


T5 = T5Family()


def _stack(parts: Parts, depth: int, *, decodes: bool) -> stack.StackConfig:
    dropout = parts.dropout("embedding")
    layer = seq2seq_layer(
        {"scale": 1.0, "dropout": dropout, **parts.attention},
        _feedforward(parts.json, dropout),
        norms.PreNorm(parts.norm),
        dropout,
        decodes=decodes,
        position=T5Buckets(bidirectional=not decodes, **parts.position),
    )
    return stack.StackConfig(width=parts.width, layers=(layer,) * depth, final_norm=parts.norm)


def _readout(config_json: ConfigJson) -> LanguageHead:
    # T5 1.1 unties its head; 1.0 ties it and scales its input. Since transformers 5 every
    # config.json says that it is tied, and only the scaling tells the two apart.
    tied = config_json.get("tie_word_embeddings", True) is not False
    if not config_json.get("scale_decoder_outputs", tied):
        return LanguageHead(tied=False)
    return LanguageHead(tied=True, scale=config_json["d_model"] ** -0.5)


def _feedforward(config_json: ConfigJson, dropout: float) -> FeedForwardConfig:
    kind = config_json.get("feed_forward_proj", "relu")
    if not isinstance(kind, str) or kind not in (*PLAIN, GATED_GELU, GATED_SILU):
        raise ConfigError(
            f"feed_forward_proj={kind!r:.200} is not supported",
            f"use {', '.join((*PLAIN, GATED_GELU, GATED_SILU))}",
        )
    # `transformers` saves what it derives from feed_forward_proj, and follows it when it differs.
    derived = "gelu_new" if kind == GATED_GELU else kind.removeprefix("gated-")
    name = config_json.get("dense_act_fn", derived)
    gated = config_json.get("is_gated_act", kind.startswith("gated-"))
    sizes = {"width": config_json["d_model"], "hidden": config_json["d_ff"]}
    if not gated and name in PLAIN:
        return MLP(**sizes, activation=PLAIN[name], bias=False, dropout=dropout)
    if gated and name in ("gelu_new", "gelu", "silu"):
        return gated_feedforward(config_keys.GATED_ACTIVATIONS[name], **sizes, dropout=dropout)
    raise ConfigError(
        f"dense_act_fn={name!r:.200} and is_gated_act={gated!r:.200} are not supported",
        f"remove them, so that feed_forward_proj={kind!r} holds",
    )
