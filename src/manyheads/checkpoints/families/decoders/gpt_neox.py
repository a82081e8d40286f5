"""GPT-NeoX and Pythia: parallel layers, and queries, keys and values of a head side by side."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.rope import describe_rope, longest_of, read_rope, rope_of
from manyheads.checkpoints.tensor_map import Either, Entry, Interleaved
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, Readout, TokenHead
from manyheads.parts import feedforward, masks, norms

# What `transformers` assumes where config.json does not say it.
LENGTH = 2048
FRACTION = 0.25
# Files call the language head otherwise than `transformers` does.
HEAD, MODULE_HEAD = "embed_out", "lm_head"


class GPTNeoXFamily(family.DecoderFamily):
    """GPT-NeoX and Pythia."""

    name = "gpt_neox"
    classes: Mapping[str, str] = {"gpt_neox": "GPTNeoX"}
    keys: Mapping[str, config_keys.Key] = {
        "hidden_size": config_keys.WIDTH,
        "num_hidden_layers": config_keys.DEPTH,
        "num_attention_heads": config_keys.HEADS,
        "intermediate_size": config_keys.HIDDEN,
        "vocab_size": config_keys.VOCABULARY,
        "layer_norm_eps": config_keys.Key("norm.eps", 1e-5, config_keys.EPS),
        "hidden_act": config_keys.Key(
            "feedforward.activation", "gelu", config_keys.one_of(family.HIDDEN_ACTIVATIONS)
        ),
        "attention_bias": config_keys.Key("attention.bias", True, config_keys.flag("all", "none")),
        "attention_dropout": config_keys.Key("attention.dropout", 0.0, config_keys.FLOAT),
        "hidden_dropout": config_keys.Key("residual.dropout", 0.0, config_keys.FLOAT),
        "tie_word_embeddings": config_keys.UNTIED,
        "initializer_range": config_keys.STD,
    }
    constants: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None}

    root = "gpt_neox."
    embedding: Mapping[str, family.Sources] = {
        "embedding.tokens": "embed_in",
        "stack.final_norm": "final_layer_norm",
    }
    layers = "layers"
    layer: Mapping[str, family.Sources] = {
        "attention_residual.norm": "input_layernorm",
        "attention.project": "attention.query_key_value",
        "attention.output": "attention.dense",
        "feedforward_residual.norm": "post_attention_layernorm",
        "feedforward.expand": "mlp.dense_h_to_4h",
        "feedforward.contract": "mlp.dense_4h_to_h",
    }
    heads: Mapping[type[Readout], Mapping[str, family.Sources]] = {
        LanguageHead: {"readout": HEAD},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "classifier"},
    }
    tied_copies = (f"{HEAD}.weight",)
    # Older files hold the causal mask and the rotary frequencies.
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    older: Mapping[str, str] = {f"gpt_neox.{MODULE_HEAD}.": f"{HEAD}."}

    def read_norm(self, parts: config_keys.Parts) -> norms.LayerNorm:
        return norms.LayerNorm(**parts.norm)

    def read_embedding(self, parts: config_keys.Parts) -> Embedding:
        return family.embedding_of(parts, **parts.residual)

    def read_layers(
        self, parts: config_keys.Parts, norm: norms.LayerNorm, config_json: Mapping[str, Any]
    ) -> Iterable[LayerConfig]:
        position = read_rope(
            rope_of(config_json),
            theta=config_json.get("rotary_emb_base", 10_000.0),
            fraction=config_json.get("rotary_pct", FRACTION),
            longest=config_json.get("max_position_embeddings", LENGTH),
        )
        parallel = config_json.get("use_parallel_residual", True)
        layer = family.layer_of(
            AttentionConfig(position=position, mask=masks.Causal(), **parts.attention),
            feedforward.MLP(**parts.feedforward),
            norms.PreNorm(norm),
            parts.residual["dropout"],
            residual="parallel" if parallel else "serial",
        )
        return (layer,) * parts.depth

    def describe(self, config: Any, parts: config_keys.Parts) -> dict[str, Any] | None:
        rope = describe_rope(parts.attention.position)
        if rope is None:
            return None
        return {
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
            "use_parallel_residual": config.stack.layers[0].residual == "parallel",
            "max_position_embeddings": longest_of(parts.attention.position, LENGTH),
        }

    def entry(
        self, name: str, sources: tuple[str, ...], layer: LayerConfig | None
    ) -> Entry | Either:
        if layer is None or layer.attention is None or ".attention.project." not in name:
            return super().entry(name, sources, layer)
        attention = layer.attention.inner
        blocks = tuple(attention.rows().values())
        return Interleaved(name, sources, blocks=blocks, groups=attention.heads)

    def module_name(self, stem: str) -> str:
        return MODULE_HEAD if stem == HEAD else stem


GPT_NEOX = GPTNeoXFamily()
