"""Every type of result that can be saved, and the function that reads any of them back."""

from pathlib import Path
from typing import Any

from manyheads.argument_checks import checked
from manyheads.lens.attention_maps.patterns import Pattern, PatternSet, TopKeys
from manyheads.lens.attribution.attribute import Attribution
from manyheads.lens.attribution.direct_logits import DirectLogits, LogitLens
from manyheads.lens.attribution.gradients import HeadAttribution, TokenAttribution
from manyheads.lens.causal.ablation import Ablation, CumulativeAblation, JointAblation
from manyheads.lens.causal.gradient_importance import Importance
from manyheads.lens.causal.patching import Patching
from manyheads.lens.diff.comparison import Comparison
from manyheads.lens.faithful.faithfulness_report import Faithfulness
from manyheads.lens.head_kinds.ioi import IOIHeads
from manyheads.lens.head_kinds.kinds import Kinds
from manyheads.lens.inspection import Inspection
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.probing.syntax import SyntaxProbe
from manyheads.lens.redundant.collapse import Collapse
from manyheads.lens.redundant.dead_heads import DeadHeads
from manyheads.lens.redundant.heads import Redundancy
from manyheads.lens.results.files import Result, read_result
from manyheads.lens.results.tables import ByHead, ByLayer, ByPair
from manyheads.lens.weights.ffn_key_values import KeyValueMemories
from manyheads.lens.weights.neurons import Neurons

RESULT_TYPES: dict[str, type[Result]] = {
    kind.__name__: kind
    for kind in (
        Ablation,
        Attribution,
        ByHead,
        ByLayer,
        ByPair,
        Collapse,
        Comparison,
        CumulativeAblation,
        DeadHeads,
        DirectLogits,
        Faithfulness,
        HeadAttribution,
        Importance,
        Inspection,
        IOIHeads,
        JointAblation,
        KeyValueMemories,
        Kinds,
        LogitLens,
        Neurons,
        Patching,
        Pattern,
        PatternSet,
        Redundancy,
        Statistics,
        SyntaxProbe,
        TokenAttribution,
        TopKeys,
    )
}


@checked
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
