"""GPT-J: parallel layers with one norm, and rotary positions of neighbouring channels."""

import math
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families import config_keys, family
from manyheads.checkpoints.families.config_keys import ConfigJson, Parts
from manyheads.checkpoints.tensor_map import MapEntry, NeighbouringPairs
from manyheads.errors import ConfigError
from manyheads.models.layer import LayerConfig
from manyheads.models.readout import ClassHead, LanguageHead, NoReadout
from manyheads.parts.masks import Causal
from manyheads.parts.norms import LayerNorm
from manyheads.parts.positions import Rotary

# What `transformers` assumes where config.json does not say it, and the base that it always has.
ROTARY_DIM, THETA = 64, 10_000.0


class GPTJFamily(family.DecoderFamily):
    """GPT-J."""

    name = "gptj"
    classes = {"gptj": "GPTJ"}
    class_ends = {end: family.CAUSAL_HEADS[end] for end in (NoReadout, LanguageHead, ClassHead)}
    keys = {
        "n_embd": config_keys.WIDTH,
        "n_head": config_keys.HEADS,
        "n_layer": config_keys.DEPTH,
        "n_inner": config_keys.HIDDEN,
        "vocab_size": config_keys.VOCABULARY,
        "layer_norm_epsilon": config_keys.eps(1e-5),
        "activation_function": config_keys.activation("gelu_new"),
        "tie_word_embeddings": config_keys.UNTIED,
        "embd_pdrop": config_keys.dropout("embedding"),
        "attn_pdrop": config_keys.dropout("attention"),
        "resid_pdrop": config_keys.dropout("residual"),
        "initializer_range": config_keys.STD,
    }
    constants = {"bos_token_id": None, "eos_token_id": None}
    norm = LayerNorm

    root = "transformer."
    embedding = {"embedding.tokens": "wte", "stack.final_norm": "ln_f"}
    layers = "h"
    layer = {
        "attention_residual.norm": "ln_1",
        "attention.project": tuple(f"attn.{part}_proj" for part in "qkv"),
        "attention.output": "attn.out_proj",
        "feedforward.expand": "mlp.fc_in",
        "feedforward.contract": "mlp.fc_out",
    }
    heads = {LanguageHead: {"readout": "lm_head"}, ClassHead: {"readout": "score"}}
    tied_copies = ("lm_head.weight",)
    # Older files hold the causal mask, and newer ones may hold the angles.
    buffers = (".attn.bias", ".attn.masked_bias", ".attn.embed_positions")

    def complete(self, config_json: ConfigJson) -> ConfigJson:
        hidden = config_json.get("n_inner") or 4 * config_json["n_embd"]
        return {**config_json, "n_inner": hidden}

    def read_inner(self, parts: Parts, index: int) -> AttentionConfig:  # noqa: ARG002
        plain = AttentionConfig(mask=Causal(), **parts.attention)
        channels = parts.json.get("rotary_dim", ROTARY_DIM)
        if not isinstance(channels, int) or not 0 < channels <= plain.size:
            raise ConfigError(
                f"rotary_dim must be in 1 to {plain.size}, the size of a head, got {channels!r:.50}"
            )
        fraction = channels / plain.size
        if int(plain.size * fraction) < channels:
            # Rounded down, as 30 of 44 channels would be.
            fraction = math.nextafter(fraction, 1)
        position = Rotary(theta=THETA, fraction=fraction)
        return AttentionConfig(position=position, mask=Causal(), **parts.attention)

    def read_residual(self, parts: Parts) -> str:  # noqa: ARG002
        return "parallel_one_norm"

    def read_readout(self, parts: Parts) -> Any:
        return family.causal_readout(parts.json, LanguageHead(bias=True, **parts.readout))

    def describe(self, config: Any, parts: Parts) -> dict[str, Any] | None:  # noqa: ARG002
        position = getattr(parts.attention, "position", None)
        if not isinstance(position, Rotary):
            return None
        return {"rotary_dim": position.rotated_channels(parts.attention.size)}

    def entry(self, name: str, sources: tuple[str, ...], layer: LayerConfig | None) -> MapEntry:
        if layer is None or layer.attention is None or ".attention.project." not in name:
            return super().entry(name, sources, layer)
        attention = layer.attention.inner
        assert isinstance(attention.position, Rotary)
        channels = attention.position.rotated_channels(attention.size)
        return NeighbouringPairs(name, sources, size=attention.size, channels=channels)


GPTJ = GPTJFamily()
