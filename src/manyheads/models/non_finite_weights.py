"""Weights with NaN or infinity, which some kernels turn into numbers that look right."""

import warnings
from collections.abc import Mapping, Sequence
from weakref import WeakKeyDictionary

from torch import Tensor, nn

from manyheads.errors import NonFiniteWarning
from manyheads.formatting import listed

# Per model, where its weights were and how often they had changed when they were last checked.
_CHECKED: "WeakKeyDictionary[nn.Module, int]" = WeakKeyDictionary()


def is_finite(tensor: Tensor) -> bool:
    """Whether no value is NaN or infinite; one pass unless the sum itself overflows."""
    return bool(tensor.detach().sum().isfinite()) or bool(tensor.isfinite().all())


def warn_not_finite(names: Sequence[str], where: str) -> None:
    """Warn of the tensors that hold NaN or infinity, if there are any."""
    if names:
        warnings.warn(_message(names, where), NonFiniteWarning, stacklevel=3)


def describe_not_finite(model: nn.Module) -> str:
    """A sentence about the weights that hold NaN or infinity; empty if none does."""
    names = _not_finite(model.state_dict(keep_vars=True))
    return _message(names, "weights") if names else ""


def _message(names: Sequence[str], where: str) -> str:
    verb = "holds" if len(names) == 1 else "hold"
    return (
        f"{where}: {listed(names, 3)} {verb} NaN or infinity; whatever is computed from them means "
        "nothing, even where it is a number"
    )


def _not_finite(tensors: Mapping[str, Tensor]) -> list[str]:
    # What is still on disk is checked when it is read.
    present = {name: tensor for name, tensor in tensors.items() if not tensor.is_meta}
    return [name for name, tensor in present.items() if not is_finite(tensor)]


def check_finite(model: object) -> None:
    """Warn if weights of a module hold NaN or infinity, once until they change."""
    if not isinstance(model, nn.Module):
        return
    tensors = model.state_dict(keep_vars=True)
    changes = hash(tuple((tensor.data_ptr(), _changes(tensor)) for tensor in tensors.values()))
    if _CHECKED.get(model) != changes:
        _CHECKED[model] = changes
        warn_not_finite(_not_finite(tensors), "weights")


def _changes(tensor: Tensor) -> int:
    return 0 if tensor.is_inference() else tensor._version
