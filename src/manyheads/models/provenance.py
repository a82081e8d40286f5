"""What a model folder holds besides the weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

from torch import Tensor

Pooling = Literal["mean", "cls", "last"]


@dataclass(frozen=True, slots=True, kw_only=True)
class SentenceConfig:
    """How a model was trained to embed sentences.

    Texts are truncated to `longest` tokens, special tokens included.
    """

    pooling: Pooling = "mean"
    normalise: bool = False
    longest: int | None = None


FIELDS = ("source_config", "tokenizer", "sentence", "generation", "side_files", "unread")
# How `transformers` names classes that have no name, before their number.
DEFAULT_LABEL = "LABEL_"


class Provenance:
    """What came with a model's folder, so that it can be saved again completely.

    `source_config` is its config.json and `generation` its generation_config.json. `unread`
    are tensors of the file that no part of the model uses, such as a pooler. `side_files` are the
    small files beside the weights, by name. A model that was built here has none of these.
    """

    source_config: dict[str, Any] | None = None
    tokenizer: Any = None
    sentence: SentenceConfig | None = None
    generation: Mapping[str, Any] = MappingProxyType({})
    side_files: Mapping[str, bytes] = MappingProxyType({})
    unread: Mapping[str, Tensor] = MappingProxyType({})

    def copy_provenance(self, other: "Provenance") -> None:
        """Copy all this from the model that this one is made from."""
        for name in FIELDS:
            setattr(self, name, getattr(other, name))

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the classes, in order; empty if they have none."""
        named = (self.source_config or {}).get("id2label") or {}
        names = tuple(str(named[key]) for key in sorted(named, key=int))
        unnamed = all(name == f"{DEFAULT_LABEL}{index}" for index, name in enumerate(names))
        return () if unnamed else names
