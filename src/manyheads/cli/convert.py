"""manyheads convert: a model folder read, checked and written anew."""

from dataclasses import dataclass
from typing import Annotated

import tyro

from manyheads.cli.asked import DtypeName, OutFolder, open_model

__all__ = ["Convert"]


@dataclass(frozen=True, slots=True)
class Convert:
    """Read a model and write it anew, in the layout of its family or in our own.

    For example: manyheads convert gpt2/ -o gpt2-half/ --dtype bfloat16
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model, or a model of the hub: org/name or org/name@revision."""

    out: OutFolder
    """The folder to write, whole or not at all."""

    dtype: DtypeName = "as it is"
    """The type of the weights written."""

    def run(self) -> int:
        """Say where it went and who can open it."""
        from manyheads.checkpoints.folder import save

        print(save(open_model(self.model, "cpu", self.dtype), self.out))
        return 0
