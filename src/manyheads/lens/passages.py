"""What heads are looked at by where nobody brings a text."""

import tomllib
from importlib.resources import files
from typing import Any

from manyheads.lens.probe_texts import images
from manyheads.models.build import Model
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision

__all__ = ["BEGUN", "own_texts", "passages"]

# A text that has said already how its last name goes on.
BEGUN = (
    "The town of Harlow Bridge stands where the old road crosses the river Tamsel. The market of "
    "Harlow"
)


def passages() -> list[str]:
    """A few short articles in the manner of an encyclopedia, written for this library.

    >>> len(passages())
    6
    """
    told = files(__package__).joinpath("passages.toml").read_text("utf-8")
    return list(tomllib.loads(told)["passages"])


def own_texts(model: Model, seed: int = 0) -> Any:
    """The articles, as source and target at once for a `Seq2Seq`; random images for a `Vision`."""
    if isinstance(model, Vision):
        return images(model, seed=seed)
    if isinstance(model, Seq2Seq):
        return [(each, each) for each in passages()]
    return passages()
