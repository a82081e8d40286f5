"""T5 1.0 and 1.1, or only the encoder: RMS norms, unscaled scores, no biases."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.family import Family, eps_of
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.embedding import Embedding
from manyheads.models.encoder import EncoderConfig
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, FeedForwardConfig, LayerConfig
from manyheads.models.readout import LanguageHead, NoReadout
from manyheads.models.recipes import ModelConfig
from manyheads.models.seq2seq import Seq2SeqConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP, Activation, GeGLU, SwiGLU
from manyheads.parts.masks import Causal, Full
from manyheads.parts.norms import PreNorm, RMSNorm
from manyheads.parts.positions.relative import T5Buckets

PLAIN: dict[str, Activation] = {"relu": "relu", "gelu": "gelu", "silu": "silu"}
# "gated-gelu" has always meant the tanh approximation of GELU.
GATED_GELU, GATED_SILU = "gated-gelu", "gated-silu"
ENCODER = "T5EncoderModel"


class T5Family(Family):
    """T5."""

    name = "t5"
    tied_copies = ("lm_head.weight",)
    # `transformers` ties the head where the file has none, whatever config.json says.
    file_decides_tying = True

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, norm = theirs["d_model"], RMSNorm(eps=eps_of(theirs, "layer_norm_epsilon", 1e-6))
        dropout = float(theirs.get("dropout_rate", 0.1))

        def attention(**own: Any) -> Branch[AttentionConfig]:
            config = AttentionConfig(
                width=width,
                heads=theirs["num_heads"],
                head_size=theirs["d_kv"],
                scale=1.0,
                dropout=dropout,
                **own,
            )
            return Branch(config, PreNorm(norm), dropout)

        def stack(layers: int, *, decodes: bool) -> StackConfig:
            position = T5Buckets(
                buckets=theirs.get("relative_attention_num_buckets", 32),
                reach=theirs.get("relative_attention_max_distance", 128),
                bidirectional=not decodes,
            )
            layer = LayerConfig(
                attention=attention(position=position, mask=Causal() if decodes else Full()),
                cross=attention(keys_from="memory") if decodes else None,
                feedforward=Branch(_feedforward(theirs, dropout), PreNorm(norm), dropout),
            )
            return StackConfig(width=width, layers=(layer,) * layers, final_norm=norm)

        layers = theirs["num_layers"]
        embedding = Embedding(vocabulary=theirs["vocab_size"], width=width, dropout=dropout)
        if ENCODER in (theirs.get("architectures") or ()):
            reads = stack(layers, decodes=False)
            return EncoderConfig(
                embedding=embedding,
                stack=reads,
                readout=NoReadout(),
                init=Initialization(draw="t5"),
            )
        if not theirs.get("is_encoder_decoder", True):
            raise ConfigError(
                "is_encoder_decoder=false contradicts architectures", f"use {ENCODER} or true"
            )
        return Seq2SeqConfig(
            embedding=embedding,
            encoder=stack(layers, decodes=False),
            decoder=stack(theirs.get("num_decoder_layers") or layers, decodes=True),
            readout=_readout(theirs),
            init=Initialization(draw="t5"),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, EncoderConfig | Seq2SeqConfig):
            return None
        reads = config.encoder if isinstance(config, Seq2SeqConfig) else config.stack
        if not reads.layers:
            return None
        first, norm = reads.layers[0], reads.final_norm
        if first.attention is None or first.feedforward is None or not isinstance(norm, RMSNorm):
            return None
        attention, position = first.attention.inner, first.attention.inner.position
        feedforward = _describe_feedforward(first.feedforward.inner)
        if feedforward is None or not isinstance(position, T5Buckets):
            return None
        whole = _describe_whole(config, position)
        if whole is None:
            return None
        return {
            "model_type": "t5",
            "d_model": reads.width,
            "d_kv": attention.size,
            "num_heads": attention.heads,
            "num_layers": len(reads.layers),
            "vocab_size": config.embedding.vocabulary,
            "relative_attention_num_buckets": position.buckets,
            "relative_attention_max_distance": position.reach,
            "layer_norm_epsilon": norm.eps,
            "dropout_rate": config.embedding.dropout,
            # Every T5 has these.
            "pad_token_id": 0,
            "eos_token_id": 1,
            **feedforward,
            **whole,
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        have = set(ours)
        table = [
            Entry("embedding.tokens.weight", ("shared.weight",)),
            Entry("readout.weight", ("lm_head.weight",)),
        ]
        if isinstance(config, Seq2SeqConfig):
            table += _side("encoder", config.encoder)
            table += _side("decoder", config.decoder)
        else:
            assert isinstance(config, EncoderConfig)
            table += _side("encoder", config.stack, ours="stack")
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Files may repeat the embedding for each side; the oldest have a bias that is not used."""
        repeated = name in ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
        unread = name.endswith(".EncDecAttention.relative_attention_bias.weight")
        return None if repeated or unread else name


T5 = T5Family()


def _describe_whole(
    config: EncoderConfig | Seq2SeqConfig, position: T5Buckets
) -> dict[str, Any] | None:
    """The keys for what comes with the encoder: nothing, or a decoder and a head."""
    if isinstance(config, EncoderConfig):
        return {"architectures": [ENCODER], "is_encoder_decoder": False}
    head = config.readout
    if not isinstance(head, LanguageHead) or not _same_buckets(config, position):
        return None
    return {
        "architectures": ["T5ForConditionalGeneration"],
        "is_encoder_decoder": True,
        "num_decoder_layers": len(config.decoder.layers),
        # Decoding starts from the padding.
        "decoder_start_token_id": 0,
        **_describe_readout(head),
    }


