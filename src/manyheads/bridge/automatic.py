"""Functions that take a `transformers` model where they expect one of ours."""

import sys
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import isfunction, signature
from typing import Any

from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import NativeModelError

# Parameters that hold a model.
MODELS = {"model", "before", "after"}


def is_of_transformers(value: Any) -> bool:
    """Whether this is a model of `transformers`, which is not imported to find out."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(value, library.PreTrainedModel)


def as_model(value: Any) -> Any:
    """The value, wrapped if it is a model of `transformers`."""
    compiled = is_of_transformers(getattr(value, "_orig_mod", None))
    return wrap(value) if compiled or is_of_transformers(value) else value


def wrapping_arguments(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions among these that take models, so that they wrap those of `transformers`."""
    found = {}
    for name, function in names.items():
        if isfunction(function) and MODELS & set(list(signature(function).parameters)[:2]):
            found[name] = _wrapping(function)
    return found


def _wrapping(function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {
            name: as_model(value) if name in MODELS else value for name, value in kwargs.items()
        }
        return function(*(as_model(value) for value in args[:2]), *args[2:], **named)

    return call


def native_only(names: Mapping[str, Any]) -> dict[str, Callable[..., Any]]:
    """The functions among these that take a model, so that they refuse those of `transformers`."""
    found = {}
    for name, function in names.items():
        if isfunction(function) and "model" in list(signature(function).parameters)[:1]:
            found[name] = _refusing(name, function)
    return found


def require_native(model: Any, operation: str) -> None:
    """Refuse a model that manyheads does not compute itself."""
    if not getattr(model, "native", True) or is_of_transformers(model):
        raise native_model_error(model, operation)


def native_model_error(model: Any, operation: str) -> NativeModelError:
    """Why a wrapped model cannot do something, and what to do instead."""
    config = getattr(model, "inner", model).config
    family = str(getattr(config, "model_type", ""))
    # The families are a floor above, and loaded wherever models are changed or written.
    families = sys.modules.get("manyheads.checkpoints.families")
    opens = None if families is None else family in families.FAMILIES
    return NativeModelError(operation, family, opens=opens)


def _refusing(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        require_native(args[0] if args else kwargs.get("model"), name)
        return function(*args, **kwargs)

    return call
