"""Marian: the transformer of 2017 with all sines before all cosines and a bias on the logits."""

from collections.abc import Iterator
from typing import Any

from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.models import initialization, readout, seq2seq, stack
from manyheads.parts.feedforward import MLP
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Sinusoidal

# The rows of the table of sinusoids in `transformers`; ours has no limit.
LONGEST = 1024
# Of the names for one activation, the first is written.
ACTIVATIONS = {"swish": "silu", **config_keys.HIDDEN_ACTIVATIONS}
SIDES = ("encoder", "decoder")


class MarianFamily(family.Family):
    """Marian."""

    name = "marian"
    classes = {"marian": "Marian"}
    class_ends = {readout.LanguageHead: "MTModel"}
    config_types = (seq2seq.Seq2SeqConfig,)
    keys = {
        "d_model": config_keys.WIDTH,
        "vocab_size": config_keys.VOCABULARY,
        # The root of the width, or one.
        "scale_embedding": config_keys.Key(
            "embedding.scale", False, config_keys.Form(write=lambda scale: scale != 1.0)
        ),
        "dropout": config_keys.dropout("embedding", 0.1),
        "attention_dropout": config_keys.dropout("attention"),
        "activation_dropout": config_keys.dropout("feedforward"),
        "activation_function": config_keys.activation("gelu", ACTIVATIONS),
        "init_std": config_keys.STD,
    }
    constants = {
        "is_encoder_decoder": True,
        "max_position_embeddings": LONGEST,
        "share_encoder_decoder_embeddings": True,
        "tie_word_embeddings": True,
        # Published models end a text with token 0; the last token pads and starts decoding.
        "eos_token_id": 0,
        "forced_eos_token_id": 0,
    }

    stacks = {side: f"model.{side}.layers.{{}}" for side in SIDES}
    embedding = {"embedding.tokens": "model.shared"}
    layer = {
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

    def read_config(self, config_json: ConfigJson) -> seq2seq.Seq2SeqConfig:
        for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
            if not config_json.get(key, True):
                raise ConfigError(
                    f"{key}=false gives each side its own embedding, which is not supported",
                    "use a model with one embedding for encoder, decoder and language head",
                )
        parts = config_keys.read_keys(self.keys, config_json, LayerNorm)
        scale = parts.width**0.5 if parts.embedding["scale"] else 1.0
        return seq2seq.Seq2SeqConfig(
            embedding=family.embedding_of(parts, position=Sinusoidal(layout="halves"), scale=scale),
            encoder=_stack(parts, "encoder"),
            decoder=_stack(parts, "decoder"),
            readout=readout.LanguageHead(tied=True, bias=True),
            init=initialization.Initialization(**parts.init),
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

    def model_entries(self, config: seq2seq.Seq2SeqConfig) -> Iterator[Packed]:
        vocabulary = config.embedding.vocabulary
        yield Packed({"readout.bias": (vocabulary,)}, "final_logits_bias", (1, vocabulary))


MARIAN = MarianFamily()


def _stack(parts: Parts, side: str) -> stack.StackConfig:
    layer = family.seq2seq_layer(
        {"heads": parts.json[f"{side}_attention_heads"], "bias": "all", **parts.attention},
        MLP(hidden=parts.json[f"{side}_ffn_dim"], **parts.feedforward),
        PostNorm(parts.norm),
        parts.dropout("embedding"),
        decodes=side == "decoder",
    )
    return stack.StackConfig(width=parts.width, layers=(layer,) * parts.json[f"{side}_layers"])