def _readout(theirs: Mapping[str, Any]) -> LanguageHead:
    # T5 1.1 unties its head; 1.0 ties it and scales its input. Since transformers 5 every
    # config.json says that it is tied, and only the scaling tells the two apart.
    tied = theirs.get("tie_word_embeddings", True) is not False
    if not theirs.get("scale_decoder_outputs", tied):
        return LanguageHead(tied=False)
    return LanguageHead(tied=True, scale=theirs["d_model"] ** -0.5)


def _describe_readout(head: LanguageHead) -> dict[str, Any]:
    scaled = head.scale != 1.0
    if head.tied and not scaled:
        return {"tie_word_embeddings": True, "scale_decoder_outputs": False}
    return {"tie_word_embeddings": scaled}


def _feedforward(theirs: Mapping[str, Any], dropout: float) -> FeedForwardConfig:
    kind = theirs.get("feed_forward_proj", "relu")
    if not isinstance(kind, str) or kind not in (*PLAIN, GATED_GELU, GATED_SILU):
        raise ConfigError(
            f"feed_forward_proj={kind!r:.200} is not supported",
            f"use {', '.join((*PLAIN, GATED_GELU, GATED_SILU))}",
        )
    # `transformers` saves what it derives from feed_forward_proj, and follows it when it differs.
    derived = "gelu_new" if kind == GATED_GELU else kind.removeprefix("gated-")
    name = theirs.get("dense_act_fn", derived)
    gated = theirs.get("is_gated_act", kind.startswith("gated-"))
    width, hidden = theirs["d_model"], theirs["d_ff"]
    if not gated and name in PLAIN:
        activation = PLAIN[name]
        return MLP(width=width, hidden=hidden, activation=activation, bias=False, dropout=dropout)
    if gated and name == "gelu_new":
        return GeGLU(width=width, hidden=hidden, activation="gelu_tanh", dropout=dropout)
    if gated and name == "gelu":
        return GeGLU(width=width, hidden=hidden, dropout=dropout)
    if gated and name == "silu":
        return SwiGLU(width=width, hidden=hidden, dropout=dropout)
    raise ConfigError(
        f"dense_act_fn={name!r:.200} and is_gated_act={gated!r:.200} are not supported",
        f"remove them, so that feed_forward_proj={kind!r} holds",
    )


def _describe_feedforward(config: FeedForwardConfig) -> dict[str, Any] | None:
    match config:
        case MLP(activation=activation) if activation in PLAIN:
            kind: str = activation
        case GeGLU():
            kind = GATED_GELU
        case SwiGLU():
            kind = GATED_SILU
        case _:
            return None
    return {"d_ff": config.hidden, "feed_forward_proj": kind}


def _same_buckets(config: Seq2SeqConfig, position: T5Buckets) -> bool:
    """Whether the decoder has the same buckets as the encoder, in one direction."""
    attention = config.decoder.attention(0)
    other = None if attention is None else attention.position
    return isinstance(other, T5Buckets) and (other.buckets, other.reach) == (
        position.buckets,
        position.reach,
    )


def _side(side: str, stack: StackConfig, *, ours: str = "") -> Iterator[Entry]:
    """The entries of one stack, which has the same name here unless `ours` gives another."""
    mine = ours or side
    bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
    yield Entry(f"{mine}.layers.0.attention.table.table", (bias,))
    yield Entry(f"{mine}.final_norm.weight", (f"{side}.final_layer_norm.weight",))
    for index, layer in enumerate(stack.layers):
        yield from _layer(f"{mine}.layers.{index}", f"{side}.block.{index}.layer", layer)


def _layer(mine: str, theirs: str, layer: LayerConfig) -> Iterator[Entry]:
    assert layer.attention is not None
    assert layer.feedforward is not None
    rows = tuple(layer.attention.inner.rows().values())
    last = 1 if layer.cross is None else 2
    own, other = f"{theirs}.0.SelfAttention", f"{theirs}.1.EncDecAttention"
    dense, hidden = f"{theirs}.{last}.DenseReluDense", layer.feedforward.inner.hidden
    gated = not isinstance(layer.feedforward.inner, MLP)
    inside = (f"{dense}.wi_0", f"{dense}.wi_1") if gated else (f"{dense}.wi",)
    for ours, parts, sizes in (
        ("attention.project", tuple(f"{own}.{part}" for part in "qkv"), rows),
        ("attention.output", (f"{own}.o",), ()),
        ("attention_residual.norm", (f"{theirs}.0.layer_norm",), ()),
        ("cross.project", (f"{other}.q",), ()),
        ("cross.project_memory", tuple(f"{other}.{part}" for part in "kv"), rows[1:]),
        ("cross.output", (f"{other}.o",), ()),
        ("cross_residual.norm", (f"{theirs}.1.layer_norm",), ()),
        ("feedforward.expand", inside, (hidden,) * len(inside)),
        ("feedforward.contract", (f"{dense}.wo",), ()),
        ("feedforward_residual.norm", (f"{theirs}.{last}.layer_norm",), ()),
    ):
        yield Entry(f"{mine}.{ours}.weight", tuple(f"{part}.weight" for part in parts), sizes)
