"""The command line: `manyheads COMMAND ...`."""

import os
import re
import shlex
import shutil
import sys
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, redirect_stderr, redirect_stdout
from difflib import get_close_matches
from functools import partial
from io import StringIO
from itertools import takewhile
from typing import Any

import tyro

from manyheads.cli import command_table
from manyheads.cli.arguments import page_for_json
from manyheads.cli.command_table import COMMANDS, Command, Option, options_of
from manyheads.cli.completion import Completion
from manyheads.errors import InputError, LongTextWarning, ManyheadsError, ManyheadsWarning
from manyheads.formatting import alternatives
from manyheads.progress import Progress

ALL_COMMANDS: dict[str, Callable[..., Command]] = {**COMMANDS, "completion": Completion}

FIRST = """manyheads: see, measure and reshape every attention head, at full speed.

Start here: what every head of a small model does, in a table, in one file, in the browser.

    manyheads inspect
    manyheads report -o report.html
    manyheads studio

Or follow one sentence through one attention layer, number by number.

    manyheads explain "The cat sat on the mat."

All commands: manyheads --help"""

HELP = """usage: manyheads COMMAND ...

See, measure and reshape every attention head, at full speed.

{commands}

Start with: manyheads inspect
The options of a command: manyheads inspect --help
The version: manyheads --version"""

