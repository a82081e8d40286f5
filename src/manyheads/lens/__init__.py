"""Look: what the heads of a model do.

>>> from manyheads import lens
>>> from manyheads.models.build import build
>>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
>>> found = lens.statistics(model, [[5, 6, 7, 5, 6], [8, 9]])
"""

# Some functions are named as the file they live in: here the name means the function.
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.attention_maps.patterns import Largest, Pattern, PatternSet, patterns, top_keys
from manyheads.lens.attention_maps.rollout import attention_flow, attention_rollout
from manyheads.lens.attention_maps.typology import Appearance, detect, typology
from manyheads.lens.attribution.attribute import Attribution, LayerPrediction, Share, attribute
from manyheads.lens.attribution.direct_logits import DirectLogits, attribute_logits
from manyheads.lens.attribution.gradients import (
    ByToken,
    HeadGradients,
    gradient_times_attention,
    integrate_heads,
    integrate_inputs,
)
from manyheads.lens.attribution.logit_lens import LogitLens, logit_lens
from manyheads.lens.causal.ablation import (
    Ablation,
    Cumulative,
    Without,
    ablate,
    ablate_greedily,
    ablate_in_order,
    ablate_together,
)
from manyheads.lens.causal.gradient_importance import Importance, importance
from manyheads.lens.causal.patching import Patch, Patching, patch
from manyheads.lens.causal.path_patching import patch_paths
from manyheads.lens.diff.compare import compare
from manyheads.lens.diff.comparison import Comparison, Difference, Losses
from manyheads.lens.faithful.faithfulness_report import Faithfulness, TaskVerdict, faithfulness
from manyheads.lens.head_kinds.ioi import (
    IndirectObjects,
    NameHeads,
    find_name_heads,
    indirect_objects,
)
from manyheads.lens.head_kinds.kinds import kinds
from manyheads.lens.head_kinds.labels import Kinds, Label
from manyheads.lens.inputs.metrics import LogitDifference, Measure, Similarity
from manyheads.lens.inspection import Inspection, Portrait, inspect
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.measure.watcher import Activation
from manyheads.lens.probing.linear import probe
from manyheads.lens.probing.syntax import SyntaxProbe, probe_syntax
from manyheads.lens.redundant.collapse import Collapse, LayerState, collapse
from manyheads.lens.redundant.dead_heads import Dead, dead
from manyheads.lens.redundant.heads import Double, Redundancy, redundancy
from manyheads.lens.redundant.outputs import resemble_outputs
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.by_head import ByHead, Column
from manyheads.lens.results.by_layer import ByLayer
from manyheads.lens.results.by_pair import ByPair
from manyheads.lens.results.files import Result
from manyheads.lens.results.result_types import load
from manyheads.lens.weights.circuits import Circuits, Factors, circuits, score_circuits
from manyheads.lens.weights.composition import compose, resemble
from manyheads.lens.weights.ffn_key_values import LayerMemory, Memories, Neuron, memories
from manyheads.lens.weights.neurons import Moment, NeuronMemory, Neurons, ScoredWord, neurons

__all__ = [
    "Ablation",
    "Activation",
    "Address",
    "Appearance",
    "Attribution",
    "Block",
    "ByHead",
    "ByLayer",
    "ByPair",
    "ByToken",
    "Circuits",
    "Collapse",
    "Column",
    "Comparison",
    "Cumulative",
    "Dead",
    "Difference",
    "DirectLogits",
    "Double",
    "Factors",
    "Faithfulness",
    "HeadGradients",
    "Importance",
    "IndirectObjects",
    "Inspection",
    "Kinds",
    "Label",
    "Largest",
    "LayerMemory",
    "LayerPrediction",
    "LayerState",
    "LogitDifference",
    "LogitLens",
    "Losses",
    "Measure",
    "Memories",
    "Moment",
    "NameHeads",
    "Neuron",
    "NeuronMemory",
    "Neurons",
    "Patch",
    "Patching",
    "Pattern",
    "PatternSet",
    "Portrait",
    "Redundancy",
    "Result",
    "ScoredWord",
    "Share",
    "Similarity",
    "Statistics",
    "SyntaxProbe",
    "TaskVerdict",
    "Without",
    "ablate",
    "ablate_greedily",
    "ablate_in_order",
    "ablate_together",
    "attention_flow",
    "attention_rollout",
    "attribute",
    "attribute_logits",
    "circuits",
    "collapse",
    "compare",
    "compose",
    "dead",
    "detect",
    "faithfulness",
    "find_name_heads",
    "gradient_times_attention",
    "importance",
    "indirect_objects",
    "inspect",
    "integrate_heads",
    "integrate_inputs",
    "kinds",
    "load",
    "logit_lens",
    "memories",
    "neurons",
    "overlap",
    "patch",
    "patch_paths",
    "patterns",
    "probe",
    "probe_syntax",
    "redundancy",
    "resemble",
    "resemble_outputs",
    "score_circuits",
    "statistics",
    "top_keys",
    "typology",
]
