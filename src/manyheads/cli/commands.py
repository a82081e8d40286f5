"""The commands by name, in the order of the help; completion, which reads them, is not here."""

from collections.abc import Callable
from typing import Protocol

from manyheads.cli.ablate import Ablate
from manyheads.cli.adapt import Adapt
from manyheads.cli.attribute import Attribute
from manyheads.cli.classify import Classify
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

__all__ = ["Command", "WORKING"]


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
