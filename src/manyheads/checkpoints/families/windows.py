"""Layers that see the whole text and layers that see a window, as `layer_types` names them."""

from typing import Any

from manyheads.checkpoints.families.config_keys import ConfigJson
from manyheads.checkpoints.families.rope import describe_rope
from manyheads.errors import ConfigError
from manyheads.models.stack import StackConfig
from manyheads.parts.masks import Causal, Mask, Window

FULL, SLIDING = "full_attention", "sliding_attention"


def layer_kinds(
    config_json: ConfigJson, every: int | None = None, rest: str = SLIDING
) -> list[str]:
    """Whether each layer sees the whole text or is of the kind that the `rest` have.

    Without `layer_types`, one of `every` so many layers sees the whole text.
    """
    count, kinds = config_json["num_hidden_layers"], config_json.get("layer_types")
    if kinds is None and every is not None:
        return [FULL if (index + 1) % every == 0 else rest for index in range(count)]
    if kinds is None or len(kinds) != count or not set(kinds) <= {FULL, rest}:
        raise ConfigError(f"layer_types must have {FULL} or {rest} for each of {count} layers")
    return list(kinds)


def mask_of(kind: str, window: int | None) -> Mask:
    """The mask of a layer; a window of one token sees that token alone."""
    if kind == FULL:
        return Causal()
    if window is None:
        raise ConfigError(f"layer_types has {SLIDING}, and sliding_window is missing", "set it")
    return Window(window - 1)


def describe_windows(stack: StackConfig, default: int | None) -> dict[str, Any]:
    """The kind of each layer, and the window of the first that has one."""
    masks = [layer.attention.inner.mask if layer.attention else None for layer in stack.layers]
    widths = [int(mask.before) + 1 for mask in masks if isinstance(mask, Window)]
    return {
        "layer_types": [SLIDING if isinstance(mask, Window) else FULL for mask in masks],
        "sliding_window": widths[0] if widths else default,
    }


def ropes_by_kind(stack: StackConfig) -> dict[str, Any] | None:
    """The rotations of layers with and without a window; one kind alone stands for both."""
    ropes: dict[str, Any] = {}
    for layer, kind in zip(stack.layers, describe_windows(stack, None)["layer_types"], strict=True):
        if layer.attention is not None:
            rope = describe_rope(layer.attention.inner.position)
            if rope is None:
                return None
            ropes.setdefault(kind, rope)
    if not ropes:
        return None
    either = next(iter(ropes.values()))
    return {kind: ropes.get(kind, either) for kind in (FULL, SLIDING)}
