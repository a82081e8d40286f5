"""Functions that take a `transformers` model where they expect one of ours."""

import sys
from functools import wraps
from inspect import signature
from typing import Any

from manyheads.argument_checks import Function, checked
from manyheads.bridge.wrapped_model import wrap
from manyheads.errors import NativeModelError

# Parameters that hold a model.
MODELS = {"model", "before", "after"}
ACCEPTED = "Model | PreTrainedModel"


def is_of_transformers(value: Any) -> bool:
    """Whether this is a model of `transformers`, which is not imported to find out."""
    library = sys.modules.get("transformers.modeling_utils")
    return library is not None and isinstance(value, library.PreTrainedModel)


def as_model(value: Any) -> Any:
    """The value, wrapped if it is a model of `transformers`."""
    compiled = is_of_transformers(getattr(value, "_orig_mod", None))
    return wrap(value) if compiled or is_of_transformers(value) else value


def wrapping_models(function: Function) -> Function:
    """A function with checked arguments that also takes models of `transformers`."""
    inner = checked(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        named = {
            name: as_model(value) if name in MODELS else value for name, value in kwargs.items()
        }
        return inner(*(as_model(value) for value in args[:2]), *args[2:], **named)

    # What help() and editors show: the function itself sees only models of ours.
    written = signature(function)
    parameters = [
        parameter.replace(annotation=ACCEPTED) if parameter.name in MODELS else parameter
        for parameter in written.parameters.values()
    ]
    call.__signature__ = written.replace(parameters=parameters)  # type: ignore[attr-defined]
    return call  # type: ignore[return-value]


def native_models_only(function: Function) -> Function:
    """A function with checked arguments that refuses models of `transformers`."""
    inner = checked(function)

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        require_native(args[0] if args else kwargs.get("model"), function.__name__)
        return inner(*args, **kwargs)

    return call  # type: ignore[return-value]


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