DONE, FAILED, WRONG_USE = 0, 1, 2
# These print as they go, or wait for somebody.
TALKING = ("generate", "search", "answer", "studio", "train", "adapt", "completion")
# Longer errors, with a value that fills a screen, lose their middle.
LONGEST_ERROR = 800
# What remedies in Python call, and what does the same at the command line.
COMMAND_REMEDIES = {
    r".*with_classes.*": "train one with manyheads train: docs/guides/classify.md and entities.md",
    r"^use manyheads\.tag$": "use manyheads extract",
    r"manyheads\.tag\b": "manyheads classify",
    r"set model\.tokenizer, ": "",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0 done, 1 failed, 2 wrong use."""
    words = sys.argv[1:] if arguments is None else list(arguments)
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            # Characters that the terminal cannot show become question marks.
            stream.reconfigure(errors="replace")
    command: Command | None = None
    try:
        page = _front_page(words)
        if page:
            print(wrapped(page))
            return DONE
        command = _parse(words)
        _check_encoding(command)
        talks = words[0] in TALKING
        with (
            warnings_on_stderr(),
            Progress(words[0], enabled=not talks, draws_bar=False),
            page_for_json(getattr(command, "json", None)),
        ):
            return command.run() or DONE
    except BrokenPipeError:
        # The reader of the output, such as head, has closed it.
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115, kept open until the end
        return DONE
    except ManyheadsError as error:
        return _fail(str(error) if command is None else _with_flags(error, command), WRONG_USE)
    except OSError as error:
        return _fail(
            f"{error.filename}: {error.strerror}." if error.filename else str(error), FAILED
        )
    except KeyboardInterrupt:
        return _fail("interrupted.", FAILED)


def _front_page(words: Sequence[str]) -> str:
    """What the program says about itself, if these words ask for it."""
    if not words:
        return FIRST
    if words in (["--help"], ["-h"]):
        summaries = {name: command_table.summary_of(ALL_COMMANDS[name]) for name in ALL_COMMANDS}
        lines = [f"  {name:<12}{summary}" for name, summary in summaries.items()]
        return HELP.format(commands="\n".join(lines))
    return f"manyheads {_version()}" if words == ["--version"] else ""


@contextmanager
def warnings_on_stderr() -> Iterator[None]:
    """Print each of our warnings at once and only once, in one line."""
    printed: set[object] = set()

    def show(message: Warning | str, category: type[Warning], *more: Any) -> None:
        if not issubclass(category, ManyheadsWarning):
            before(message, category, *more)
            return
        key = category if category is LongTextWarning else str(message)
        if key not in printed:
            printed.add(key)
            print(f"note: {message}", file=sys.stderr, flush=True)

    with warnings.catch_warnings():
        warnings.simplefilter("always", ManyheadsWarning)
        before, warnings.showwarning = warnings.showwarning, show  # type: ignore[assignment]
        yield


def _check_encoding(command: Command) -> None:
    """Refuse texts with bytes that are not UTF-8; the name of a file may have any."""
    for option in command_table.arguments_of(type(command)):
        if option.kind in ("file", "model"):
            continue
        value = option.value_in(command)
        for text in value if isinstance(value, tuple) else (value,):
            try:
                str(text).encode()
            except UnicodeEncodeError:
                name = (*option.names, option.metavar)[0]
                raise InputError(f"{name} {text!r} is not UTF-8", "convert it first") from None


def _parse(words: list[str]) -> Command:
    """The command with its arguments; help ends the program, and wrong use is an InputError."""
    command = ALL_COMMANDS.get(words[0])
    # To read the options of all other commands would take as long as those of this one.
    read: Callable[..., Any] = (
        partial(tyro.extras.subcommand_cli_from_dict, ALL_COMMANDS, prog="manyheads", args=words)
        if command is None
        else partial(tyro.cli, command, prog=f"manyheads {words[0]}", args=words[1:])
    )
    text = _Captured()
    try:
        # What tyro prints of wrong use is longer than one line.
        with redirect_stdout(text), redirect_stderr(StringIO()):
            return read(config=(tyro.conf.OmitArgPrefixes,))
    except SystemExit as ended:
        if ended.code == WRONG_USE:
            raise wrong_use(words, ALL_COMMANDS) from None
        print(wrapped(text.getvalue()), end="")
        raise


class _Captured(StringIO):
    """Captures help in the colors and letters of the terminal."""

    @property
    def encoding(self) -> str | None:  # type: ignore[override]
        return getattr(sys.__stdout__, "encoding", None)

    def isatty(self) -> bool:
        return sys.__stdout__ is not None and sys.__stdout__.isatty()


def wrapped(text: str) -> str:
    """The lines of a text that are wider than the terminal, wrapped; boxes fit already."""
    columns = shutil.get_terminal_size().columns
    lines = []
    for line in text.split("\n"):
        if len(line) <= columns or line[:1] in ("╭", "│", "╰", "\033"):
            lines.append(line)
            continue
        # A command and its summary, or an indented example.
        name = re.match(r" +(\S+ {2,})?", line)
        indent = " " * (len(name[0]) if name else 0)
        lines += textwrap.wrap(
            line, columns, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
    return "\n".join(lines)


def wrong_use(words: Sequence[str], commands: Mapping[str, Callable[..., object]]) -> InputError:
    """What is wrong with words that could not be parsed.

    >>> str(wrong_use(["inspct"], ALL_COMMANDS))
    "'inspct' is not a command: try inspect, or see manyheads --help."
    >>> str(wrong_use(["train", "run.toml", "--fresch"], ALL_COMMANDS))
    '--fresch is not an option of manyheads train: try --fresh, or see manyheads train --help.'
    """
    name = words[0]
    if name not in commands:
        what = "an option of manyheads" if name.startswith("-") else "a command"
        word = name if name.startswith("-") else repr(name)
        return InputError(f"{word} is not {what}", _suggestion(name, commands, "manyheads"))
    error = _Reader(name, commands[name]).read(words[1:])
    unreadable = f"{shlex.join(words[1:])!r} cannot be read"
    return error or InputError(unreadable, f"see manyheads {name} --help")


class _Reader:
    """Reads the words of one command in order, up to the first that is wrong."""

    def __init__(self, name: str, command: Callable[..., object]) -> None:
        self.program = f"manyheads {name}"
        self.options = {flag: option for option in options_of(command) for flag in option.names}
        self.positionals = list(command_table.positionals_of(command))
        self.options_read: list[Option] = []

    def read(self, words: Sequence[str]) -> InputError | None:
        rest = list(words)
        while rest:
            error = self._option(rest) if _is_option(rest[0]) else self._positional(rest)
            if error is not None:
                return error
        for option in (*self.positionals, *self.options.values()):
            if option.required and option not in self.options_read:
                name = " ".join([*option.names[:1], option.metavar])
                return InputError(f"{self.program} needs {name}", f"see {self.program} --help")
        return None

    def _option(self, rest: list[str]) -> InputError | None:
        name, equals, value = rest.pop(0).partition("=")
        option = self.options.get(name.replace("_", "-"))
        if option is None:
            suggestion = _suggestion(name, self.options, self.program)
            return InputError(f"{name} is not an option of {self.program}", suggestion)
        self.options_read.append(option)
        if option.kind == "flag":
            return InputError(f"{name} takes no value, got {value!r}") if equals else None
        values = [value] if equals else _take_values(rest, many=option.many)
        if values:
            return _wrong_value(name, option, values)
        remedy = f"write {name} {option.metavar}"
        if rest:
            remedy += f", or {name}={rest[0]} if that is the value"
        return InputError(f"{name} needs a value", remedy)

    def _positional(self, rest: list[str]) -> InputError | None:
        for option in self.positionals:
            if option not in self.options_read:
                self.options_read.append(option)
                return _wrong_value(option.metavar, option, _take_values(rest, many=option.many))
        text = " ".join(takewhile(lambda word: not _is_option(word), rest))
        if "--set" in self.options and "=" in rest[0]:
            text, remedy = rest[0], f"use --set {shlex.quote(rest[0])}"
        elif "--file" in self.options and os.path.isfile(text):  # noqa: PTH113, of any length
            remedy = f"use --file {shlex.quote(text)}"
        elif "--text" in self.options:
            remedy = f"use --text {shlex.quote(text)}"
        elif self.positionals and self.positionals[-1].many:
            remedy = "put it before the options"
        else:
            remedy = f"see {self.program} --help"
        return InputError(f"unexpected argument {text!r}", remedy)


def _take_values(rest: list[str], *, many: bool) -> list[str]:
    """Remove the next value from the words, or all up to the next option."""
    count = next((index for index, word in enumerate(rest) if _is_option(word)), len(rest))
    values = rest[: count if many else min(count, 1)]
    del rest[: len(values)]
    return values


def _wrong_value(name: str, option: Option, values: Sequence[str]) -> InputError | None:
    allowed = {"integer": (int, "an integer"), "number": (float, "a number")}
    for value in values:
        if option.choices and value not in option.choices:
            return InputError(f"{name} must be {alternatives(option.choices)}, got {value!r}")
        if option.kind in allowed:
            convert, what = allowed[option.kind]
            try:
                convert(value)
            except ValueError:
                return InputError(f"{name} must be {what}, got {value!r}")
    return None


def _is_option(word: str) -> bool:
    """Whether a word is an option, not a value: neither - alone nor a negative number is one."""
    return re.match(r"-(?=.)(?!\.?\d)", word) is not None


def _suggestion(name: str, names: Mapping[str, object], program: str) -> str:
    near = get_close_matches(name, names, n=1)
    return f"try {near[0]}, or see {program} --help" if near else f"see {program} --help"


def _with_flags(error: ManyheadsError, command: Command) -> str:
    """An error in terms of the command line: `top_k=0` becomes `--top-k 0`."""
    kind = type(command)
    flags = {option.field: option.names[0] for option in options_of(kind)}
    flags |= getattr(kind, "PYTHON_NAMES", {})

    def named(text: str) -> str:
        for name, flag in flags.items():
            text = re.sub(rf"(?<![\w.-]){name}=", f"{flag} ", text)
            # A word such as "text" means the option only where a value is judged.
            text = re.sub(rf"^{name}(?= (must|needs|is|has) )", flag, text)
            if "_" in name:
                text = re.sub(rf"(?<![\w.-]){name}\b(?!=)", flag, text)
        return text

    remedy = error.remedy
    for function, words in COMMAND_REMEDIES.items():
        remedy = re.sub(function, words, remedy)
    return str(ManyheadsError(named(error.problem), named(remedy)))


def _fail(reason: str, code: int) -> int:
    line = " ".join(reason.splitlines())
    if len(line) > LONGEST_ERROR:
        line = f"{line[: LONGEST_ERROR // 2]} … {line[-LONGEST_ERROR // 2 :]}"
    print(f"error: {line}", file=sys.stderr)
    return code


def _version() -> str:
    # It takes a tenth of a second to import, and only this needs it.
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("manyheads")
    except PackageNotFoundError:
        return "run from its source"
