"""The command line: `manyheads COMMAND ...`."""

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import tyro

from manyheads.cli.command_table import WORKING, Command
from manyheads.cli.completion import Completion
from manyheads.errors import ManyheadsError


def advice(given: Sequence[str], commands: Mapping[str, Callable[..., Any]]) -> str | None:
    """A line for somebody whose words could not be read, where there is something to say."""
    name = given[0]
    if name not in commands:
        near = get_close_matches(name, commands, n=1)
        return f"{name!r} is no command: did you mean {near[0]}?" if near else None
    words = _unread(commands[name], given[1:])
    if not words or words[0].startswith("-"):
        return None
    options = {each.name for each in fields(commands[name])}  # type: ignore[arg-type]
    if "set" in options and "=" in words[0]:
        return f"{words[0]!r} stands alone: use --set {shlex.quote(words[0])}."
    if "text" in options:
        text = " ".join(words)
        return f"{text!r} stands alone: use --text {shlex.quote(text)}."
    return None


def _unread(command: Callable[..., Any], given: Sequence[str]) -> list[str]:
    try:
        _, unread = tyro.cli(command, args=given, return_unknown_args=True, console_outputs=False)
    except SystemExit:
        # Something else is wrong too, and the parser has said what.
        return []
    return unread


COMMANDS: dict[str, Callable[..., Command]] = {**WORKING, "completion": Completion}

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
    except SystemExit as ended:
        said = advice(given, COMMANDS) if ended.code == WRONG_USE else None
        if said is not None:
            _fail(said, WRONG_USE)
        raise
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
