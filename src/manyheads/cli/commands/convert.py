"""manyheads convert: read a model, check it, and write it again."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli.arguments import (
    DtypeName,
    OptionalOutFolder,
    RequiredModel,
    check_out_folder,
    open_model,
)
from manyheads.errors import InputError


@dataclass(frozen=True, slots=True)
class Convert:
    """Read a model and write it again, in the layout of its family or in that of manyheads.

    For example: manyheads convert gpt2/ gpt2-half/ --dtype bfloat16
    """

    model: RequiredModel
    """The folder of a model, or a model of the hub: org/name or org/name@revision."""

    folder: Annotated[
        Path | None,
        tyro.conf.Positional,
        tyro.conf.arg(metavar="FOLDER", help_behavior_hint="(or -o)"),
    ] = None
    """The folder to write."""

    out: OptionalOutFolder = None
    """The folder to write, as other commands name it."""

    dtype: DtypeName = "auto"
    """The dtype of the weights to write; by default unchanged."""

    def run(self) -> int:
        """Print where the model is and what can open it."""
        from manyheads.checkpoints.folder import save

        target = self.folder or self.out
        if target is None:
            raise InputError(
                "manyheads convert needs a folder to write", f"add it: {self.model} FOLDER"
            )
        if self.folder is not None and self.out is not None:
            raise InputError(
                f"two folders are given, {self.folder} and {self.out}", "leave out one of them"
            )
        # In its own dtype a model loses nothing by being overwritten.
        check_out_folder(target, "" if self.dtype == "auto" else self.model)
        print(save(open_model(self.model, "cpu", self.dtype), target))
        return 0
