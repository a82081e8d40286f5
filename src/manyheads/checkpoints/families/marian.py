"""Marian: the transformer of 2017 with all sines before all cosines and a bias on the logits."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.config_keys import (
    FLOAT,
    VOCABULARY,
    WIDTH,
    Form,
    Key,
    Parts,
    one_of,
    read_keys,
)
from manyheads.checkpoints.families.family import Family, Sources, embedding_of
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, Readout
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Sinusoidal

# The rows of the table of sinusoids in `transformers`; ours has no limit.
LONGEST = 1024
# Where several names mean one of our activations, we write the first.
ACTIVATIONS: dict[str, Activation] = {
    "swish": "silu",
    "silu": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
SIDES = ("encoder", "decoder")


class MarianFamily(Family):
    """Marian."""

    name = "marian"
    classes: Mapping[str, str] = {"marian": "Marian"}
    class_ends: Mapping[type[Readout], str] = {LanguageHead: "MTModel"}
    config_types = (Seq2SeqConfig,)
    keys: Mapping[str, Key] = {
        "d_model": WIDTH,
        "vocab_size": VOCABULARY,
        # The root of the width, or one.
        "scale_embedding": Key("embedding.scale", False, Form(write=lambda scale: scale != 1.0)),
        "dropout": Key("embedding.dropout", 0.1, FLOAT),
        "attention_dropout": Key("attention.dropout", 0.0, FLOAT),
        "activation_dropout": Key("feedforward.dropout", 0.0, FLOAT),
        "activation_function": Key("feedforward.activation", "gelu", one_of(ACTIVATIONS)),
        "init_std": Key("init.std", 0.02, FLOAT),
    }
    constants: Mapping[str, Any] = {
        "is_encoder_decoder": True,
        "max_position_embeddings": LONGEST,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        # Published models end a text with token 0; the last token pads and starts decoding.
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }

    embedding: Mapping[str, Sources] = {"embedding.tokens": "model.shared"}
    layer: Mapping[str, Sources] = {
        "attention.project": tuple(f"self_attn.{part}_proj" for part in "qkv"),
        "attention.output": "self_attn.out_proj",
        "attention_residual.norm": "self_attn_layer_norm",
        "cross.project": "encoder_attn.q_proj",
        "cross.project_memory": ("encoder_attn.k_proj", "encoder_attn.v_proj"),
        "cross.output": "encoder_attn.out_proj",
        "cross_residual.norm": "encoder_attn_layer_norm",
        "feedforward.expand": "fc1",
        "feedforward.contract": "fc2",
        "feedforward_residual.norm": "final_layer_norm",
    }
    tied_copies = ("lm_head.weight",)
    # Older files hold the sinusoids and copies of the token embedding.
    buffers = (".embed_positions.weight", ".embed_tokens.weight")

    def read_config(self, config_json: Mapping[str, Any]) -> Seq2SeqConfig:
        for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
            if not config_json.get(key, True):
                raise ConfigError(
                    f"{key}=false gives each side its own embedding, which is not supported",
                    "use a model with one embedding for encoder, decoder and language head",
                )
        parts = read_keys(self.keys, config_json)
        scale = parts.width**0.5 if parts.embedding["scale"] else 1.0
        return Seq2SeqConfig(
            embedding=embedding_of(parts, position=Sinusoidal(layout="halves"), scale=scale),
            encoder=_stack(parts, config_json, "encoder"),
            decoder=_stack(parts, config_json, "decoder"),
            readout=LanguageHead(tied=True, bias=True),
            init=Initialization(**parts.init),
        )

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        last = parts.embedding.vocabulary - 1
        described = {
            "decoder_vocab_size": last + 1,
            "pad_token_id": last,
            "decoder_start_token_id": last,
        }
        for side in SIDES:
            layers = getattr(config, side).layers
            first = layers[0] if layers else None
            if first is None or first.attention is None or first.feedforward is None:
                return None
            described |= {
                f"{side}_layers": len(layers),
                f"{side}_attention_heads": first.attention.inner.heads,
                f"{side}_ffn_dim": first.feedforward.inner.hidden,
            }
        return described

    def model_entries(self, config: Seq2SeqConfig) -> Iterator[Packed]:
        vocabulary = config.embedding.vocabulary
        yield Packed({"readout.bias": (vocabulary,)}, "final_logits_bias", (1, vocabulary))

    def layer_places(self, config: Seq2SeqConfig) -> Iterator[tuple[str, str, LayerConfig]]:
        for side in SIDES:
            for index, layer in enumerate(getattr(config, side).layers):
                yield f"{side}.layers.{index}", f"model.{side}.layers.{index}", layer


MARIAN = MarianFamily()


def _stack(parts: Parts, config_json: Mapping[str, Any], side: str) -> StackConfig:
    dropout, decodes = parts.embedding["dropout"], side == "decoder"
    heads = config_json[f"{side}_attention_heads"]

    def attention(**own: Any) -> Branch[AttentionConfig]:
        config = AttentionConfig(heads=heads, bias="all", **parts.attention, **own)
        return Branch(config, PostNorm(LayerNorm()), dropout)

    feedforward = MLP(hidden=config_json[f"{side}_ffn_dim"], **parts.feedforward)
    layer = LayerConfig(
        attention=attention(mask=Causal() if decodes else Full()),
        cross=attention(keys_from="memory") if decodes else None,
        feedforward=Branch(feedforward, PostNorm(LayerNorm()), dropout),
    )
    return StackConfig(width=parts.width, layers=(layer,) * config_json[f"{side}_layers"])
