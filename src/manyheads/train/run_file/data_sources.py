"""Where the data of a run come from: sources mixed by weight, validation sets by name."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

from manyheads.annotations import Between, PositiveFloat
from manyheads.argument_checks import check_fields
from manyheads.data.chunks import Chunks
from manyheads.errors import ConfigError

Paths = tuple[str, ...]
# Other files, in one set or several by name, or a fraction of the training data.
HeldOutFiles = Paths | Mapping[str, Paths]
HeldOut = Annotated[float, Between(0, 1, "[)", "give a fraction or files")] | HeldOutFiles


def validation_paths(validation: HeldOut) -> dict[str, Paths]:
    """The files of every validation set by name; a single set is called ""."""
    if isinstance(validation, Mapping):
        if wrong := [name for name, paths in validation.items() if not (name and paths)]:
            raise ConfigError(
                f"validation.{wrong[0]} has no name or no file", "write it as name = file"
            )
        return dict(validation)
    return {"": validation} if isinstance(validation, tuple) and validation else {}


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class WeightedSource:
    """Files whose tokens are drawn in the ratio of their `weight` to those of other sources.

    `name` is for the metrics; by default it is the path.
    """

    path: Paths
    weight: PositiveFloat
    name: str = ""

    @property
    def title(self) -> str:
        return self.name or ", ".join(self.path)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class ValidationSet:
    """Held-out data of a name, "" for the only ones; `bytes_per_token` is 0 if unknown."""

    name: str
    chunks: Chunks
    bytes_per_token: float = 0.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PhaseData:
    """Training and validation data of a phase."""

    training: Chunks
    validation: tuple[ValidationSet, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The names of the classes, if the data have them."""
        names: tuple[str, ...] = getattr(self.training, "names", ())
        return names

    @property
    def checksum(self) -> int:
        """The checksum of the training texts; 0 for images, which are not read yet."""
        return int(getattr(self.training, "checksum", 0))


def training_paths(train: Sequence[str | WeightedSource]) -> list[str]:
    """All training files, whatever their source."""
    sources = [(source,) if isinstance(source, str) else source.path for source in train]
    return [path for paths in sources for path in paths]
