"""The config.json of a model: which family describes it, and whether a description is true."""

import re
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from typing import Any, cast

from manyheads.checkpoints.families import FAMILIES
from manyheads.checkpoints.families.family import Family
from manyheads.checkpoints.per_layer_config import describe_uneven, read_description
from manyheads.errors import ConfigError
from manyheads.models.build import Model
from manyheads.models.initialization import Initialization
from manyheads.models.readout import PROBLEM_TYPE, TEMPERATURE, THRESHOLDS, LanguageHead
from manyheads.models.recipes import ModelConfig

CONFIG = "config.json"
# What a config.json says that is not part of our config: the names of classes, how their logits
# become labels and, besides the ids of special tokens, the length of the texts in training.
FACTS = ("id2label", "label2id", "max_position_embeddings", PROBLEM_TYPE, TEMPERATURE, THRESHOLDS)


# The sizes in a config.json of any family, ours included, which its weights bound.
LAYER_COUNT = re.compile(
    r"num_(hidden_|decoder_)?layers|n_layers?|(en|de)coder_layers|num_hidden_groups|inner_group_num"
)
SIZE = re.compile(
    r"(hidden|embedding|(moe_|shared_expert_)?intermediate|(type_)?vocab|head|image|patch)_size|head_dim"
    r"|n_(embd|inner|heads?|positions)|dim|hidden_dim|d_(model|ff|kv)|(en|de)coder_(ffn_dim|attention_heads)"
    r"|num_(attention_heads|heads|key_value_heads|labels|channels)|relative_attention_num_buckets"
    r"|num_(local_)?experts(_per_tok)?|width|hidden|shared|heads|kv_heads|vocabulary|count|total"
    r"|linear_(num_(key|value)_heads|(key|value)_head_dim|conv_kernel_dim)|key_heads|key_size"
    r"|clusters|window|latents|table_width|convolution|classes|types|channels|image|size|rows|columns|buckets"
)
# Sizes up to these cost nothing; the weights themselves are compared later.
HARMLESS_SIZE = 2**16
HARMLESS_COUNT = 2**8


def check_sizes(description: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse sizes that no model with these weights has, before anything of that size is made."""
    largest = max((size for shape in shapes.values() for size in shape), default=0)
    items: list[tuple[str, Any]] = list(description.items())
    while items:
        key, value = items.pop()
        if isinstance(value, dict):
            items += value.items()
        elif isinstance(value, list):
            items += ((key, item) for item in value)
        elif isinstance(value, float) and not isfinite(value):
            raise ConfigError(f"{key:.200}={value} is not finite", "use a number")
        elif isinstance(value, int):
            layers, size = LAYER_COUNT.fullmatch(key), SIZE.fullmatch(key)
            limit = max(len(shapes), HARMLESS_COUNT) if layers else max(largest, HARMLESS_SIZE)
            if abs(value) >= 2**63 or ((layers or size) and value > limit):
                raise ConfigError(
                    f"{key:.200}={value!s:.40} is more than the weights have: {len(shapes)} "
                    f"tensors, whose largest size is {largest}",
                    "use the config and the weights of the same model",
                )


def family_of(model: Model) -> Family:
    """The family that a model is saved as."""
    return FAMILIES[description_of(model)["model_type"]]


def description_of(model: Model, *, native: bool = False) -> dict[str, Any]:
    """The content of config.json when a model is saved, with `native` in our own layout.

    A model that still matches the config.json it was loaded with keeps it, with class names, token
    ids and whatever else our config has no field for. Otherwise its family describes it, or the
    first one that can, and our own layout at last.
    """
    config, loaded = cast(ModelConfig, model.config), model.source_config
    if native:
        ours = FAMILIES["manyheads"]
        return _with_facts(
            ours, cast(dict[str, Any], ours.write_config(config)), facts_of(loaded), config
        )
    if loaded is not None and matches(FAMILIES[str(loaded["model_type"])], loaded, config):
        return loaded
    families = list(FAMILIES.values())
    if loaded is not None and loaded["model_type"] != "manyheads":
        families.insert(0, FAMILIES[str(loaded["model_type"])])
    for family in dict.fromkeys(families):
        for description in (family.write_config(config), *describe_uneven(family, config)):
            if description is not None and matches(family, description, config):
                return _with_facts(family, description, facts_of(loaded), config)
    raise AssertionError("our own layout describes every model")


def matches(family: Family, description: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether a config.json, read with the weights of our model, gives our config."""
    try:
        described = read_description(family, description)
    except ConfigError:
        # What a family guesses from the first layer may be impossible.
        return False
    if family.file_decides_tying and isinstance(config.readout, LanguageHead):
        described = with_tied(described, tied=config.readout.tied)
    # How weights were initialized is not part of the model that they make.
    return type(described) is type(config) and (
        replace(described, init=Initialization()) == replace(config, init=Initialization())
    )


def corrected(family: Family, description: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """The description, corrected if the weights show that the head is not tied."""
    head, description = config.readout, family.rewritten(description, config)
    if family.file_decides_tying or not isinstance(head, LanguageHead):
        return description
    if head.tied == getattr(read_description(family, description).readout, "tied", head.tied):
        return description
    return {**description, "tie_word_embeddings": head.tied}


def with_tied(config: ModelConfig, *, tied: bool) -> ModelConfig:
    """The config with its language head tied or not; a model without one stays as it is."""
    if not isinstance(config.readout, LanguageHead):
        return config
    return replace(config, readout=replace(config.readout, tied=tied))


def facts_of(description: Mapping[str, Any] | None) -> dict[str, Any]:
    """The keys that stay valid in a new description."""
    return {
        name: value
        for name, value in (description or {}).items()
        if name in FACTS or name.endswith("_token_id")
    }


def _with_facts(
    family: Family, description: dict[str, Any], facts: Mapping[str, Any], config: ModelConfig
) -> dict[str, Any]:
    """A new description with the facts of the old one, unless they describe another model."""
    ids = {name: value for name, value in facts.items() if name.endswith("_token_id")}
    for extra in (facts, ids):
        if matches(family, {**description, **extra}, config):
            return {**description, **extra}
    return description
