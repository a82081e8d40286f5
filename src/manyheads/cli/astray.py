"""What to do with words that no option takes, which the parser alone calls unrecognized."""

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields
from difflib import get_close_matches
from typing import Any

import tyro

__all__ = ["advice"]


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
