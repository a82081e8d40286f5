"""What a folder brought beside a model's weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig:
    """What a folder says of the vectors its model was trained to give.

    `longest` is where texts are cut, in tokens with the special ones.
    """

    pooling: Pooling = "mean"
    normalise: bool = False
    longest: int | None = None


FIELDS = ("source_config", "tokenizer", "sentence", "generation", "side_files", "unread")
# What transformers calls a class that nobody has named, before its number.
NAMELESS = "LABEL_"


class Provenance:
    """Where a model comes from, so that it can be written back whole; one built here has nothing.

    `source_config` is its config.json and `generation` its generation_config.json. `unread` are tensors
    of the file that no part of the model reads, such as a pooler nobody asks; `side_files` are the
    small files beside them, by name.
    """

    source_config: dict[str, Any] | None = None
    tokenizer: Any = None
    sentence: SentenceConfig | None = None
    generation: Mapping[str, Any] = MappingProxyType({})
    side_files: Mapping[str, bytes] = MappingProxyType({})
    unread: Mapping[str, Tensor] = MappingProxyType({})

    def copy_provenance(self, other: "Provenance") -> None:
        """Take over all that came with another model, of which this one is made."""
        for name in FIELDS:
            setattr(self, name, getattr(other, name))

    @property
    def class_names(self) -> tuple[str, ...]:
        """How the classes are called, in their order; nothing where nobody has named them."""
        named = (self.source_config or {}).get("id2label") or {}
        names = tuple(str(named[key]) for key in sorted(named, key=int))
        nameless = all(name == f"{NAMELESS}{place}" for place, name in enumerate(names))
        return () if nameless else names
