"""Layers that see the whole text and layers that see a window, as `layer_types` names them."""

from collections.abc import Mapping, Sequence
from typing import Any

from manyheads.attention import AttentionConfig
from manyheads.checkpoints.families.rope import describe_rope
from manyheads.errors import ConfigError
from manyheads.models.decoder import DecoderConfig
from manyheads.parts.masks import Causal, Mask, Window

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(config_json: Mapping[str, Any], every: int | None = None) -> list[str]:
    """Whether each layer sees the whole text or a window.

    Without `layer_types`, one of `every` so many layers sees the whole text.
    """
    count, kinds = config_json["num_hidden_layers"], config_json.get("layer_types")
    if kinds is None and every is not None:
        return [FULL if (index + 1) % every == 0 else SLIDING for index in range(count)]
    if kinds is None or len(kinds) != count or not set(kinds) <= {FULL, SLIDING}:
        raise ConfigError(f"layer_types must have {FULL} or {SLIDING} for each of {count} layers")
    return list(kinds)


def mask_of(kind: str, window: int | None) -> Mask:
    """The mask of a layer; a window of one token sees that token alone."""
    if kind == FULL:
        return Causal()
    if window is None:
        raise ConfigError(f"layer_types has {SLIDING}, and sliding_window is missing", "set it")
    return Window(window - 1)


def attentions_of(config: DecoderConfig) -> list[AttentionConfig | None]:
    return [config.stack.attention(index) for index in range(len(config.stack.layers))]


def kind_of(attention: AttentionConfig | None) -> str:
    windowed = attention is not None and isinstance(attention.mask, Window)
    return SLIDING if windowed else FULL


def window_of(attentions: Sequence[AttentionConfig | None], default: int | None) -> int | None:
    """The window of the first layer that has one."""
    masks = [attention.mask for attention in attentions if attention is not None]
    widths = [int(mask.before) + 1 for mask in masks if isinstance(mask, Window)]
    return widths[0] if widths else default


def ropes_by_kind(attentions: Sequence[AttentionConfig | None]) -> dict[str, Any] | None:
    """The rotations of layers with and without a window; one kind alone stands for both."""
    ropes: dict[str, Any] = {}
    for attention in attentions:
        if attention is not None:
            rope = describe_rope(attention.position)
            if rope is None:
                return None
            ropes.setdefault(kind_of(attention), rope)
    if not ropes:
        return None
    either = next(iter(ropes.values()))
    return {kind: ropes.get(kind, either) for kind in (FULL, SLIDING)}
