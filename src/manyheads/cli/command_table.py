"""The commands by name, in the order of the help; completion, which reads them, is not here."""

from collections.abc import Callable
from typing import Protocol

from manyheads.cli.commands.ablate import Ablate
from manyheads.cli.commands.attribute import Attribute
from manyheads.cli.commands.classify import Classify
from manyheads.cli.commands.compare import Compare
from manyheads.cli.commands.convert import Convert
from manyheads.cli.commands.encode import Encode
from manyheads.cli.commands.explain import Explain
from manyheads.cli.commands.gate import GateCommand
from manyheads.cli.commands.generate import Generate
from manyheads.cli.commands.inspect import Inspect
from manyheads.cli.commands.prune import Prune
from manyheads.cli.commands.report import Report
from manyheads.cli.commands.studio import Studio
from manyheads.cli.commands.tokenizer import TrainTokenizer
from manyheads.cli.commands.train import Adapt, Train


class Command(Protocol):
    """Arguments that were read, and can be acted on."""

    def run(self) -> int: ...


WORKING: dict[str, Callable[..., Command]] = {
    "explain": Explain,
    "report": Report,
    "studio": Studio,
    "inspect": Inspect,
    "ablate": Ablate,
    "attribute": Attribute,
    "compare": Compare,
    "generate": Generate,
    "encode": Encode,
    "classify": Classify,
    "convert": Convert,
    "tokenizer": TrainTokenizer,
    "train": Train,
    "prune": Prune,
    "gate": GateCommand,
    "adapt": Adapt,
}
