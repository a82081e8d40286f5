"""manyheads adapt: a model and a run file to an adapter."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from manyheads.cli.asked import Flag
from manyheads.cli.running import Changes, Since, follow

__all__ = ["Adapt"]


@dataclass(frozen=True, slots=True)
class Adapt:
    """Train a low-rank adapter as a run file says and save it in peft's files, or some heads alone.

    For example: manyheads adapt gpt2/ run.toml --set adapter.rank=16

    The file is one for train without [model] and with [adapter]: rank, alpha, targets, layers,
    heads, dropout, scaling, whole, name, base, and merged = true to save the whole model too, or
    alone where L0Gates closes heads of it. With [learn] instead, only = ["L0H1"] or
    all_but = ["L0H1"] names heads, and the model itself is trained. Of [model], classes may be
    given: a new head for so many, which learns along.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model, or a name on the hub."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """What to adapt, on what, how."""

    set: Changes = ()
    """A value in place of the file's, such as adapter.rank=16; may be given several times."""

    since: Since = ""
    """The checkpoint to go on from, by name or path; by default the newest."""

    fresh: Flag = False
    """Begin anew; what is there is set aside."""

    def run(self) -> int:
        """Say how it ended and where the adapter or the model is, or how to go on."""
        from manyheads.surgery.adapting import read_adapting, train_adapter

        asked = read_adapting(self.model, self.file, self.set)
        return follow(
            lambda: train_adapter(asked, since=self.since, fresh=self.fresh),
            f"manyheads adapt {self.model} {self.file}",
            self.set,
            self.since,
        )
