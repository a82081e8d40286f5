"""Every error a user can meet: the value, the reason and the remedy."""

from collections.abc import Callable
from importlib import import_module
from numbers import Integral, Real
from typing import Any


class ManyheadsError(Exception):
    """An error the user can fix: `problem` names the value and the reason, `remedy` what to do.

    The remedy may be left out where the problem says what is allowed.

    >>> str(InputError("token id 900 is outside vocabulary=256", "use ids of 0 to 255"))
    'token id 900 is outside vocabulary=256: use ids of 0 to 255.'
    >>> str(ConfigError("top_p must be in (0, 1], got 1.5"))
    'top_p must be in (0, 1], got 1.5.'
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}: {remedy}." if remedy else f"{problem}.")
        self.problem = problem
        self.remedy = remedy


class ConfigError(ManyheadsError, ValueError):
    """A config whose values contradict each other."""


class ShapeError(ManyheadsError, ValueError):
    """A tensor of a shape that does not fit."""


class InputError(ManyheadsError, ValueError):
    """Data the model cannot read: an unknown token, a text too long, an image of a wrong size."""


class ArgumentError(InputError, ConfigError):
    """An argument of a wrong type, or a name that is not among those allowed."""


class KernelError(ManyheadsError, RuntimeError):
    """A kernel that was requested by name does not support the request."""


class MissingPackageError(ManyheadsError, ImportError):
    """An optional package is not installed.

    >>> str(MissingPackageError("a chat template", "jinja2"))
    'a chat template needs the package jinja2: run pip install jinja2.'
    """

    def __init__(self, feature: str, *packages: str, options: tuple[str, ...] = ()) -> None:
        noun = "package" if len(packages) == 1 else "packages"
        super().__init__(
            f"{feature} needs the {noun} {' and '.join(packages)}",
            f"run pip install {' '.join((*options, *packages))}",
        )


def import_package(module: str, feature: str, *packages: str) -> Any:
    """A module of an optional package, which a feature needs."""
    try:
        return import_module(module)
    except ImportError:
        raise MissingPackageError(feature, *packages) from None


class NativeModelError(ManyheadsError, AttributeError):
    """A part that a wrapped `transformers` model does not have.

    `family` is its model_type, and `opens` whether manyheads opens that family itself.

    >>> NativeModelError("pruning").problem
    'pruning needs a native model, and this one is run by transformers'
    """

    def __init__(self, part: str, family: str = "", *, opens: bool | None = None) -> None:
        remedy = "open its folder with manyheads.load if manyheads knows the family"
        if opens:
            remedy = (
                "save it with save_pretrained, and open that folder with manyheads.load, or "
                "rewrite it with manyheads convert FOLDER NEW_FOLDER"
            )
        elif opens is not None:
            remedy = (
                f"manyheads does not open {family!s:.100} itself, so use what only reads: "
                "statistics, ablation, patching, the report or the studio"
            )
        problem = f"{part} needs a native model, and this one is run by transformers"
        super().__init__(problem, remedy)


class TrainingError(ManyheadsError, RuntimeError):
    """A training run that cannot continue."""


class ConvergenceError(ManyheadsError, RuntimeError):
    """A computation that did not reach the accuracy without which its result means nothing."""


class ManyheadsWarning(UserWarning):
    """The base of all warnings; the command line prints each once, in one line."""


class LongTextWarning(ManyheadsWarning):
    """Some texts are longer than those that the model was trained on."""


class TruncationWarning(ManyheadsWarning):
    """Some texts were longer than the model can read and were truncated."""


class WrappedModelWarning(ManyheadsWarning):
    """A model was opened by `transformers`, so that it can be read but not changed."""


class NonFiniteWarning(ManyheadsWarning):
    """Some weights of a model are NaN or infinite."""


class UnknownTokenizerWarning(ManyheadsWarning):
    """The tokenizer of a file has rules that we do not know, so the model was loaded without."""


class MixedDtypeWarning(ManyheadsWarning):
    """The weights of a folder have several dtypes and were loaded in one of them."""


# Longer values are cut in messages.
LONGEST_REPR = 80


def short_repr(value: object) -> str:
    """The value in one short line."""
    try:
        text = " ".join(repr(value).split())
    except Exception:
        text = f"a {type(value).__name__}"
    return text if len(text) <= LONGEST_REPR else f"{text[: LONGEST_REPR - 1]}…"


def check_int(name: str, value: object, *, minimum: int) -> None:
    """Refuse anything but an integer of at least `minimum`.

    >>> check_int("top_k", 2.5, minimum=1)
    Traceback (most recent call last):
    manyheads.errors.ConfigError: top_k must be an integer, got 2.5.
    """
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ConfigError(f"{name} must be an integer, got {short_repr(value)}")
    if int(value) < minimum:
        raise ConfigError(f"{name} must be at least {minimum}, got {value}")


def check_number(
    name: str, value: object, allowed: str, is_allowed: Callable[[float], bool]
) -> None:
    """Refuse anything but a number for which `is_allowed` holds; `allowed` says it in words.

    >>> check_number("top_p", 1.5, "in (0, 1]", lambda p: 0 < p <= 1)
    Traceback (most recent call last):
    manyheads.errors.ConfigError: top_p must be in (0, 1], got 1.5.
    """
    if not isinstance(value, Real) or isinstance(value, bool):
        raise ConfigError(f"{name} must be a number, got {short_repr(value)}")
    if not is_allowed(float(value)):
        raise ConfigError(f"{name} must be {allowed}, got {value}")
