"""manyheads train and manyheads adapt: train as a run file says."""

import shlex
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from manyheads.cli import arguments

if TYPE_CHECKING:
    from manyheads.train.loop.session import TrainResult

RunFile = Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN.TOML")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingOptions:
    """What differs from the run file, and where to start."""

    set: Annotated[arguments.Strings, arguments.repeatable("KEY=VALUE")] = ()
    """A value that overrides the run file, such as run.steps=100 or adapter.rank=16."""

    since: Annotated[str, arguments.metavar("STEP-N", name="from")] = ""
    """The checkpoint to resume from, by name or path; by default the newest."""

    fresh: arguments.Flag = False
    """Start over; existing files are moved aside."""

    def run(self, work: "Callable[..., TrainResult]", command: str) -> int:
        """Train, and print where the result is, or how to resume."""
        from manyheads.progress import Interrupted

        if self.set:
            command += " " + shlex.join(part for change in self.set for part in ("--set", change))
        try:
            result = work(resume_from=self.since, fresh=self.fresh)
        except Interrupted as interrupt:
            # Before its first step, a run may not have saved where it started from.
            started = f" --from {shlex.quote(self.since)}" if self.since else ""
            print(f"{interrupt}; resume with: {command}{started}", file=sys.stderr)
            return interrupt.exit_code
        state = result.state
        if result.exit_code and result.is_main:
            saved = f"stopped at step {state.step:,}, which is saved"
            print(f"{saved}; resume with: {command}", file=sys.stderr)
        elif result.is_main:
            print(f"{state.step:,} steps, {state.tokens:,} {result.unit}: {result.saved}")
        return result.exit_code


@dataclass(frozen=True, slots=True)
class Train:
    """Train a model as a run file says; a run that was interrupted is resumed.

    For example: manyheads train run.toml --set run.steps=100

    On many GPUs: torchrun --nproc-per-node 8 -m manyheads train run.toml

    On several machines with a shared disk, the same on each: torchrun --nnodes 4
    --nproc-per-node 8 --rdzv-backend c10d --rdzv-endpoint HOST:29500 -m manyheads train run.toml
    """

    file: RunFile
    """The run file: model, data, optimizer and run."""

    options: TrainingOptions = TrainingOptions()

    def run(self) -> int:
        """Print where the model is, or how to resume."""
        from manyheads.train.loop.session import train
        from manyheads.train.run_file.run_config import read_run

        run = read_run(self.file, self.options.set)
        return self.options.run(partial(train, run), f"manyheads train {self.file}")


@dataclass(frozen=True, slots=True)
class Adapt:
    """Train a LoRA adapter as a run file says and save it in peft's format, or train some heads.

    For example: manyheads adapt gpt2/ run.toml --set adapter.rank=16

    The file is one for train without [model] and with [adapter]: rank, alpha, targets, layers,
    heads, dropout, scaling, modules_to_save, name, base, and merged = true to also save the merged
    model, or only that where L0Gates removes heads. With [freeze] instead, heads = ["L0H1"] freezes
    these heads, all_except = ["L0H1"] everything else, and the model itself is trained. Of [model],
    classes may be set: a new classification head, which is trained too.
    """

    model: arguments.RequiredModel
    """The folder of a model, or a model of the hub: org/name."""

    file: RunFile
    """The run file: adapter, data, optimizer and run."""

    options: TrainingOptions = TrainingOptions()

    def run(self) -> int:
        """Print where the adapter or the model is, or how to resume."""
        from manyheads.surgery.finetune.adapter_run import read_adapter_run, train_adapter

        run = read_adapter_run(self.model, self.file, self.options.set)
        command = f"manyheads adapt {self.model} {self.file}"
        return self.options.run(partial(train_adapter, run), command)
