"""The commands by name, in the order of the help, and the options of each."""

from collections.abc import Callable
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, Protocol, runtime_checkable

import tyro

from manyheads.annotations import Annotation, annotations_of
from manyheads.cli.commands import (
    ablate,
    classify,
    compare,
    convert,
    encode,
    explain,
    gate,
    generate,
    get,
    inspect,
    prune,
    report,
    studio,
    tokenizer,
    train,
)
from manyheads.cli.commands.attribute import Attribute
from manyheads.cli.commands.circuits.why import WhyCommand
from manyheads.cli.commands.experiments import heads, shape, study
from manyheads.cli.commands.pages import card, circuit
from manyheads.cli.commands.pages.atlas import AtlasCommand
from manyheads.cli.commands.tasks import answer, evaluate, extract, index, recall, search
from manyheads.cli.commands.tasks.filter import FilterCommand


@runtime_checkable
class Command(Protocol):
    """The parsed arguments of a command, which run it."""

    def run(self) -> int | None:
        """Do the work and return the exit code, by default 0."""


COMMANDS: dict[str, Callable[..., Command]] = {
    "explain": explain.Explain,
    "report": report.Report,
    "studio": studio.Studio,
    "atlas": AtlasCommand,
    "inspect": inspect.Inspect,
    "card": card.CardCommand,
    "ablate": ablate.Ablate,
    "attribute": Attribute,
    "circuit": circuit.CircuitCommand,
    "why": WhyCommand,
    "heads": heads.HeadsCommand,
    "recall": recall.RecallCommand,
    "evaluate": evaluate.EvaluateCommand,
    "compare": compare.Compare,
    "generate": generate.Generate,
    "encode": encode.Encode,
    "classify": classify.Classify,
    "extract": extract.Extract,
    "index": index.IndexCommand,
    "search": search.Search,
    "answer": answer.AnswerCommand,
    "filter": FilterCommand,
    "convert": convert.Convert,
    "get": get.Get,
    "tokenizer": tokenizer.TrainTokenizer,
    "train": train.Train,
    "prune": prune.Prune,
    "gate": gate.GateCommand,
    "adapt": train.Adapt,
    "shape": shape.ShapeCommand,
    "study": study.StudyCommand,
}


# What follows an option: nothing, a path, a model, one of some words, a number, or any text.
Kind = Literal["flag", "file", "model", "choice", "integer", "number", "text"]

MODEL_METAVARS = ("MODEL", "BEFORE", "AFTER", "OTHER")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """An option with its names, such as --out and -o, or a positional argument without any."""

    field: str
    group: str = ""
    """The field of the command that contains the option, if it is one of a group."""
    names: tuple[str, ...] = ()
    metavar: str
    kind: Kind
    choices: tuple[str, ...] = ()
    default: Any = MISSING
    repeatable: bool = False
    """Whether the option may be given several times."""
    many: bool = False
    """Whether several values may follow each other."""

    @property
    def required(self) -> bool:
        return self.default is MISSING

    def value_in(self, command: object) -> Any:
        """The value that the command was given."""
        return getattr(getattr(command, self.group) if self.group else command, self.field)


HELP = Option(field="help", names=("--help", "-h"), metavar="", kind="flag", default=False)


def summary_of(command: Callable[..., object]) -> str:
    """The first line of a command's help, without its full stop."""
    return (command.__doc__ or "").split("\n")[0].rstrip(".")


def options_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """The options of a command in the order of its help.

    >>> [option.names for option in options_of(train.Train)]
    [('--help', '-h'), ('--set',), ('--from',), ('--fresh',)]
    """
    return (HELP, *(option for option in arguments_of(command) if option.names))


def positionals_of(command: Callable[..., object]) -> tuple[Option, ...]:
    """The positional arguments of a command, the model first.

    >>> [(positional.metavar, positional.kind) for positional in positionals_of(train.Train)]
    [('RUN.TOML', 'file')]
    """
    return tuple(option for option in arguments_of(command) if not option.names)


def arguments_of(command: Callable[..., object]) -> list[Option]:
    """The options and positional arguments of a command, those of its groups included."""
    annotations = annotations_of(command)
    result = []
    for field in fields(command):  # type: ignore[arg-type]
        if is_dataclass(field.type):
            result += [
                replace(option, group=field.name, default=getattr(field.default, option.field))
                for option in arguments_of(type(field.default))
            ]
        else:
            result.append(_argument(field.name, annotations[field.name], field.default))
    return result


def _argument(name: str, annotation: Annotation, default: Any) -> Option:
    markers = annotation.extras

    def marked(attribute: str) -> Any:
        values = (getattr(marker, attribute, None) for marker in markers)
        return next((value for value in values if value is not None), None)

    positional = tyro.conf.Positional in markers
    repeatable = any(repr(marker) == "UseAppendAction" for marker in markers)
    metavar = marked("metavar") or {int: "INT", float: "FLOAT"}.get(annotation.hint, name.upper())
    kind, choices = _kind(annotation, metavar, positional)
    flag = "--" + (marked("name") or name).replace("_", "-")
    return Option(
        field=name,
        names=() if positional else (flag, *(marked("aliases") or ())),
        metavar=metavar.strip("[]. "),
        kind=kind,
        choices=choices,
        default=default,
        repeatable=repeatable,
        many=annotation.kind is tuple and not repeatable,
    )


def _kind(annotation: Annotation, metavar: str, positional: bool) -> tuple[Kind, tuple[str, ...]]:
    # The type without None, and of a tuple that of its elements.
    value = next(member for member in annotation.members if member.form != "none")
    value = annotation.items[0] if annotation.kind is tuple else value
    if value.form == "literal":
        return "choice", value.values
    if metavar.startswith("{"):
        return "choice", tuple(metavar.strip("{}").split(","))
    if positional and "STUDY" in metavar:
        return "choice", study.study_names()
    if positional and any(name in metavar for name in MODEL_METAVARS):
        return "model", ()
    if value.hint is Path or (positional and any(name in metavar for name in ("FILE", "INDEX"))):
        return "file", ()
    kinds: dict[Any, Kind] = {bool: "flag", int: "integer", float: "number"}
    return kinds.get(value.hint, "text"), ()
