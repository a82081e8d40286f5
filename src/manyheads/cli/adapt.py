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
    """Train a LoRA adapter as a run file says and save it in peft's format, or train some heads.

    For example: manyheads adapt gpt2/ run.toml --set adapter.rank=16

    The file is one for train without [model] and with [adapter]: rank, alpha, targets, layers,
    heads, dropout, scaling, modules_to_save, name, base, and merged = true to also save the whole
    model, or it alone where L0Gates closes heads of it. With [freeze] instead, heads = ["L0H1"]
    freezes these heads and all_except = ["L0H1"] everything else, and the model itself is
    trained. Of [model], classes may be set: a new head for so many, which is trained too.
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """The folder of a model, or a name on the hub."""

    file: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]
    """What to adapt, on what, how."""

    set: Changes = ()
    """A value in place of the file's, such as adapter.rank=16; may be given several times."""

    since: Since = ""
    """The checkpoint to resume from, by name or path; by default the newest."""

    fresh: Flag = False
    """Start over; existing files are moved aside."""

    def run(self) -> int:
        """Print how it ended and where the adapter or the model is, or how to resume."""
        from manyheads.surgery.finetune.adapter_run import read_adapter_run, train_adapter

        run = read_adapter_run(self.model, self.file, self.set)
        return follow(
            lambda: train_adapter(run, since=self.since, fresh=self.fresh),
            f"manyheads adapt {self.model} {self.file}",
            self.set,
            self.since,
        )
