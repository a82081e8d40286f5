"""Every type of result that can be saved, and the function that reads any of them back."""

from pathlib import Path
from typing import Any

from manyheads.lens.attention_maps.patterns import Largest, Pattern, PatternSet
from manyheads.lens.attribution.attribute import Attribution
from manyheads.lens.attribution.direct_logits import DirectLogits
from manyheads.lens.attribution.gradients import ByToken, HeadGradients
from manyheads.lens.attribution.logit_lens import LogitLens
from manyheads.lens.causal.ablation import Ablation, Cumulative, Without
from manyheads.lens.causal.gradient_importance import Importance
from manyheads.lens.causal.patching import Patching
from manyheads.lens.diff.comparison import Comparison
from manyheads.lens.faithful.faithfulness_report import Faithfulness
from manyheads.lens.head_kinds.ioi import NameHeads
from manyheads.lens.head_kinds.labels import Kinds
from manyheads.lens.inspection import Inspection
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.probing.syntax import SyntaxProbe
from manyheads.lens.redundant.collapse import Collapse
from manyheads.lens.redundant.dead_heads import Dead
from manyheads.lens.redundant.heads import Redundancy
from manyheads.lens.results.by_head import ByHead
from manyheads.lens.results.by_layer import ByLayer
from manyheads.lens.results.by_pair import ByPair
from manyheads.lens.results.files import Result, read_result
from manyheads.lens.weights.ffn_key_values import Memories
from manyheads.lens.weights.neurons import Neurons

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
