"""manyheads train: a run file to a model."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from manyheads.train.loop.session import TrainResult
from dataclasses import dataclass
from pathlib import Path

from manyheads.cli.arguments import Flag

Changes = Annotated[tyro.conf.UseAppendAction[tuple[str, ...]], tyro.conf.arg(metavar="KEY=VALUE")]
Since = Annotated[str, tyro.conf.arg(name="from", metavar="STEP-N", help_behavior_hint="")]


def follow(
    work: "Callable[[], TrainResult]", command: str, changes: Sequence[str] = (), since: str = ""
) -> int:
    """Run to the end and tell it, or tell that the run was stopped before its first step.

    Until then there may be nothing in the run's own folder that tells where it began.
    """
    from manyheads.train.interrupt import Interrupted

    said = [part for change in changes for part in ("--set", change)]
    command = " ".join([command, shlex.join(said)]) if said else command
    try:
        finished = work()
    except Interrupted as stopped:
        begun = f" --from {shlex.quote(since)}" if since else ""
        print(f"{stopped}; go on with: {command}{begun}", file=sys.stderr)
        return stopped.exit_code
    return _tell(finished, command)


def _tell(finished: "TrainResult", command: str) -> int:
    """Where what was trained is, or how to go on; of several processes one says so."""
    state = finished.state
    if finished.exit_code and finished.is_main:
        print(
            f"stopped at step {state.step:,}, which is saved; go on with: {command}",
            file=sys.stderr,
        )
    elif finished.is_main:
        print(f"{state.step:,} steps, {state.tokens:,} {finished.unit}: {finished.saved}")
    return finished.exit_code


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
            lambda: train_adapter(run, resume_from=self.since, fresh=self.fresh),
            f"manyheads adapt {self.model} {self.file}",
            self.set,
            self.since,
        )
