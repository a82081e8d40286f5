"""GPT-2: weights stored [in, out], queries, keys and values in one matrix."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

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
from manyheads.checkpoints.tensor_map import Entry
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.models.readout import ClassHead, LanguageHead, Readout, TokenHead
from manyheads.models.recipes import ModelConfig, gpt2
from manyheads.parts.feedforward import MLP
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
# The heads; a tied language head is the token embedding.
HEADS: dict[type[Readout], str] = {
    LanguageHead: "lm_head",
    ClassHead: "score",
    TokenHead: "classifier",
}


class GPT2Family(Family):
    """GPT-2."""

    name = "gpt2"
    tied_copies = ("lm_head.weight",)

    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        if theirs.get("add_cross_attention", False):
            raise ConfigError(
                "add_cross_attention=True is not supported for GPT-2", "use a model without it"
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
        head = LanguageHead(tied=bool(theirs.get("tie_word_embeddings", True)))
        return replace(
            _with_layers(config, theirs),
            readout=causal_readout(theirs, head),
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
        attention, feedforward = layer.attention.inner, layer.feedforward.inner
        if not isinstance(feedforward, MLP):
            return None
        flags = {
            "scale_attn_weights": attention.score_scale != 1.0 or attention.size == 1,
            "scale_attn_by_inverse_layer_idx": _scales_by_layer(config),
        }
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
            "activation_function": activation_name(feedforward.activation),
            **{name: flag for name, flag in flags.items() if flag != DEFAULTS[name]},
            **({} if getattr(config.readout, "tied", True) else {"tie_word_embeddings": False}),
            "embd_pdrop": config.embedding.dropout,
            "attn_pdrop": layer.attention.inner.dropout,
            "resid_pdrop": layer.attention.dropout,
            # Without them `transformers` takes the id of GPT-2's own last token.
            "bos_token_id": None,
            "eos_token_id": None,
            **default_labels(config.readout),
        }

    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> list[Entry]:
        assert isinstance(config, DecoderConfig)
        table = [
            Entry("embedding.tokens.weight", ("transformer.wte.weight",)),
            Entry("embedding.positions.weight", ("transformer.wpe.weight",)),
        ]
        if type(config.readout) in HEADS:
            head, have = HEADS[type(config.readout)], set(ours)
            scores = [Entry(f"readout.{kind}", (f"{head}.{kind}",)) for kind in ("weight", "bias")]
            table += [entry for entry in scores if entry.ours in have]
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
        whole = ("transformer.", *(f"{head}." for head in HEADS.values()))
        return name if name.startswith(whole) else f"transformer.{name}"


GPT2 = GPT2Family()


# What `transformers` assumes where config.json does not say it.
DEFAULTS = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


def _with_layers(config: DecoderConfig, theirs: Mapping[str, Any]) -> DecoderConfig:
    """The layers with the dropout, the activation and the scales of a config.json."""
    known = {"activation_function": "gelu_new", **theirs}
    activation = activation_of(known, "activation_function", HIDDEN_ACTIVATIONS)
    flags = {name: bool(theirs.get(name, default)) for name, default in DEFAULTS.items()}
    layers = []
    for index, layer in enumerate(config.stack.layers):
        assert layer.attention is not None
        assert layer.feedforward is not None
        inner = replace(layer.attention.inner, dropout=float(theirs.get("attn_pdrop", 0.1)))
        if flags != DEFAULTS:
            root = inner.size**-0.5
            scale = root if flags["scale_attn_weights"] else 1.0
            if flags["scale_attn_by_inverse_layer_idx"]:
                scale /= index + 1
            inner = replace(inner, scale="root" if scale == root else scale)
        assert isinstance(layer.feedforward.inner, MLP)
        feedforward = replace(layer.feedforward.inner, activation=activation)
        layers.append(
            replace(
                layer,
                attention=replace(layer.attention, inner=inner),
                feedforward=replace(layer.feedforward, inner=feedforward),
            )
        )
    return replace(
        config,
        embedding=replace(config.embedding, dropout=float(theirs.get("embd_pdrop", 0.1))),
        stack=replace(config.stack, layers=tuple(layers)),
    )


def _scales_by_layer(config: DecoderConfig) -> bool:
    """Whether the scores of later layers are divided more; of one layer it does not matter."""
    attentions = [config.stack.attention(index) for index in range(len(config.stack.layers))]
    scales = {each.score_scale for each in attentions if each is not None}
    return len(scales) > 1


def _class(readout: Readout) -> str:
    return "LMHeadModel" if isinstance(readout, LanguageHead) else CAUSAL_HEADS[type(readout)]
