"""GPT-NeoX and Pythia: parallel layers, and queries, keys and values of a head side by side."""

from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import Parts
from manyheads.checkpoints.families.rope import describe_rope, longest_of, read_rope
from manyheads.checkpoints.tensor_map import Interleaved, MapEntry
from manyheads.models.embedding import Embedding
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, TokenHead
from manyheads.parts import masks, norms

# What `transformers` assumes where config.json does not say it.
THETA, FRACTION, LENGTH = 10_000.0, 0.25, 2048
# Files call the language head otherwise than `transformers` does.
HEAD, MODULE_HEAD = "embed_out", "lm_head"


class GPTNeoXFamily(family.DecoderFamily):
    """GPT-NeoX and Pythia."""

    name = "gpt_neox"
    classes = {"gpt_neox": "GPTNeoX"}
    keys = {
        **config_keys.SIZES,
        "layer_norm_eps": config_keys.eps(1e-5),
        "hidden_act": config_keys.activation("gelu"),
        "attention_bias": config_keys.Key("attention.bias", True, config_keys.flag("all", "none")),
        "attention_dropout": config_keys.dropout("attention"),
        "hidden_dropout": config_keys.dropout("residual"),
        "tie_word_embeddings": config_keys.UNTIED,
        "initializer_range": config_keys.STD,
    }
    constants = {"bos_token_id": None, "eos_token_id": None}
    norm = norms.LayerNorm

    root = "gpt_neox."
    embedding = {"embedding.tokens": "embed_in", "stack.final_norm": "final_layer_norm"}
    layers = "layers"
    layer = {
        "attention_residual.norm": "input_layernorm",
        "attention.project": "attention.query_key_value",
        "attention.output": "attention.dense",
        "feedforward_residual.norm": "post_attention_layernorm",
        "feedforward.expand": "mlp.dense_h_to_4h",
        "feedforward.contract": "mlp.dense_4h_to_h",
    }
    heads = {
        LanguageHead: {"readout": HEAD},
        ClassHead: {"readout": "score"},
        TokenHead: {"readout": "classifier"},
    }
    tied_copies = (f"{HEAD}.weight",)
    # Older files hold the causal mask and the rotary frequencies.
    buffers = (".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq")
    older = {f"gpt_neox.{MODULE_HEAD}.": f"{HEAD}."}

    def read_embedding(self, parts: Parts) -> Embedding:
        return family.embedding_of(parts, **parts.residual)

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        theta, fraction = (
            parts.json.get("rotary_emb_base", THETA),
            parts.json.get("rotary_pct", FRACTION),
        )
        position = read_rope(parts.json, theta, LENGTH, fraction=fraction)
        return AttentionConfig(position=position, mask=masks.Causal(), **parts.attention)

    def read_residual(self, parts: Parts) -> str:
        return "parallel" if parts.json.get("use_parallel_residual", True) else "serial"

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:
        rope = describe_rope(parts.attention.position)
        if rope is None:
            return None
        return {
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope},
            "use_parallel_residual": config.stack.layers[0].residual == "parallel",
            "max_position_embeddings": longest_of(parts.attention.position, LENGTH),
        }

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        if layer is None or layer.attention is None or ".attention.project." not in name:
            return super().entry(name, sources, layer)
        attention = layer.attention.inner
        blocks = tuple(attention.rows().values())
        return Interleaved(name, sources, blocks=blocks, groups=attention.heads)

    def module_name(self, stem: str) -> str:
        return MODULE_HEAD if stem == HEAD else stem


GPT_NEOX = GPTNeoXFamily()
