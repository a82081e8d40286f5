"""Parts that come whole with an adapter, under the names that `peft` saves them with."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import cast

from torch import Tensor

from manyheads.checkpoints.config_json import family_of
from manyheads.checkpoints.tensor_map import Either, Entry
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import Model
from manyheads.models.recipes import ModelConfig

__all__ = ["check_named", "whole_as_ours", "whole_as_theirs"]


def whole_as_theirs(model: Model, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by our addresses as `transformers` has them."""
    check_named(model, weights)
    table = _table(model)
    found: dict[str, Tensor] = {}
    for address in weights:
        found |= table[address].write(weights)
    return found


def check_named(model: Model, addresses: Iterable[str]) -> None:
    """Refuse what is not one tensor there, which `peft` could not say."""
    known = _table(model)
    for address in addresses:
        if address not in known:
            raise ConfigError(f"peft has no name for {address} whole", "leave it out of whole")


def whole_as_ours(model: Model, tensors: Mapping[str, Tensor], place: Path) -> dict[str, Tensor]:
    """The same back; `place` is where they were found."""
    family, found = family_of(model), {}
    owners = {entry.theirs[0]: entry for entry in _table(model).values()}
    shapes = {name: tuple(each.shape) for name, each in model.state_dict().items()}
    for name, tensor in tensors.items():
        entry = owners.get(family.canonical_name(name) or name)
        if entry is None or entry.ours not in shapes:
            raise InputError(
                f"{place} brings {name} whole, which this model has not",
                "use the model that it was made for; one without the head of its task gets it by "
                "with_classes(model, classes)",
            )
        [expected] = entry.shapes(shapes[entry.ours]).values()
        if tuple(tensor.shape) != expected:
            raise InputError(
                f"{place} brings {name} of shape {tuple(tensor.shape)}, which is {expected} here",
                "use an adapter of a model of this shape",
            )
        found[entry.ours] = entry.join([tensor])
    return found


def _table(model: Model) -> dict[str, Entry]:
    """By our address where the tensors lie there that are one tensor in both."""
    entries = family_of(model).tensor_map(cast(ModelConfig, model.config), model.state_dict())
    plain = [entry.usual if isinstance(entry, Either) else entry for entry in entries]
    return {
        entry.ours: entry for entry in plain if isinstance(entry, Entry) and len(entry.theirs) == 1
    }
