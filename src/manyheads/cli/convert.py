"""manyheads convert: a model folder read, checked and written anew."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro

__all__ = ["Convert"]


@dataclass(frozen=True, slots=True)
class Convert:
    """Read a model and write it anew, in the layout of its family or in our own.

    For example: manyheads convert gpt2/ gpt2-half/ --dtype bfloat16
    """

    source: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder to read, or a model of the hub: org/name or org/name@revision."""

    target: Annotated[Path, tyro.conf.Positional]
    """The folder to write, whole or not at all."""

    dtype: Literal["as it is", "float32", "bfloat16", "float16"] = "as it is"
    """The type of the weights written."""

    def run(self) -> int:
        """Say where it went and who can open it."""
        import torch

        from manyheads.checkpoints.folder import load, save

        kind = None if self.dtype == "as it is" else getattr(torch, self.dtype)
        print(save(load(self.source, dtype=kind), self.target))
        return 0
