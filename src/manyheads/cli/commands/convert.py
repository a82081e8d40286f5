"""manyheads convert: a model folder read, checked and written anew."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli.arguments import DtypeName, check_folder, open_model
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Convert:
    """Read a model and write it anew, in the layout of its family or in our own.

    For example: manyheads convert gpt2/ gpt2-half/ --dtype bfloat16
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model, or a model of the hub: org/name or org/name@revision."""

    folder: Annotated[
        Path | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(or -o)"),
    ] = None
    """The folder to write, whole or not at all."""

    out: Annotated[
        Path | None, tyro.conf.arg(aliases=["-o"], metavar="FOLDER", help_behavior_hint="")
    ] = None
    """The same, as other commands name it."""

    dtype: DtypeName = "as it is"
    """The type of the weights written; in another type no model is written over itself."""

    def run(self) -> int:
        """Say where it went and who can open it."""
        from manyheads.checkpoints.folder import save

        given = [each for each in (self.folder, self.out) if each is not None]
        if len(given) != 1:
            raise InputError(
                f"{len(given)} folders to write to are named",
                f"name one: manyheads convert {self.model} FOLDER",
            )
        # As it is, nothing of a model is lost where it is written over itself.
        check_folder(given[0], "" if self.dtype == "as it is" else self.model)
        print(save(open_model(self.model, "cpu", self.dtype), given[0]))
        return 0
