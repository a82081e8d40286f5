"""manyheads completion: a script that teaches a shell our commands and options."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

import tyro

from manyheads.cli.command_table import WORKING


@dataclass(frozen=True, slots=True)
class Completion:
    """Print a script that lets the shell complete commands, options, models and files.

    For example: eval "$(manyheads completion bash)"

    That line in ~/.bashrc, or with zsh in ~/.zshrc after compinit; for fish: manyheads completion
    fish > ~/.config/fish/completions/manyheads.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell to print it for."""

    def run(self) -> int:
        """Print the script."""
        from manyheads.checkpoints.hub import HOUSE
        from manyheads.cli import completion

        write = {"bash": completion.bash, "zsh": completion.zsh, "fish": completion.fish}[
            self.shell
        ]
        print(write({**WORKING, "completion": Completion}, HOUSE), end="")
        return 0


# What may follow: nothing, a file or folder, a model, one of some words, or what nobody can guess.
Kind = Literal["flag", "file", "model", "choice", "other"]

MODELS = ("MODEL", "BEFORE", "AFTER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """Something to give: by name, such as --out and its short form, or by place and without one."""

    names: tuple[str, ...] = ()
    metavar: str
    kind: Kind
    choices: tuple[str, ...] = ()
    repeats: bool = False


def options_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """The options of a command in its own order.

    >>> from manyheads.cli.commands.train import Train
    >>> [option.names for option in options_of(Train)]
    [('--help', '-h'), ('--set',), ('--from',), ('--fresh',)]
    """
    asked = [field.option() for field in _fields(command) if not field.positional]
    return (Option(names=("--help", "-h"), metavar="", kind="flag"), *asked)


def places_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """What a command takes by place, the model first; the last may stand for many.

    >>> from manyheads.cli.commands.train import Train
    >>> [(place.metavar, place.kind) for place in places_of(Train)]
    [('RUN.TOML', 'file')]
    """
    return tuple(field.option() for field in _fields(command) if field.positional)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Field:
    name: str
    type: Any
    positional: bool
    appended: bool
    given_name: str | None
    metavar: str | None
    aliases: tuple[str, ...]

    def option(self) -> Option:
        kind, choices = self._kind()
        name = "--" + (self.given_name or self.name).replace("_", "-")
        return Option(
            names=() if self.positional else (name, *self.aliases),
            metavar=(self.metavar or self.name.upper()).strip("[]. "),
            kind=kind,
            choices=choices,
            repeats=self.appended or (self.positional and get_origin(self.type) is tuple),
        )

    def _kind(self) -> tuple[Kind, tuple[str, ...]]:
        metavar, inner = self.metavar or "", _bare(self.type)
        if inner is bool:
            return "flag", ()
        if get_origin(inner) is Literal:
            # A choice of several words is a default that nobody types.
            return "choice", tuple(each for each in get_args(inner) if " " not in each)
        if metavar.startswith("{"):
            return "choice", tuple(metavar.strip("{}").split(","))
        if self.positional and any(each in metavar for each in MODELS):
            return "model", ()
        if inner is Path or (self.positional and "FILE" in metavar):
            return "file", ()
        return "other", ()


def _fields(command: Callable[..., object]) -> list[_Field]:
    hints = get_type_hints(command, include_extras=True)
    return [_field(each.name, hints[each.name]) for each in fields(command)]  # type: ignore[arg-type]


def _field(name: str, hint: Any) -> _Field:
    inner, marks = (hint, ()) if get_origin(hint) is not Annotated else _split(hint)

    def told(attribute: str) -> Any:
        values = (getattr(mark, attribute, None) for mark in marks)
        return next((value for value in values if value is not None), None)

    return _Field(
        name=name,
        type=inner,
        positional=tyro.conf.Positional in marks,
        appended=any(repr(mark) == "UseAppendAction" for mark in marks),
        given_name=told("name"),
        metavar=told("metavar"),
        aliases=tuple(told("aliases") or ()),
    )


def _split(hint: Any) -> tuple[Any, tuple[Any, ...]]:
    inner, *marks = get_args(hint)
    return inner, tuple(marks)


def _bare(kind: Any) -> Any:
    """The type without None, and of many that of each."""
    if get_origin(kind) in (Union, UnionType):
        return next(each for each in get_args(kind) if each is not NoneType)
    if get_origin(kind) is tuple:
        return get_args(kind)[0]
    return kind


Commands = Mapping[str, Callable[..., object]]

PROGRAM = "manyheads"

BASH = """\
# bash: eval "$(manyheads completion bash)"
# Some words, and with -f files or with -d folders.
_manyheads_offer() {
  mapfile -t COMPREPLY < <(compgen -W "$1" -- "$word"; [[ -z ${2-} ]] || compgen "$2" -- "$word")
  [[ -z ${2-} ]] || compopt -o filenames 2>/dev/null
}
_manyheads() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  COMPREPLY=()
  # The shell takes --file=name for three words.
  if [[ $word == "=" ]]; then word=""; elif [[ $before == "=" ]]; then
    before=${COMP_WORDS[COMP_CWORD-2]}
  fi
  if ((COMP_CWORD == 1)); then
    _manyheads_offer "@COMMANDS@"
    return
  fi
  case "${COMP_WORDS[1]} $before" in
