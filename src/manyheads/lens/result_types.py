"""Every type of result that can be saved, and the function that reads any of them back."""

from pathlib import Path
from typing import Any

from manyheads.argument_checks import checked
from manyheads.lens.attention_maps.patterns import Pattern, PatternSet, TopKeys
from manyheads.lens.attribution import (
    attribute,
    direct_logits,
    gradients,
    link_reasons,
    source_tokens,
)
from manyheads.lens.causal import (
    ablation,
    attention_links,
    gradient_importance,
    patching,
    restoration,
    shapley_values,
)
from manyheads.lens.circuit_discovery.circuit import Circuit, FaithfulnessCurve
from manyheads.lens.circuit_discovery.scrubbing import Scrub
from manyheads.lens.diff.comparison import Comparison
from manyheads.lens.faithful.faithfulness_report import Faithfulness
from manyheads.lens.head_kinds import ioi, kinds
from manyheads.lens.inspection import Inspection
from manyheads.lens.measure.in_context import InContextScore
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.probing.syntax import SyntaxProbe
from manyheads.lens.redundant import collapse, dead_heads, heads
from manyheads.lens.results import files, tables
from manyheads.lens.task_heads.function_vectors import FunctionVectorHeads
from manyheads.lens.task_heads.long_context import LongContextRecall
from manyheads.lens.task_heads.retrieval import RetrievalHeads
from manyheads.lens.weights import ffn_key_values, neurons

RESULT_TYPES: dict[str, type[files.Result]] = {
    kind.__name__: kind
    for kind in (
        ablation.Ablation,
        attribute.Attribution,
        tables.ByHead,
        tables.ByLayer,
        tables.ByPair,
        Circuit,
        collapse.Collapse,
        Comparison,
        ablation.CumulativeAblation,
        dead_heads.DeadHeads,
        direct_logits.DirectLogits,
        Faithfulness,
        FaithfulnessCurve,
        FunctionVectorHeads,
        gradients.HeadAttribution,
        gradient_importance.Importance,
        InContextScore,
        Inspection,
        ioi.IOIHeads,
        ablation.JointAblation,
        ffn_key_values.KeyValueMemories,
        kinds.Kinds,
        attention_links.LinkCut,
        link_reasons.LinkReasons,
        direct_logits.LogitLens,
        LongContextRecall,
        neurons.Neurons,
        patching.Patching,
        Pattern,
        PatternSet,
        heads.Redundancy,
        restoration.Restoration,
        Scrub,
        RetrievalHeads,
        shapley_values.Shapley,
        Statistics,
        SyntaxProbe,
        gradients.TokenAttribution,
        source_tokens.TokenRoutes,
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
    return files.read_result(path, RESULT_TYPES)
