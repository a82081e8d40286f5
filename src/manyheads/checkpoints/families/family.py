"""All that the library must know of a family of models to read and write its folders."""

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable

from manyheads.checkpoints.tensor_map import TensorMap
from manyheads.models.recipes import ModelConfig


@runtime_checkable
class Family(Protocol):
    """How one family stores its models: "theirs" is the family's layout, "ours" the library's.

    The four abstract methods are what every family needs. The others have a default here.
    """

    name: str
    # Tensors that a file may hold in addition to the token embedding they are tied to.
    tied_copies: tuple[str, ...] = ()
    # Whether the file alone decides if the head is tied, whatever config.json says.
    file_decides_tying: bool = False

    @abstractmethod
    def read_config(self, theirs: Mapping[str, Any]) -> ModelConfig:
        """Our config for the content of a config.json."""

    @abstractmethod
    def write_config(self, config: ModelConfig) -> dict[str, Any] | None:
        """The content of a config.json, or None where the family has no such model.

        It may be a guess from the first layer: the caller reads it back and compares.
        """

    @abstractmethod
    def tensor_map(self, config: ModelConfig, ours: Iterable[str]) -> TensorMap:
        """Where each of our tensors is in a file of theirs."""

    @abstractmethod
    def canonical_name(self, name: str) -> str | None:
        """The newest name of a tensor, whatever the file's age; None for what is not a weight."""

    def unused_tensors(self, config: ModelConfig) -> dict[str, str]:  # noqa: ARG002
        """Tensors that no part of the model uses, by canonical name, and their names in a file.

        They are carried along, so that a folder is written back with all that it had.
        """
        return {}

    def opened_by(self, theirs: Mapping[str, Any]) -> str:  # noqa: ARG002
        """The library that opens a folder with this config.json."""
        return "transformers"

    def module_name(self, stem: str) -> str:
        """The module of `transformers` whose weight a file calls `stem`.weight."""
        return stem
