"""`per_layer_config` of config.json: sizes of layers that differ from those of the model.

It has the layers by number, each with what differs: {"3": {"num_attention_heads": 7}}.
`transformers` has the same key (its pull request 45333).
"""

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from manyheads.checkpoints.families.family import Family
from manyheads.errors import ConfigError
from manyheads.models import decoder, recipes

KEY = "per_layer_config"


def read_description(family: Family, description: Mapping[str, Any]) -> recipes.ModelConfig:
    """Our config for the content of a config.json, each layer with its own sizes."""
    uniform = {key: value for key, value in description.items() if key != KEY}
    config = family.read_config(uniform)
    if not description.get(KEY):
        return config
    if not isinstance(config, decoder.DecoderConfig) or not family.per_layer_keys:
        raise ConfigError(f"{KEY} is not supported for {family.name}", "remove it")
    layers = list(config.stack.layers)
    for index, own in _overrides(description[KEY], len(layers), family):
        changed = family.read_config({**uniform, **own})
        assert isinstance(changed, decoder.DecoderConfig)
        layers[index] = changed.stack.layers[index]
    return replace(config, stack=replace(config.stack, layers=tuple(layers)))


def _overrides(table: Any, layers: int, family: Family) -> Iterator[tuple[int, Mapping[str, Any]]]:
    for name, own in table.items() if isinstance(table, dict) else [("", None)]:
        if not str(name).isdecimal() or int(name) >= layers or not isinstance(own, dict):
            raise ConfigError(
                f"{KEY} must have numbers of layers from 0 to {layers - 1} with what differs, got "
                f"{name!r:.50}: {own!r:.100}"
            )
        unknown = [key for key in own if key not in family.per_layer_keys]
        if unknown:
            raise ConfigError(
                f"{KEY} has {unknown[0]!r:.100} for layer {name}",
                f"use {', '.join(family.per_layer_keys)}",
            )
        yield int(name), own


def describe_uneven(family: Family, config: recipes.ModelConfig) -> Iterator[dict[str, Any]]:
    """What config.json may say about a model whose layers differ in their sizes.

    Each is a guess: the caller reads it back and compares.
    """
    if not family.per_layer_keys or not isinstance(config, decoder.DecoderConfig):
        return
    if config.stack.weights_of != "own":
        return
    alone = [
        family.write_config(replace(config, stack=replace(config.stack, layers=(layer,))))
        for layer in config.stack.layers
    ]
    described = [config_json for config_json in alone if config_json is not None]
    if (
        len(described) < len(alone)
        or not described
        or not described[0].keys() >= {*family.per_layer_keys}
    ):
        return
    sizes = [{key: own[key] for key in family.per_layer_keys} for own in described]
    # Most layers say nothing then.
    common = {
        key: Counter(layer[key] for layer in sizes).most_common(1)[0][0]
        for key in family.per_layer_keys
    }
    changes = [{key: own[key] for key in own if own[key] != common[key]} for own in sizes]
    uneven = {str(index): change for index, change in enumerate(changes) if change}
    whole = family.write_config(config)
    if not uneven or whole is None:
        return
    # Numbers of heads that do not divide the width make a Llama a Mistral.
    for kind in dict.fromkeys(own["model_type"] for own in reversed(described)):
        classes = next(own for own in described if own["model_type"] == kind)
        names = {key: classes[key] for key in ("model_type", "architectures")}
        if kind == "mistral":
            names["sliding_window"] = classes["sliding_window"]
        yield {**whole, **common, **names, KEY: uneven}
