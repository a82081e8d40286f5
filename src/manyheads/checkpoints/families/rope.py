"""The rotary positions of a config.json, under `rope_parameters` or the older `rope_scaling`."""

import math
from collections.abc import Mapping
from typing import Any, Literal

from manyheads.checkpoints.families.config_keys import ConfigJson
from manyheads.errors import ConfigError
from manyheads.parts.positions import rotary

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
# The default length if config.json leaves it out; rotary positions have no limit.
LONGEST = 32768


def rope_of(config_json: ConfigJson) -> dict[str, Any]:
    """What a config.json says of rotary positions."""
    rope = config_json.get("rope_scaling") or config_json.get("rope_parameters") or {}
    if not isinstance(rope, Mapping):
        raise ConfigError(f"rope_parameters must be a table, got {rope!r:.200}")
    return dict(rope)


def read_rope(
    config_json: ConfigJson,
    theta: Any,
    longest: int = LONGEST,
    *,
    rope: Mapping[str, Any] | None = None,
    fraction: Any = 1.0,
) -> rotary.Rotary:
    """Our positions, by `rope` or what config.json says of them.

    `theta`, `longest` and `fraction` are what holds where neither says it. The length is that of
    the texts in training or after extension.
    """
    rope = rope_of(config_json) if rope is None else rope
    return rotary.Rotary(
        theta=float(rope.get("rope_theta") or config_json.get("rope_theta", theta)),
        fraction=float(rope.get("partial_rotary_factor") or fraction),
        scaling=_read_scaling(rope, config_json.get("max_position_embeddings", longest)),
    )


def _read_scaling(rope: Mapping[str, Any], longest: int) -> rotary.Scaling:
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
    if kind not in KINDS:
        raise ConfigError(f"rope_type={kind!r} is not supported", f"use {', '.join(KINDS)}")
    factor = float(rope.get("factor") or longest / length)
    if kind == "yarn":
        return rotary.YarnScaling(
            factor=factor,
            original_length=length,
            fast=float(rope.get("beta_fast") or 32.0),
            slow=float(rope.get("beta_slow") or 1.0),
            attention_factor=_attention_factor(rope, factor),
            truncate=bool(rope.get("truncate", True)),
        )
    own = rope.get("attention_factor")
    if own is None:
        own = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    short, long = (tuple(map(float, rope[f"{name}_factor"])) for name in ("short", "long"))
    return rotary.LongRopeScaling(
        short=short, long=long, original_length=length, temperature=float(own)
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


def describe_rope(position: object) -> dict[str, Any] | None:
    """`rope_parameters` for our positions; None if there are none for them."""
    if not isinstance(position, rotary.Rotary) or isinstance(position.scaling, rotary.NTKScaling):
        return None
    rope: dict[str, Any] = {"rope_theta": position.theta}
    if position.fraction != 1.0:
        rope["partial_rotary_factor"] = position.fraction
    scaling = position.scaling
    match scaling:
        case rotary.LinearScaling(factor=factor):
            rope |= {"rope_type": "linear", "factor": factor}
        case rotary.DynamicScaling(factor=factor):
            rope |= {"rope_type": "dynamic", "factor": factor}
        case rotary.Llama3Scaling(factor=factor, fast=fast, slow=slow):
            rope |= {"rope_type": "llama3", "factor": factor}
            rope |= {"high_freq_factor": fast, "low_freq_factor": slow}
        case rotary.YarnScaling(factor=factor, fast=fast, slow=slow):
            rope |= {"rope_type": "yarn", "factor": factor, "beta_fast": fast, "beta_slow": slow}
            if scaling.attention_factor != "published":
                rope["attention_factor"] = scaling.attention_factor
            if not scaling.truncate:
                rope["truncate"] = False
        case rotary.LongRopeScaling(short=short, long=long):
            rope |= {"rope_type": "longrope", "attention_factor": scaling.temperature}
            rope |= {"short_factor": list(short), "long_factor": list(long)}
        case _:
            rope["rope_type"] = "default"
    if isinstance(scaling, rotary.Llama3Scaling | rotary.YarnScaling | rotary.LongRopeScaling):
        rope["original_max_position_embeddings"] = scaling.original_length
    return rope


def longest_of(position: object, default: int = LONGEST) -> int:
    """max_position_embeddings for our positions, which a dynamic scaling starts from."""
    if isinstance(position, rotary.Rotary) and isinstance(position.scaling, rotary.DynamicScaling):
        return position.scaling.original_length
    return default
