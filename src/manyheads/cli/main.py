"""The command line: `manyheads COMMAND ...`."""

import os
import sys
from collections.abc import Callable, Sequence
from typing import Protocol

import tyro

from manyheads.cli.ablate import Ablate
from manyheads.cli.adapt import Adapt
from manyheads.cli.attribute import Attribute
from manyheads.cli.compare import Compare
from manyheads.cli.convert import Convert
from manyheads.cli.encode import Encode
from manyheads.cli.explain import Explain
from manyheads.cli.gate import GateCommand
from manyheads.cli.generate import Generate
from manyheads.cli.inspect import Inspect
from manyheads.cli.prune import Prune
from manyheads.cli.report import Report
from manyheads.cli.studio import Studio
from manyheads.cli.tokenizer import TrainTokenizer
from manyheads.cli.train import Train
from manyheads.errors import ManyheadsError

__all__ = ["main"]


class Command(Protocol):
    """Arguments that were read, and can be acted on."""

    def run(self) -> int: ...


COMMANDS: dict[str, Callable[..., Command]] = {
    "explain": Explain,
    "report": Report,
    "studio": Studio,
    "inspect": Inspect,
    "ablate": Ablate,
    "attribute": Attribute,
    "compare": Compare,
    "generate": Generate,
    "encode": Encode,
    "convert": Convert,
    "tokenizer": TrainTokenizer,
    "train": Train,
    "prune": Prune,
    "gate": GateCommand,
    "adapt": Adapt,
}

ABOUT = """See, measure and reshape every attention head, at full speed.

Start with: manyheads inspect

Also: manyheads inspect --help, manyheads --version"""

FIRST = """manyheads: see, measure and reshape every attention head, at full speed.

Start here: what every head of a small model does, in a table, in one file, in the browser.

    manyheads inspect
    manyheads report -o report.html
    manyheads studio

Or watch one sentence pass through one attention layer, number by number.

    manyheads explain "The cat sat on the mat."

All commands: manyheads --help"""

DONE, FAILED, WRONG_USE = 0, 1, 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; 0 where it is done, 1 where it failed, 2 where it was asked wrongly."""
    given = sys.argv[1:] if arguments is None else list(arguments)
    _never_fail_to_print()
    if not given:
        print(FIRST)
        return DONE
    if given == ["--version"]:
        print(f"manyheads {_version()}")
        return DONE
    try:
        command = tyro.extras.subcommand_cli_from_dict(
            COMMANDS, prog="manyheads", description=ABOUT, args=given
        )
        return command.run()
    except BrokenPipeError:
        # Whoever read the output, such as head, has seen enough.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115, kept open till the end
        return DONE
    except ManyheadsError as error:
        return _fail(str(error), WRONG_USE)
    except OSError as error:
        return _fail(
            f"{error.filename}: {error.strerror}." if error.filename else str(error), FAILED
        )
    except KeyboardInterrupt:
        return _fail("stopped.", FAILED)


def _fail(reason: str, code: int) -> int:
    print(f"error: {reason}", file=sys.stderr)
    return code


def _never_fail_to_print() -> None:
    """Where the terminal cannot show a letter it shows a question mark."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


def _version() -> str:
    # A tenth of a second to load, and only this needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("manyheads")
    except PackageNotFoundError:
        return "run from its source"
