"""GPT-2: weights stored [in, out], queries, keys and values in one matrix."""

from dataclasses import replace
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.tensor_map import Entry, MapEntry
from manyheads.errors import ConfigError
from manyheads.models.initialization import Initialization
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, TokenHead
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm

# What `transformers` assumes where config.json does not say it.
SCALES = {"scale_attn_weights": True, "scale_attn_by_inverse_layer_idx": False}


class GPT2Family(family.DecoderFamily):
    """GPT-2."""

    name = "gpt2"
    classes = {"gpt2": "GPT2"}
    class_ends = {**family.CAUSAL_HEADS, LanguageHead: "LMHeadModel"}
    keys = {
        "n_embd": config_keys.WIDTH,
        "n_head": config_keys.HEADS,
        "n_layer": config_keys.DEPTH,
        "n_inner": config_keys.HIDDEN,
        "n_positions": config_keys.POSITIONS,
        "vocab_size": config_keys.VOCABULARY,
        "layer_norm_epsilon": config_keys.eps(1e-5),
        "activation_function": config_keys.activation("gelu_new"),
        "tie_word_embeddings": replace(config_keys.TIED, written="changed"),
        "embd_pdrop": config_keys.dropout("embedding", 0.1),
        "attn_pdrop": config_keys.dropout("attention", 0.1),
        "resid_pdrop": config_keys.dropout("residual", 0.1),
        "initializer_range": config_keys.UNWRITTEN_STD,
    }
    # Without them `transformers` takes the id of GPT-2's own last token.
    constants = {"bos_token_id": None, "eos_token_id": None}
    init = Initialization(scaled_outputs=True)
    norm = LayerNorm

    root = "transformer."
    embedding = {
        "embedding.tokens": "wte",
        "embedding.positions": "wpe",
        "stack.final_norm": "ln_f",
    }
    layers = "h"
    layer = {
        "attention_residual.norm": "ln_1",
        "attention.project": "attn.c_attn",
        "attention.output": "attn.c_proj",
        "feedforward_residual.norm": "ln_2",
        "feedforward.expand": "mlp.c_fc",
        "feedforward.contract": "mlp.c_proj",
    }
    # A tied language head is the token embedding.
    heads = {
        LanguageHead: {"readout": "lm_head"},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "classifier"},
    }
    tied_copies = ("lm_head.weight",)
    # Older files hold the causal mask.
    buffers = (".attn.bias", ".attn.masked_bias")

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        if config_json.get("add_cross_attention", False):
            raise ConfigError(
                "add_cross_attention=True is not supported for GPT-2", "use a model without it"
            )
        hidden = config_json.get("n_inner") or 4 * config_json["n_embd"]
        return {**config_json, "n_inner": hidden}

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:
        scaled, by_layer = (bool(parts.json.get(*item)) for item in SCALES.items())
        plain = AttentionConfig(mask=Causal(), bias="all", **parts.attention)
        root = plain.size**-0.5
        scale = (root if scaled else 1.0) / (index + 1 if by_layer else 1)
        return replace(plain, scale="root" if scale == root else scale)

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        attentions = [config.stack.attention(index) for index in range(len(config.stack.layers))]
        scales = {attention.score_scale for attention in attentions if attention is not None}
        flags = {
            "scale_attn_weights": parts.attention.score_scale != 1.0 or parts.attention.size == 1,
            # Of one layer it does not matter.
            "scale_attn_by_inverse_layer_idx": len(scales) > 1,
        }
        return {name: value for name, value in flags.items() if value != SCALES[name]}

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        matrix = layer is not None and name.endswith(".weight") and "_residual." not in name
        return Entry(name, sources, transposed=matrix)


GPT2 = GPT2Family()
