"""Our own layout: any model the library can build, under the names its modules have."""

from collections.abc import Iterable, Mapping
from typing import Any

from manyheads.checkpoints.configs import from_json, is_model, to_json
from manyheads.checkpoints.names import Entry
from manyheads.errors import InputError
from manyheads.models.recipes import ModelConfig

__all__ = ["canonical", "config_of", "describe", "entries", "facts_of"]

# What a config.json says of a model that is none of its shape: which tokens begin and end a text,
# how classes are called, how long the texts were that it learned from.
FACTS = ("id2label", "label2id", "max_position_embeddings")


def config_of(theirs: Mapping[str, Any]) -> ModelConfig:
    config: Any = from_json(theirs.get("config"))
    if not is_model(config):
        raise InputError("config.json describes no whole model", "save one with manyheads.save")
    return config


def describe(config: ModelConfig) -> dict[str, Any] | None:
    return {"model_type": "manyheads", "config": to_json(config)}


def entries(config: ModelConfig, ours: Iterable[str]) -> list[Entry]:  # noqa: ARG001
    return [Entry(name, (name,)) for name in ours]


def canonical(name: str) -> str | None:
    return name


def facts_of(described: Mapping[str, Any] | None) -> dict[str, Any]:
    """What stays true of a model whose description is a new one."""
    return {
        name: value
        for name, value in (described or {}).items()
        if name in FACTS or name.endswith("_token_id")
    }
