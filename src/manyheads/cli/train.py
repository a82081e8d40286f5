"""manyheads train: a run file to a model."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli.asked import Flag
from manyheads.cli.running import Changes, Since, follow

__all__ = ["Train"]


@dataclass(frozen=True, slots=True)
class Train:
    """Train a model as a run file says; started again, it goes on where it was.

    For example: manyheads train run.toml --set run.steps=100

    On many GPUs: torchrun --nproc-per-node 8 -m manyheads train run.toml

    On several machines, the same on each, with a disk that all of them see: torchrun --nnodes 4
    --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m manyheads train run.toml
    """

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """What to train, on what, how."""

    set: Changes = ()
    """A value in place of the file's, such as run.steps=100; may be given several times."""

    since: Since = ""
    """The checkpoint to go on from, by name or path; by default the newest."""

    fresh: Flag = False
    """Begin anew; what is there is set aside."""

    def run(self) -> int:
        """Say how it ended and where the model is, or how to go on."""
        from manyheads.train.loop.session import train
        from manyheads.train.run_file.run_config import read_run

        asked = read_run(self.file, self.set)
        return follow(
            lambda: train(asked, resume_from=self.since, fresh=self.fresh),
            f"manyheads train {self.file}",
            self.set,
            self.since,
        )
