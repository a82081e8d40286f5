"""GPT-NeoX and Pythia: parallel layers, and queries, keys and values of a head side by side."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.decoders.rope import (
    describe_rope,
    longest_of,
    read_rope,
    rope_of,
)
from manyheads.checkpoints.families.family import (
    CAUSAL_HEADS,
    HIDDEN_ACTIVATIONS,
    Family,
    activation_name,
    activation_of,
    causal_readout,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Entry, Interleaved
from manyheads.models.decoder import DecoderConfig
from manyheads.models.embedding import Embedding
from manyheads.models.initialization import Initialization
from manyheads.models.layer import Branch, LayerConfig
from manyheads.models.readout import LanguageHead, TokenHead
from manyheads.models.recipes import ModelConfig
from manyheads.models.stack import StackConfig
from manyheads.parts.feedforward import MLP
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm, PreNorm

# What `transformers` assumes where config.json does not say it.
LENGTH = 2048
FRACTION = 0.25
LAYER = (
    ("attention_residual.norm", "input_layernorm"),
    ("attention.project", "attention.query_key_value"),
    ("attention.output", "attention.dense"),
    ("feedforward_residual.norm", "post_attention_layernorm"),
    ("feedforward.expand", "mlp.dense_h_to_4h"),
    ("feedforward.contract", "mlp.dense_4h_to_h"),
)
# Files call the language head otherwise than `transformers` does.
HEAD, THEIR_HEAD = "embed_out", "lm_head"


class GPTNeoXFamily(Family):
    """GPT-NeoX and Pythia."""

    name = "gpt_neox"
    tied_copies = (f"{HEAD}.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        width, norm = theirs["hidden_size"], LayerNorm(eps=eps_of(theirs, "layer_norm_eps", 1e-5))
        dropout = float(theirs.get("hidden_dropout", 0.0))
        attention = AttentionConfig(
            width=width,
            heads=theirs["num_attention_heads"],
            position=read_rope(
                rope_of(theirs),
                theta=theirs.get("rotary_emb_base", 10_000.0),
                fraction=theirs.get("rotary_pct", FRACTION),
                longest=theirs.get("max_position_embeddings", LENGTH),
            ),
            mask=Causal(),
            bias="all" if theirs.get("attention_bias", True) else "none",
            dropout=float(theirs.get("attention_dropout", 0.0)),
        )
        feedforward = MLP(
            width=width,
            hidden=theirs["intermediate_size"],
            activation=activation_of(theirs, "hidden_act", HIDDEN_ACTIVATIONS),
        )
        layer = LayerConfig(
            attention=Branch(attention, PreNorm(norm), dropout),
            feedforward=Branch(feedforward, PreNorm(norm), dropout),
            residual="parallel" if theirs.get("use_parallel_residual", True) else "serial",
        )
        tied = bool(theirs.get("tie_word_embeddings", False))
        return DecoderConfig(
            embedding=Embedding(vocabulary=theirs["vocab_size"], width=width, dropout=dropout),
            stack=StackConfig(
                width=width, layers=(layer,) * theirs["num_hidden_layers"], final_norm=norm
            ),
            readout=causal_readout(theirs, LanguageHead(tied=tied)),
            init=Initialization(std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        layer, norm, head = config.stack.layers[0], config.stack.final_norm, config.readout
        if layer.attention is None or layer.feedforward is None or not isinstance(norm, LayerNorm):
            return None
        attention, feedforward = layer.attention.inner, layer.feedforward.inner
        rope = describe_rope(attention.position)
        if rope is None or not isinstance(feedforward, MLP):
            return None
        return {
            "model_type": "gpt_neox",
            "architectures": ["GPTNeoX" + CAUSAL_HEADS[type(head)]],
            "hidden_size": config.stack.width,
            "num_hidden_layers": len(config.stack.layers),
            "num_attention_heads": attention.heads,
            "intermediate_size": feedforward.hidden,
            "vocab_size": config.embedding.vocabulary,
            "layer_norm_eps": norm.eps,
            "hidden_act": activation_name(feedforward.activation),
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
            "use_parallel_residual": layer.residual == "parallel",
            "attention_bias": attention.bias == "all",
            "attention_dropout": attention.dropout,
            "hidden_dropout": layer.attention.dropout,
            "tie_word_embeddings": getattr(head, "tied", False),
            "max_position_embeddings": longest_of(attention.position, LENGTH),
            "initializer_range": config.init.std,
            "bos_token_id": None,
            "eos_token_id": None,
            **default_labels(head),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, DecoderConfig)
        have, head = set(ours), "score"
        if isinstance(config.readout, LanguageHead | TokenHead):
            head = HEAD if isinstance(config.readout, LanguageHead) else "classifier"
        table = [
            Entry("embedding.tokens.weight", ("gpt_neox.embed_in.weight",)),
            Entry("readout.weight", (f"{head}.weight",)),
            Entry("readout.bias", (f"{head}.bias",)),
        ]
        for kind in ("weight", "bias"):
            table.append(Entry(f"stack.final_norm.{kind}", (f"gpt_neox.final_layer_norm.{kind}",)))
            for index, layer in enumerate(config.stack.layers):
                assert layer.attention is not None
                attention = layer.attention.inner
                for mine, theirs in LAYER:
                    name = f"stack.layers.{index}.{mine}.{kind}"
                    names = (f"gpt_neox.layers.{index}.{theirs}.{kind}",)
                    if mine == "attention.project":
                        blocks = tuple(attention.rows().values())
                        entry = Interleaved(name, names, blocks=blocks, groups=attention.heads)
                        table.append(entry)
                    else:
                        table.append(Entry(name, names))
        return [entry for entry in table if entry.ours in have]

    def canonical_name(self, name: str) -> str | None:
        """Older files hold the causal mask and the rotary frequencies."""
        if name.endswith((".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")):
            return None
        if name == f"{THEIR_HEAD}.weight":
            return f"{HEAD}.weight"
        whole = ("gpt_neox.", f"{HEAD}.", "score.", "classifier.")
        return name if name.startswith(whole) else f"gpt_neox.{name}"

    def module_name(self, stem: str) -> str:
        return THEIR_HEAD if stem == HEAD else stem


GPT_NEOX = GPTNeoXFamily()
