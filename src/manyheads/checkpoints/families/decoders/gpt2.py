"""GPT-2: weights stored [in, out], queries, keys and values in one matrix."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.family import (
    CAUSAL_HEADS,
    Family,
    causal_readout,
    default_labels,
    eps_of,
)
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.readout import ClassHead, LanguageHead, Readout, TokenHead
from manyheads.models.recipes import ModelConfig, gpt2
from manyheads.parts.positions import Learned

# Ours below a layer, theirs below h.N, and whether theirs is stored [in, out].
LAYER = (
    ("attention_residual.norm", "ln_1", False),
    ("attention.project", "attn.c_attn", True),
    ("attention.output", "attn.c_proj", True),
    ("feedforward_residual.norm", "ln_2", False),
    ("feedforward.expand", "mlp.c_fc", True),
    ("feedforward.contract", "mlp.c_proj", True),
)
# The heads for classes; logits of tokens come from the token embedding.
SCORES: dict[type[Readout], str] = {ClassHead: "score", TokenHead: "classifier"}
# Values that we support; with any other the model would load and compute something else.
SUPPORTED = {
    "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
    "tie_word_embeddings": (True,),
    "scale_attn_weights": (True,),
    "scale_attn_by_inverse_layer_idx": (False,),
    "add_cross_attention": (False,),
}


class GPT2Family(Family):
    """GPT-2."""

    name = "gpt2"
    tied_copies = ("lm_head.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        for name, known in SUPPORTED.items():
            if theirs.get(name, known[0]) not in known:
                raise ConfigError(
                    f"{name}={theirs[name]!r} is not supported for GPT-2",
                    f"use {' or '.join(map(repr, known))}",
                )
        config = gpt2(
            width=theirs["n_embd"],
            heads=theirs["n_head"],
            layers=theirs["n_layer"],
            vocabulary=theirs["vocab_size"],
            positions=theirs["n_positions"],
            dropout=float(theirs.get("resid_pdrop", 0.1)),
            hidden=theirs.get("n_inner") or 4 * theirs["n_embd"],
            eps=eps_of(theirs, "layer_norm_epsilon", 1e-5),
        )
        assert isinstance(config.readout, LanguageHead)
        return replace(
            _with_dropout(config, theirs),
            readout=causal_readout(theirs, config.readout),
            init=replace(config.init, std=float(theirs.get("initializer_range", 0.02))),
        )

    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        if not isinstance(config, DecoderConfig) or not config.stack.layers:
            return None
        position, layer = config.embedding.position, config.stack.layers[0]
        if (
            not isinstance(position, Learned)
            or layer.attention is None
            or layer.feedforward is None
        ):
            return None
        return {
            "model_type": "gpt2",
            "architectures": [f"GPT2{_class(config.readout)}"],
            "n_embd": config.stack.width,
            "n_head": layer.attention.inner.heads,
            "n_layer": len(config.stack.layers),
            "n_inner": layer.feedforward.inner.hidden,
            "n_positions": position.count,
            "vocab_size": config.embedding.vocabulary,
            "layer_norm_epsilon": getattr(config.stack.final_norm, "eps", 1e-5),
            "activation_function": "gelu_new",
            "embd_pdrop": config.embedding.dropout,
            "attn_pdrop": layer.attention.inner.dropout,
            "resid_pdrop": layer.attention.dropout,
            # Without them `transformers` takes the id of GPT-2's own last token.
            "bos_token_id": None,
            "eos_token_id": None,
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:  # noqa: ARG002
        assert isinstance(config, DecoderConfig)
        table = [
            Entry("embedding.tokens.weight", ("transformer.wte.weight",)),
            Entry("embedding.positions.weight", ("transformer.wpe.weight",)),
        ]
        if isinstance(config.readout, ClassHead | TokenHead):
            kinds, head = ("weight", "bias"), SCORES[type(config.readout)]
            scores = [Entry(f"readout.{kind}", (f"{head}.{kind}",)) for kind in kinds]
            table += scores if config.readout.bias else scores[:1]
        for kind in ("weight", "bias"):
            table.append(Entry(f"stack.final_norm.{kind}", (f"transformer.ln_f.{kind}",)))
            for index in range(len(config.stack.layers)):
                for mine, theirs, transposed in LAYER:
                    table.append(
                        Entry(
                            f"stack.layers.{index}.{mine}.{kind}",
                            (f"transformer.h.{index}.{theirs}.{kind}",),
                            transposed=transposed and kind == "weight",
                        )
                    )
        return table

    def canonical_name(self, name: str) -> str | None:
        """Older files lack the prefix and hold the causal mask."""
        if name.endswith((".attn.bias", ".attn.masked_bias")):
            return None
        whole = ("transformer.", "lm_head.", *(f"{head}." for head in SCORES.values()))
        return name if name.startswith(whole) else f"transformer.{name}"


GPT2 = GPT2Family()


def _with_dropout(config: DecoderConfig, theirs: Mapping[str, Any]) -> DecoderConfig:
    """Attention weights and embeddings have dropout rates of their own."""
    layers = []
    for layer in config.stack.layers:
        assert layer.attention is not None
        inner = replace(layer.attention.inner, dropout=float(theirs.get("attn_pdrop", 0.1)))
        layers.append(replace(layer, attention=replace(layer.attention, inner=inner)))
    return replace(
        config,
        embedding=replace(config.embedding, dropout=float(theirs.get("embd_pdrop", 0.1))),
        stack=replace(config.stack, layers=tuple(layers)),
    )


def _class(readout: Readout) -> str:
    return "LMHeadModel" if isinstance(readout, LanguageHead) else CAUSAL_HEADS[type(readout)]
