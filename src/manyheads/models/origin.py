"""What a folder brought beside a model's weights."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import Tensor

from manyheads.models.sentence import Sentence

__all__ = ["NAMELESS", "Origin"]

# What transformers calls a class that nobody has named, before its number.
NAMELESS = "LABEL_"


class Origin:
    """Where a model comes from, so that it can be written back whole; one built here has nothing.

    `described` is its config.json and `generation` its generation_config.json. `unread` are tensors
    of the file that no part of the model reads, such as a pooler nobody asks; `side_files` are the
    small files beside them, by name.
    """

    described: dict[str, Any] | None = None
    tokenizer: Any = None
    sentence: Sentence | None = None
    generation: Mapping[str, Any] = MappingProxyType({})
    side_files: Mapping[str, bytes] = MappingProxyType({})
    unread: Mapping[str, Tensor] = MappingProxyType({})

    @property
    def class_names(self) -> tuple[str, ...]:
        """How the classes are called, in their order; nothing where nobody has named them."""
        named = (self.described or {}).get("id2label") or {}
        names = tuple(str(named[key]) for key in sorted(named, key=int))
        nameless = all(name == f"{NAMELESS}{place}" for place, name in enumerate(names))
        return () if nameless else names
