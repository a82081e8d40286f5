"""The rotary positions of a config.json, under `rope_parameters` or the older `rope_scaling`."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from manyheads.errors import ConfigError
from manyheads.parts.positions import rotary

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# The default length if config.json leaves it out; rotary positions have no limit.
LONGEST = 32768


def rope_of(config_json: Mapping[str, Any]) -> dict[str, Any]:
    """What a config.json says of rotary positions."""
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters must be a table, got {rope!r:.200}")
    return dict(rope)


def read_rope(
    rope: Mapping[str, Any], *, theta: Any, fraction: Any = 1.0, longest: int = LONGEST
) -> rotary.Rotary:
    """Our positions; `theta` and `fraction` are what holds where `rope` does not say it.

    `longest` is max_position_embeddings, the length of the texts in training or after extension.
    """
    return rotary.Rotary(
        theta=float(rope.get("rope_theta") or theta),
        fraction=float(rope.get("partial_rotary_factor") or fraction),
        scaling=read_scaling(rope, longest),
    )


def read_scaling(rope: Mapping[str, Any], longest: int) -> rotary.Scaling:
    kind = rope.get("rope_type", rope.get("type", "default"))
    length = int(rope.get("original_max_position_embeddings") or longest)
    match kind:
        case "default":
            return rotary.NoScaling()
        case "linear":
            return rotary.LinearScaling(factor=float(rope["factor"]))
        case "dynamic":
            return rotary.DynamicScaling(factor=float(rope["factor"]), original_length=longest)
        case "llama3":
            return rotary.Llama3Scaling(
                factor=float(rope["factor"]),
                original_length=length,
                fast=float(rope["high_freq_factor"]),
                slow=float(rope["low_freq_factor"]),
            )
        case "yarn":
            return _yarn(rope, length, longest)
        case "longrope":
            return _longrope(rope, length, longest)
    raise ConfigError(f"rope_type={kind!r} is not supported", f"use {', '.join(KINDS)}")


def _yarn(rope: Mapping[str, Any], length: int, longest: int) -> rotary.YarnScaling:
    factor = float(rope.get("factor") or longest / length)
    return rotary.YarnScaling(
        factor=factor,
        original_length=length,
        fast=float(rope.get("beta_fast") or 32.0),
        slow=float(rope.get("beta_slow") or 1.0),
        attention_factor=_attention_factor(rope, factor),
        truncate=bool(rope.get("truncate", True)),
    )


def _attention_factor(rope: Mapping[str, Any], factor: float) -> float | Literal["published"]:
    def published(weight: float) -> float:
        return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0

    own = rope.get("attention_factor")
    weights = rope.get("mscale"), rope.get("mscale_all_dim")
    if own is None and all(weights):
        own = published(float(weights[0] or 0)) / published(float(weights[1] or 0))
    if own is None or abs(own - published(1.0)) < 1e-6:
        return "published"
    return float(own)


def _longrope(rope: Mapping[str, Any], length: int, longest: int) -> rotary.LongRopeScaling:
    factor, own = float(rope.get("factor") or longest / length), rope.get("attention_factor")
    if own is None:
        own = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (tuple(map(float, rope[f"{name}_factor"])) for name in ("short", "long"))
    return rotary.LongRopeScaling(
        short=short, long=long, original_length=length, temperature=float(own)
    )


def describe_rope(position: object) -> dict[str, Any] | None:
    """`rope_parameters` for our positions; None if there are none for them."""
    if not isinstance(position, rotary.Rotary) or isinstance(position.scaling, rotary.NTKScaling):
        return None
    rope: dict[str, Any] = {"rope_theta": position.theta}
    if position.fraction != 1.0:
        rope["partial_rotary_factor"] = position.fraction
    return rope | _describe_scaling(position.scaling)


def _describe_scaling(scaling: rotary.Scaling) -> dict[str, Any]:
    match scaling:
        case rotary.LinearScaling(factor=factor):
            return {"rope_type": "linear", "factor": factor}
        case rotary.DynamicScaling(factor=factor):
            return {"rope_type": "dynamic", "factor": factor}
        case rotary.Llama3Scaling(factor=factor, original_length=length, fast=fast, slow=slow):
            bounds = {"high_freq_factor": fast, "low_freq_factor": slow}
            own = {"factor": factor, "original_max_position_embeddings": length}
            return {"rope_type": "llama3"} | own | bounds
        case rotary.YarnScaling(factor=factor, original_length=length, fast=fast, slow=slow):
            own = {"factor": factor, "original_max_position_embeddings": length}
            own |= {"beta_fast": fast, "beta_slow": slow}
            if scaling.attention_factor != "published":
                own["attention_factor"] = scaling.attention_factor
            if not scaling.truncate:
                own["truncate"] = False
            return {"rope_type": "yarn"} | own
        case rotary.LongRopeScaling(short=short, long=long, original_length=length):
            return {
                "rope_type": "longrope",
                "attention_factor": scaling.temperature,
                "short_factor": list(short),
                "long_factor": list(long),
                "original_max_position_embeddings": length,
            }
    return {"rope_type": "default"}


def longest_of(position: object, default: int = LONGEST) -> int:
    """max_position_embeddings for our positions, which a dynamic scaling starts from."""
    if isinstance(position, rotary.Rotary) and isinstance(position.scaling, rotary.DynamicScaling):
        return position.scaling.original_length
    return default
