"""Every error a user can meet: what was given and why it cannot be, then what to do."""

__all__ = [
    "ConfigError",
    "CutWarning",
    "InputError",
    "KernelError",
    "ManyheadsError",
    "MissingExtraError",
    "ShapeError",
    "TrainingError",
]


class ManyheadsError(Exception):
    """A mistake the user can mend; `problem` names the value and the reason, `remedy` the way out.

    >>> str(ConfigError("heads=12 cannot share kv_heads=5 evenly", "use 1, 2, 3, 4, 6 or 12"))
    'heads=12 cannot share kv_heads=5 evenly: use 1, 2, 3, 4, 6 or 12.'
    """

    def __init__(self, problem: str, remedy: str) -> None:
        super().__init__(f"{problem}: {remedy}.")
        self.problem = problem
        self.remedy = remedy


class ConfigError(ManyheadsError, ValueError):
    """A config whose values contradict each other."""


class ShapeError(ManyheadsError, ValueError):
    """A tensor of a shape that does not fit."""


class InputError(ManyheadsError, ValueError):
    """Data the model cannot read: an unknown token, a text too long, an image too odd."""


class KernelError(ManyheadsError, RuntimeError):
    """A kernel was asked by name for something it cannot do."""


class MissingExtraError(ManyheadsError, ImportError):
    """An optional package is not installed."""


class TrainingError(ManyheadsError, RuntimeError):
    """A run that cannot go on as it is."""


class CutWarning(UserWarning):
    """Some texts were longer than the model reads, and were cut."""
