"""What the commands that train ask for alike, and how they say that a run has ended."""

import shlex
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Annotated

import tyro

if TYPE_CHECKING:
    from manyheads.train.loop.session import TrainResult

__all__ = ["Changes", "Since", "follow"]

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
