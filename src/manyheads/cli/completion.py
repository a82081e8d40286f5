"""manyheads completion: a script that completes commands, options and files in a shell."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated, Literal

import tyro

from manyheads.cli.command_table import COMMANDS, Option, options_of, positionals_of, summary_of


@dataclass(frozen=True, slots=True)
class Completion:
    """Print a script that completes commands, options, models and files in the shell.

    For example: eval "$(manyheads completion bash)"

    Put that line into ~/.bashrc, or for zsh into ~/.zshrc after compinit; for fish: manyheads
    completion fish > ~/.config/fish/completions/manyheads.fish
    """

    shell: Annotated[Literal["bash", "zsh", "fish"], tyro.conf.Positional]
    """The shell to print the script for."""

    def run(self) -> int:
        """Print the script."""
        from manyheads.checkpoints.hub import MODEL_NAMES

        write = {"bash": bash, "zsh": zsh, "fish": fish}[self.shell]
        print(write({**COMMANDS, "completion": Completion}, MODEL_NAMES), end="")
        return 0


Commands = Mapping[str, Callable[..., object]]

PROGRAM = "manyheads"

BASH = """\
# bash: eval "$(manyheads completion bash)"
# Offers some words, and files with -f or folders with -d.
_manyheads_offer() {
  mapfile -t COMPREPLY < <(compgen -W "$1" -- "$word"; [[ -z ${2-} ]] || compgen "$2" -- "$word")
  [[ -z ${2-} ]] || compopt -o filenames 2>/dev/null
}
_manyheads() {
  local word=${COMP_WORDS[COMP_CWORD]} before=${COMP_WORDS[COMP_CWORD-1]}
  COMPREPLY=()
  # The shell splits --file=name into three words.
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
@POSITIONALS@
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
    values, options, positionals = [], [], []
    for name, command in commands.items():
        own = options_of(command)
        words = " ".join(long for option in own for long in option.names)
        options.append(f'      {name}) _manyheads_offer "{words}" ;;')
        for option in own:
            if option.kind != "flag":
                patterns = "|".join(f'"{name} {flag}"' for flag in option.names)
                values.append(f"    {patterns}) {_bash_offer([option], models)}return ;;")
        # Positional arguments are not counted: each is offered what fits any of them.
        positionals.append(f"    {name}) {_bash_offer(positionals_of(command), models)};;")
    return _filled(
        BASH,
        COMMANDS=" ".join([*commands, "--help", "--version"]),
        VALUES="\n".join(values),
        OPTIONS="\n".join(options),
        POSITIONALS="\n".join(positionals),
    )


def zsh(commands: Commands, models: Sequence[str]) -> str:
    """For zsh with its completion system switched on."""
    descriptions = [
        f"    {_quoted(f'{name}:{summary_of(command)}')}" for name, command in commands.items()
    ]
    cases = []
    for name, command in commands.items():
        arguments = (*options_of(command), *positionals_of(command))
        specs = [spec for option in arguments for spec in _zsh_specs(option)]
        cases.append(f"    {name}) _arguments -S {' '.join(map(_quoted, specs))} ;;")
    return _filled(
        ZSH, MODELS=" ".join(models), COMMANDS="\n".join(descriptions), CASES="\n".join(cases)
    )


def fish(commands: Commands, models: Sequence[str]) -> str:
    """For fish 3 and newer."""
    lines = []
    for name, command in commands.items():
        start = "-n 'test (count (commandline -opc)) -eq 1'"
        lines.append(f"complete -c {PROGRAM} {start} -a {name} -d {_quoted(summary_of(command))}")
        prefix = f"complete -c {PROGRAM} -n '__manyheads_is {name}'"
        for option in options_of(command):
            names = " ".join(
                f"-l {flag[2:]}" if flag.startswith("--") else f"-s {flag[1:]}"
                for flag in option.names
            )
            value = {"flag": "", "file": " -r"}.get(option.kind, " -x")
            lines.append(f"{prefix} {names}{value}{_fish_offer(option, models)}")
        offers = (_fish_offer(positional, models) for positional in positionals_of(command))
        lines += [f"{prefix}{offer}" for offer in offers if offer]
    return FISH + "\n".join(lines) + "\n"


def _bash_offer(options: Sequence[Option], models: Sequence[str]) -> str:
    kinds = {option.kind for option in options}
    words = [*(models if "model" in kinds else ()), *chain(*(option.choices for option in options))]
    more = " -f" if "file" in kinds else " -d" if "model" in kinds else ""
    return f'_manyheads_offer "{" ".join(words)}"{more}; ' if words or more else ""


def _zsh_specs(option: Option) -> list[str]:
    """One per name of an option; a positional argument has no name."""
    actions = {"file": "_files", "model": "_manyheads_models"}
    actions["choice"] = f"({' '.join(option.choices)})"
    value = "" if option.kind == "flag" else f":{option.metavar}:{actions.get(option.kind, ' ')}"
    star = "*" if (option.repeatable if option.names else option.many) else ""
    return [f"{star}{flag}{value}" for flag in option.names or ("",)]


def _fish_offer(option: Option, models: Sequence[str]) -> str:
    if option.kind == "choice":
        return f" -a '{' '.join(option.choices)}'"
    folders = f" -a '{' '.join(models)} (__fish_complete_directories)'"
    return {"file": " -F", "model": folders}.get(option.kind, "")


def _quoted(text: str) -> str:
    return "'" + text.replace("'", "'\\''") + "'"


def _filled(script: str, **parts: str) -> str:
    for name, part in parts.items():
        script = script.replace(f"@{name}@", part)
    return script
