"""Every type of result that can be saved, and the function that reads any of them back."""

from pathlib import Path
from typing import Any

from manyheads.lens.ablation import Ablation, Cumulative, Without
from manyheads.lens.answering import Attribution
from manyheads.lens.attribution import DirectLogits
from manyheads.lens.by_layer import ByLayer
from manyheads.lens.collapse import Collapse
from manyheads.lens.comparison import Comparison
from manyheads.lens.dead import Dead
from manyheads.lens.gradients import ByToken, HeadGradients
from manyheads.lens.importance import Importance
from manyheads.lens.inspection import Inspection
from manyheads.lens.ioi import NameHeads
from manyheads.lens.labels import Kinds
from manyheads.lens.logit_lens import LogitLens
from manyheads.lens.memories import Memories
from manyheads.lens.neurons import Neurons
from manyheads.lens.pairs import ByPair
from manyheads.lens.patching import Patching
from manyheads.lens.patterns import Largest, Pattern, PatternSet
from manyheads.lens.redundancy import Redundancy
from manyheads.lens.results import ByHead
from manyheads.lens.statistics import Statistics
from manyheads.lens.storing import Result, read_result
from manyheads.lens.syntax_probe import SyntaxProbe
from manyheads.lens.verdicts import Faithfulness

__all__ = ["RESULT_TYPES", "load"]

RESULT_TYPES: dict[str, type[Result]] = {
    "Ablation": Ablation,
    "Attribution": Attribution,
    "ByHead": ByHead,
    "ByLayer": ByLayer,
    "ByPair": ByPair,
    "ByToken": ByToken,
    "Collapse": Collapse,
    "Comparison": Comparison,
    "Cumulative": Cumulative,
    "Dead": Dead,
    "DirectLogits": DirectLogits,
    "Faithfulness": Faithfulness,
    "HeadGradients": HeadGradients,
    "Importance": Importance,
    "Inspection": Inspection,
    "Kinds": Kinds,
    "Largest": Largest,
    "LogitLens": LogitLens,
    "Memories": Memories,
    "NameHeads": NameHeads,
    "Neurons": Neurons,
    "Patching": Patching,
    "Pattern": Pattern,
    "PatternSet": PatternSet,
    "Redundancy": Redundancy,
    "Statistics": Statistics,
    "SyntaxProbe": SyntaxProbe,
    "Without": Without,
}


def load(path: Path | str) -> Any:
    """Read a saved result back as its own type.

    >>> import tempfile
    >>> from manyheads import lens
    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, seed=0)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     lens.statistics(model, [[5, 6, 7]]).save(f"{folder}/statistics.json")
    ...     type(load(f"{folder}/statistics.json")).__name__
    'Statistics'
    """
    return read_result(path, RESULT_TYPES)
