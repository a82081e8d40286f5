"""Marian: the transformer of 2017 with all sines before all cosines and a bias on the logits."""

from collections.abc import Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.tensor_map import Packed
from manyheads.errors import ConfigError
from manyheads.models import initialization, readout, seq2seq, stack
from manyheads.models.layer import Branch, LayerConfig
from manyheads.parts import masks, norms
from manyheads.parts.feedforward import MLP, Activation
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


class MarianFamily(family.Family):
    """Marian."""

    name = "marian"
    classes: Mapping[str, str] = {"marian": "Marian"}
    class_ends: Mapping[type[readout.Readout], str] = {readout.LanguageHead: "MTModel"}
    config_types = (seq2seq.Seq2SeqConfig,)
    keys: Mapping[str, config_keys.Key] = {
        "d_model": config_keys.WIDTH,
        "vocab_size": config_keys.VOCABULARY,
        # The root of the width, or one.
        "scale_embedding": config_keys.Key(
            "embedding.scale", False, config_keys.Form(write=lambda scale: scale != 1.0)
        ),
        "dropout": config_keys.Key("embedding.dropout", 0.1, config_keys.FLOAT),
        "attention_dropout": config_keys.Key("attention.dropout", 0.0, config_keys.FLOAT),
        "activation_dropout": config_keys.Key("feedforward.dropout", 0.0, config_keys.FLOAT),
        "activation_function": config_keys.Key(
            "feedforward.activation", "gelu", config_keys.one_of(ACTIVATIONS)
        ),
        "init_std": config_keys.Key("init.std", 0.02, config_keys.FLOAT),
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

    embedding: Mapping[str, family.Sources] = {"embedding.tokens": "model.shared"}
    layer: Mapping[str, family.Sources] = {
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

    def read_config(self, config_json: Mapping[str, Any]) -> seq2seq.Seq2SeqConfig:
        for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
            if not config_json.get(key, True):
                raise ConfigError(
                    f"{key}=false gives each side its own embedding, which is not supported",
                    "use a model with one embedding for encoder, decoder and language head",
                )
        parts = config_keys.read_keys(self.keys, config_json)
        scale = parts.width**0.5 if parts.embedding["scale"] else 1.0
        return seq2seq.Seq2SeqConfig(
            embedding=family.embedding_of(parts, position=Sinusoidal(layout="halves"), scale=scale),
            encoder=_stack(parts, config_json, "encoder"),
            decoder=_stack(parts, config_json, "decoder"),
            readout=readout.LanguageHead(tied=True, bias=True),
            init=initialization.Initialization(**parts.init),
        )

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:
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

    def layer_places(self, config: seq2seq.Seq2SeqConfig) -> Iterator[tuple[str, str, LayerConfig]]:
        for side in SIDES:
            for index, layer in enumerate(getattr(config, side).layers):
                yield f"{side}.layers.{index}", f"model.{side}.layers.{index}", layer


MARIAN = MarianFamily()


def _stack(
    parts: config_keys.Parts, config_json: Mapping[str, Any], side: str
) -> stack.StackConfig:
    dropout, decodes = parts.embedding["dropout"], side == "decoder"
    heads = config_json[f"{side}_attention_heads"]

    def attention(**own: Any) -> Branch[AttentionConfig]:
        config = AttentionConfig(heads=heads, bias="all", **parts.attention, **own)
        return Branch(config, norms.PostNorm(norms.LayerNorm()), dropout)

    feedforward = MLP(hidden=config_json[f"{side}_ffn_dim"], **parts.feedforward)
    layer = LayerConfig(
        attention=attention(mask=masks.Causal() if decodes else masks.Full()),
        cross=attention(keys_from="memory") if decodes else None,
        feedforward=Branch(feedforward, norms.PostNorm(norms.LayerNorm()), dropout),
    )
    return stack.StackConfig(width=parts.width, layers=(layer,) * config_json[f"{side}_layers"])
