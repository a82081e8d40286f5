"""gpt-oss: learned sinks, windows in turn, and experts with biases and a clamped SwiGLU."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.llama import LLAMA
from manyheads.checkpoints.families.decoders.rope import (
    describe_rope,
    longest_of,
    read_rope,
    rope_of,
)
from manyheads.checkpoints.families.decoders.windows import (
    attentions_of,
    kind_of,
    layer_kinds,
    mask_of,
    window_of,
)
from manyheads.checkpoints.families.family import (
    CAUSAL_HEADS,
    Family,
    causal_readout,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Alternating, Entry
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.experts import ClampedSwiGLU, Experts
from manyheads.parts.norms import PreNorm, RMSNorm

# What `transformers` assumes where config.json does not say it.
THETA, WINDOW, HEAD_SIZE, LENGTH, EXPERTS, CHOSEN = 150_000.0, 128, 64, 131_072, 128, 4
YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "truncate": False,
    "original_max_position_embeddings": 4096,
}
# Every so many layers one sees the whole text.
EVERY = 2


class GptOssFamily(Family):
    """gpt-oss, not quantized."""

    name = "gpt_oss"
    tied_copies = LLAMA.tied_copies

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        _refuse_quantized(theirs)
        width, heads = theirs["hidden_size"], theirs["num_attention_heads"]
        norm = RMSNorm(eps=eps_of(theirs, "rms_norm_eps", 1e-5))
        experts = Experts(
            width=width,
            hidden=theirs["intermediate_size"],
            count=theirs.get("num_local_experts", theirs.get("num_experts", EXPERTS)),
            top_k=theirs.get("num_experts_per_tok", CHOSEN),
            bias=True,
            gating=ClampedSwiGLU(
                alpha=float(theirs.get("swiglu_alpha", 1.702)),
                limit=float(theirs.get("swiglu_limit", 7.0)),
            ),
        )
        position = read_rope(
            rope_of(theirs) or YARN,
            theta=theirs.get("rope_theta", THETA),
            longest=theirs.get("max_position_embeddings", LENGTH),
        )

        def layer(kind: str) -> LayerConfig:
            attention = AttentionConfig(
                width=width,
                heads=heads,
                kv_heads=theirs.get("num_key_value_heads") or heads,
                head_size=theirs.get("head_dim") or HEAD_SIZE,
                position=position,
                mask=mask_of(kind, theirs.get("sliding_window", WINDOW)),
                bias="all" if theirs.get("attention_bias", True) else "none",
                sink="learned",
                dropout=float(theirs.get("attention_dropout", 0.0)),
            )
            return LayerConfig(
                attention=Branch(attention, PreNorm(norm)),
                feedforward=Branch(experts, PreNorm(norm)),
            )

        tied = bool(theirs.get("tie_word_embeddings", False))
        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width),
            stack=StackConfig(
                width=width,
                layers=tuple(layer(kind) for kind in layer_kinds(theirs, EVERY)),
                final_norm=norm,
            ),
            readout=causal_readout(theirs, LanguageHead(tied=tied)),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        first, norm, head = config.stack.layers[0], config.stack.final_norm, config.readout
        if first.attention is None or first.feedforward is None or not isinstance(norm, RMSNorm):
            return None
        attention, experts = first.attention.inner, first.feedforward.inner
        rope = describe_rope(attention.position)
        if rope is None or not isinstance(experts, Experts) or experts.gating == "swiglu":
            return None
        attentions = attentions_of(config)
        return {
            "model_type": "gpt_oss",
            "architectures": ["GptOss" + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "num_key_value_heads": attention.key_heads,
            "head_dim": attention.size,
            "intermediate_size": experts.hidden,
            "num_local_experts": experts.count,
            "num_experts_per_tok": experts.top_k,
            "swiglu_alpha": experts.gating.alpha,
            "swiglu_limit": experts.gating.limit,
            "vocab_size": config.embedding.vocabulary,
            "rms_norm_eps": norm.eps,
            "rope_parameters": rope,
            "sliding_window": window_of(attentions, WINDOW),
            "layer_types": [kind_of(each) for each in attentions],
            "tie_word_embeddings": getattr(head, "tied", False),
            "attention_bias": attention.bias == "all",
            "attention_dropout": attention.dropout,
            "max_position_embeddings": longest_of(attention.position, LENGTH),
            "hidden_act": "silu",
            "initializer_range": config.init.std,
            "bos_token_id": None,
            "eos_token_id": None,
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, DecoderConfig)
        have = set(ours)
        table = LLAMA.tensor_map(config, have)
        for index in range(len(config.stack.layers)):
            table += _layer_entries(f"stack.layers.{index}", f"model.layers.{index}")
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        return LLAMA.canonical_name(name)


GPT_OSS = GptOssFamily()


def _layer_entries(ours: str, theirs: str) -> Iterator[Entry]:
    """The sinks, the router and the experts, whose gates and inputs alternate in a file."""
    experts = f"{theirs}.mlp.experts"
    yield Entry(f"{ours}.attention.sink", (f"{theirs}.self_attn.sinks",))
    for kind in ("weight", "bias"):
        yield Entry(f"{ours}.feedforward.router.{kind}", (f"{theirs}.mlp.router.{kind}",))
    yield Alternating(f"{ours}.feedforward.expand", (f"{experts}.gate_up_proj",))
    yield Alternating(f"{ours}.feedforward.expand_bias", (f"{experts}.gate_up_proj_bias",))
    yield Entry(f"{ours}.feedforward.contract", (f"{experts}.down_proj",))
    yield Entry(f"{ours}.feedforward.contract_bias", (f"{experts}.down_proj_bias",))


def _refuse_quantized(theirs: Mapping[str, Any]) -> None:
    quantized = theirs.get("quantization_config")
    if quantized:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized
        raise ConfigError(
            f"weights quantized by {method!s:.40} are not supported",
            "load it in transformers with Mxfp4Config(dequantize=True) and save it again",
        )