@VALUES@
  esac
  if [[ $word == -* ]]; then
    case ${COMP_WORDS[1]} in
@OPTIONS@
    esac
    return
  fi
  case ${COMP_WORDS[1]} in
@PLACES@
  esac
}
complete -F _manyheads manyheads
"""

ZSH = """\
#compdef manyheads
# zsh, after compinit: eval "$(manyheads completion zsh)"
_manyheads_models() {
  _alternative 'models:model:(@MODELS@)' 'folders:folder:_files -/'
}
_manyheads() {
  local -a commands=(
@COMMANDS@
  )
  if ((CURRENT == 2)); then
    _describe command commands
    [[ $words[2] == -* ]] && _arguments '--help' '--version'
    return
  fi
  shift words
  ((CURRENT--))
  case $words[1] in
@CASES@
  esac
}
if [[ $funcstack[1] == _manyheads ]]; then _manyheads "$@"; else compdef _manyheads manyheads; fi
"""

FISH = """\
# fish: manyheads completion fish | source
function __manyheads_is
    set -l words (commandline -opc)
    test (count $words) -gt 1; and test $words[2] = $argv[1]
end
complete -c manyheads -f
complete -c manyheads -n 'test (count (commandline -opc)) -eq 1' -l help -l version
"""


def bash(commands: Commands, models: Sequence[str]) -> str:
    """For bash 4 and newer."""
    values, options, places = [], [], []
    for name, command in commands.items():
        named = options_of(command)
        words = " ".join(long for option in named for long in option.names)
        options.append(f'      {name}) _manyheads_offer "{words}" ;;')
        for option in named:
            if option.kind != "flag":
                patterns = "|".join(f'"{name} {each}"' for each in option.names)
                values.append(f"    {patterns}) {_bash_offer([option], models)}return ;;")
        # Places are not counted: what fits any of them is offered at each.
        places.append(f"    {name}) {_bash_offer(places_of(command), models)};;")
    return _filled(
        BASH,
        COMMANDS=" ".join([*commands, "--help", "--version"]),
        VALUES="\n".join(values),
        OPTIONS="\n".join(options),
        PLACES="\n".join(places),
    )


def zsh(commands: Commands, models: Sequence[str]) -> str:
    """For zsh with its completion system switched on."""
    described = [f"    {_quoted(f'{name}:{_about(each)}')}" for name, each in commands.items()]
    cases = []
    for name, command in commands.items():
        specs = [spec for option in options_of(command) for spec in _zsh_options(option)]
        specs += [_zsh_place(place) for place in places_of(command)]
        cases.append(f"    {name}) _arguments -S {' '.join(map(_quoted, specs))} ;;")
    return _filled(
        ZSH, MODELS=" ".join(models), COMMANDS="\n".join(described), CASES="\n".join(cases)
    )


def fish(commands: Commands, models: Sequence[str]) -> str:
    """For fish 3 and newer."""
    lines = []
    for name, command in commands.items():
        start = "-n 'test (count (commandline -opc)) -eq 1'"
        lines.append(f"complete -c {PROGRAM} {start} -a {name} -d {_quoted(_about(command))}")
        here = f"complete -c {PROGRAM} -n '__manyheads_is {name}'"
        for option in options_of(command):
            names = " ".join(
                f"-l {each[2:]}" if each.startswith("--") else f"-s {each[1:]}"
                for each in option.names
            )
            lines.append(f"{here} {names}{_fish_value(option)}")
        for place in places_of(command):
            lines.extend(f"{here} {offer}" for offer in _fish_place(place, models))
    return FISH + "\n".join(lines) + "\n"


def _bash_offer(options: Sequence[Option], models: Sequence[str]) -> str:
    kinds = {option.kind for option in options}
    words = [*(models if "model" in kinds else ()), *chain(*(option.choices for option in options))]
    more = " -f" if "file" in kinds else " -d" if "model" in kinds else ""
    return f'_manyheads_offer "{" ".join(words)}"{more}; ' if words or more else ""


def _zsh_options(option: Option) -> list[str]:
    action = {"file": "_files", "choice": f"({' '.join(option.choices)})"}.get(option.kind, " ")
    value = "" if option.kind == "flag" else f":{option.metavar}:{action}"
    star = "*" if option.repeats else ""
    return [f"{star}{each}{value}" for each in option.names]


def _zsh_place(place: Option) -> str:
    choice = f"({' '.join(place.choices)})"
    action = {"file": "_files", "model": "_manyheads_models", "choice": choice}.get(place.kind, " ")
    return f"{'*' if place.repeats else ''}:{place.metavar}:{action}"


def _fish_value(option: Option) -> str:
    if option.kind == "choice":
        return f" -x -a '{' '.join(option.choices)}'"
    return {"flag": "", "file": " -r -F", "other": " -x"}[option.kind]


def _fish_place(place: Option, models: Sequence[str]) -> list[str]:
    if place.kind == "model":
        return [f"-a '{' '.join(models)} (__fish_complete_directories)'"]
    if place.kind == "choice":
        return [f"-a '{' '.join(place.choices)}'"]
    return ["-F"] if place.kind == "file" else []


def _about(command: Callable[..., object]) -> str:
    return (command.__doc__ or "").split("\n")[0].rstrip(".")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _filled(script: str, **parts: str) -> str:
    for name, part in parts.items():
        script = script.replace(f"@{name}@", part)
    return script
