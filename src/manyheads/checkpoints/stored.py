"""What a file of weights says of a model that its config.json does not."""

from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from manyheads.checkpoints.files import Weights
from manyheads.checkpoints.names import Entry
from manyheads.errors import ConfigError
from manyheads.models.init import Init
from manyheads.models.readout import LanguageHead
from manyheads.models.recipes import ModelConfig

__all__ = ["Stored", "corrected", "says", "unread_as_stored"]

TABLE = "embedding.tokens.weight"


class Stored:
    """The tensors of a file under the newest names of their family."""

    def __init__(self, family: ModuleType, weights: Weights) -> None:
        self._family, self._weights = family, weights
        named = {name: family.canonical(name) for name in weights.shapes()}
        self._file_name: dict[str, str] = {
            new: old for old, new in named.items() if new is not None
        }

    def __getitem__(self, name: str) -> Tensor:
        return self._weights[self._file_name[name]]

    def in_file(self, name: str) -> str:
        """How the file itself calls a tensor."""
        return self._file_name.get(name, name)

    def config(self, described: ModelConfig) -> ModelConfig:
        """As described, and the head tied or not as `transformers` would find it.

        A tied head has a table of its own where the file brings one that differs, and a T5's is
        tied where the file brings none.
        """
        head = described.readout
        if not isinstance(head, LanguageHead):
            return described
        copies = [name for name in self._copies() if name in self._file_name]
        if head.tied and any(self._differs(name, described) for name in copies):
            return with_tied(described, tied=False)
        if not head.tied and not copies and _file_ties(self._family):
            return with_tied(described, tied=True)
        return described

    def read_by(self, config: ModelConfig) -> dict[str, tuple[int, ...]]:
        """The shapes of all but tied copies and what no part of the model reads."""
        left = set(_unread(self._family, config))
        if getattr(config.readout, "tied", False):
            left |= set(getattr(self._family, "TIED_COPIES", ()))
        shapes = self._weights.shapes()
        return {new: shapes[old] for new, old in self._file_name.items() if new not in left}

    def unread(self, config: ModelConfig) -> dict[str, Tensor]:
        """What no part of the model reads, in memory of its own."""
        names = self._file_name.keys() & _unread(self._family, config).keys()
        return {name: self[name].clone() for name in sorted(names)}

    def _copies(self) -> list[str]:
        copies = getattr(self._family, "TIED_COPIES", ())
        return [name for name in copies if name.endswith(".weight")]

    def _differs(self, copy: str, config: ModelConfig) -> bool:
        """Whether a copy of the table of words is none."""
        entries = self._family.entries(config, (TABLE,))
        tables = [each for each in entries if isinstance(each, Entry) and each.ours == TABLE]
        names = [name for table in tables for name in table.theirs if name in self._file_name]
        return any(not torch.equal(self[name], self[copy]) for name in names)


def corrected(family: ModuleType, described: dict[str, Any], config: ModelConfig) -> dict[str, Any]:
    """Their config, which says of a head that the file unties what is true."""
    head = config.readout
    if _file_ties(family) or not isinstance(head, LanguageHead):
        return described
    if head.tied == getattr(family.config_of(described).readout, "tied", head.tied):
        return described
    return {**described, "tie_word_embeddings": head.tied}


def says(family: ModuleType, described: Mapping[str, Any], config: ModelConfig) -> bool:
    """Whether their config, read with the weights of ours, is ours."""
    try:
        theirs: ModelConfig = family.config_of(described)
    except ConfigError:
        # Guessed from one layer of ours, it may be what no model is.
        return False
    if _file_ties(family) and isinstance(config.readout, LanguageHead):
        theirs = with_tied(theirs, tied=config.readout.tied)
    # How weights were once drawn is no part of the model that they make.
    return type(theirs) is type(config) and (
        replace(theirs, init=Init()) == replace(config, init=Init())
    )


def unread_as_stored(
    family: ModuleType, config: ModelConfig, unread: Mapping[str, Tensor], dtype: torch.dtype
) -> dict[str, Tensor]:
    """Tensors that were carried along, under the names of a file and in the type of the rest."""
    names = _unread(family, config)
    return {names[name]: tensor.to(dtype) for name, tensor in unread.items() if name in names}


def with_tied(config: ModelConfig, *, tied: bool) -> ModelConfig:
    if not isinstance(config.readout, LanguageHead):
        return config
    return replace(config, readout=replace(config.readout, tied=tied))


def _unread(family: ModuleType, config: ModelConfig) -> dict[str, str]:
    """The names of tensors that a family's files keep and nothing reads, and how they are written.

    A family that has any says so in a function `unread`.
    """
    names: dict[str, str] = getattr(family, "unread", lambda _: {})(config)
    return names


def _file_ties(family: ModuleType) -> bool:
    return bool(getattr(family, "FILE_TIES", False))
