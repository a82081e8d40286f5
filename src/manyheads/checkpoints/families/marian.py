"""Marian: the transformer of 2017 with all sines before all cosines and a bias on the logits."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import Family, activation_of
from manyheads.checkpoints.tensor_map import Entry, Packed
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP, Activation
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import LayerNorm, PostNorm
from manyheads.parts.positions import Sinusoidal

# The rows of the table of sinusoids in `transformers`; ours has no limit.
LONGEST = 1024
# Where several names mean one of our activations, we write the last.
ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}
# Ours below a layer, theirs below layers.N; a layer of the encoder has no cross-attention.
ATTENTIONS = (("attention", "self_attn"), ("cross", "encoder_attn"))
OTHERS = (
    ("feedforward.expand", "fc1"),
    ("feedforward.contract", "fc2"),
    ("feedforward_residual.norm", "final_layer_norm"),
)


class MarianFamily(Family):
    """Marian."""

    name = "marian"
    tied_copies = ("lm_head.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        for key in ("share_encoder_decoder_embeddings", "tie_word_embeddings"):
            if not theirs.get(key, True):
                raise ConfigError(
                    f"{key}=false gives each side its own embedding, which is not supported",
                    "use a model with one embedding for encoder, decoder and language head",
                )
        width = theirs["d_model"]
        scaled = theirs.get("scale_embedding", False)
        return Seq2SeqConfig(
            embedding=Embedding(
                vocabulary=theirs["vocab_size"],
                width=width,
                position=Sinusoidal(layout="halves"),
                scale=width**0.5 if scaled else 1.0,
                dropout=float(theirs.get("dropout", 0.1)),
            ),
            encoder=_stack(theirs, "encoder"),
            decoder=_stack(theirs, "decoder"),
            readout=LanguageHead(tied=True, bias=True),
            init=Initialization(std=float(theirs.get("init_std", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, Seq2SeqConfig):
            return None
        encoder, decoder = (
            _describe_stack(config.encoder, "encoder"),
            _describe_stack(config.decoder, "decoder"),
        )
        if encoder is None or decoder is None:
            return None
        vocabulary = config.embedding.vocabulary
        return {
            "model_type": "marian",
            "architectures": ["MarianMTModel"],
            "is_encoder_decoder": True,
            "d_model": config.encoder.width,
            "vocab_size": vocabulary,
            "decoder_vocab_size": vocabulary,
            "max_position_embeddings": LONGEST,
            "scale_embedding": config.embedding.scale != 1.0,
            "dropout": config.embedding.dropout,
            "share_encoder_decoder_embeddings": True,
            "tie_word_embeddings": True,
            "init_std": config.init.std,
            # Published models end a text with token 0; the last token pads and starts decoding.
            "eos_token_id": 0,
            "forced_eos_token_id": 0,
            "pad_token_id": vocabulary - 1,
            "decoder_start_token_id": vocabulary - 1,
            **encoder,
            **decoder,
        }

    def tensor_map(
        self,
        config: ModelConfig,
        ours: Iterable[str],  # noqa: ARG002
    ) -> list[Entry | Packed]:
        assert isinstance(config, Seq2SeqConfig)
        vocabulary = config.embedding.vocabulary
        return [
            Entry("embedding.tokens.weight", ("model.shared.weight",)),
            Packed({"readout.bias": (vocabulary,)}, "final_logits_bias", (1, vocabulary)),
            *_side("encoder", config.encoder),
            *_side("decoder", config.decoder),
        ]

    def canonical_name(self, name: str) -> str | None:
        """Older files hold the sinusoids and copies of the token embedding."""
        if name.endswith((".embed_positions.weight", ".embed_tokens.weight")):
            return None
        return name


MARIAN = MarianFamily()


def _stack(theirs: Mapping[str, Any], side: str) -> StackConfig:
    width, dropout, decodes = (
        theirs["d_model"],
        float(theirs.get("dropout", 0.1)),
        side != "encoder",
    )

    def attention(**own: Any) -> Branch[AttentionConfig]:
        config = AttentionConfig(
            width=width,
            heads=theirs[f"{side}_attention_heads"],
            bias="all",
            dropout=float(theirs.get("attention_dropout", 0.0)),
            **own,
        )
        return Branch(config, PostNorm(LayerNorm()), dropout)

    feedforward = MLP(
        width=width,
        hidden=theirs[f"{side}_ffn_dim"],
        activation=activation_of(theirs, "activation_function", ACTIVATIONS),
        dropout=float(theirs.get("activation_dropout", 0.0)),
    )
    layer = LayerConfig(
        attention=attention(mask=Causal() if decodes else Full()),
        cross=attention(keys_from="memory") if decodes else None,
        feedforward=Branch(feedforward, PostNorm(LayerNorm()), dropout),
    )
    return StackConfig(width=width, layers=(layer,) * theirs[f"{side}_layers"])


def _describe_stack(stack: StackConfig, side: str) -> dict[str, Any] | None:
    first = stack.layers[0] if stack.layers else None
    if first is None or first.attention is None or first.feedforward is None:
        return None
    attention, feedforward = first.attention.inner, first.feedforward.inner
    names = {ours: theirs for theirs, ours in ACTIVATIONS.items()}
    if not isinstance(feedforward, MLP) or feedforward.activation not in names:
        return None
    if attention.head_size != "even":
        return None
    return {
        f"{side}_layers": len(stack.layers),
        f"{side}_attention_heads": attention.heads,
        f"{side}_ffn_dim": feedforward.hidden,
        "attention_dropout": attention.dropout,
        "activation_dropout": feedforward.dropout,
        "activation_function": names[feedforward.activation],
    }


def _side(side: str, stack: StackConfig) -> Iterator[Entry]:
    for index, layer in enumerate(stack.layers):
        mine, theirs = f"{side}.layers.{index}", f"model.{side}.layers.{index}"
        for kind in ("weight", "bias"):
            for ours, name in ATTENTIONS if layer.cross else ATTENTIONS[:1]:
                yield from _attention(f"{mine}.{ours}", f"{theirs}.{name}", kind, stack.width)
            for ours, name in OTHERS:
                yield Entry(f"{mine}.{ours}.{kind}", (f"{theirs}.{name}.{kind}",))


def _attention(mine: str, theirs: str, kind: str, width: int) -> Iterator[Entry]:
    query, key, value = (f"{theirs}.{part}_proj.{kind}" for part in "qkv")
    if mine.endswith("cross"):
        yield Entry(f"{mine}.project.{kind}", (query,))
        yield Entry(f"{mine}.project_memory.{kind}", (key, value), (width,) * 2)
    else:
        yield Entry(f"{mine}.project.{kind}", (query, key, value), (width,) * 3)
    yield Entry(f"{mine}.output.{kind}", (f"{theirs}.out_proj.{kind}",))
    yield Entry(f"{mine}_residual.norm.{kind}", (f"{theirs}_layer_norm.{kind}",))
