"""Look: what the heads of a model do.

>>> from manyheads import lens
>>> from manyheads.models.build import build
>>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
>>> found = lens.statistics(model, [[5, 6, 7, 5, 6], [8, 9]])
"""

# Some functions are named as the file they live in: here the name means the function.
from manyheads.lens.ablation import (
    Ablation,
    Cumulative,
    Without,
    ablate,
    ablate_greedily,
    ablate_in_order,
    ablate_together,
)
from manyheads.lens.addresses import Address, Block
from manyheads.lens.answering import Attribution, LayerPrediction, Share, attribute
from manyheads.lens.attribution import DirectLogits, attribute_logits
from manyheads.lens.by_layer import ByLayer
from manyheads.lens.circuits import Circuits, Factors, circuits, score_circuits
from manyheads.lens.collapse import Collapse, LayerState, collapse
from manyheads.lens.compare import compare
from manyheads.lens.comparison import Comparison, Difference, Losses
from manyheads.lens.composition import compose, resemble
from manyheads.lens.dead import Dead, dead
from manyheads.lens.detectors import detect
from manyheads.lens.faithfulness import faithfulness
from manyheads.lens.feeds import Neuron
from manyheads.lens.flow import attention_flow, attention_rollout
from manyheads.lens.gradients import (
    ByToken,
    HeadGradients,
    gradient_times_attention,
    integrate_heads,
    integrate_inputs,
)
from manyheads.lens.importance import Importance, importance
from manyheads.lens.inspection import Inspection, inspect
from manyheads.lens.ioi import IndirectObjects, NameHeads, find_name_heads, indirect_objects
from manyheads.lens.kinds import kinds
from manyheads.lens.labels import Kinds, Label
from manyheads.lens.logit_lens import LogitLens, logit_lens
from manyheads.lens.memories import LayerMemory, Memories, memories
from manyheads.lens.metrics import LogitDifference, Measure, Similarity
from manyheads.lens.moments import Moment
from manyheads.lens.neurons import NeuronMemory, Neurons, ScoredWord, neurons
from manyheads.lens.observer import Activation
from manyheads.lens.overlap import overlap
from manyheads.lens.pairs import ByPair
from manyheads.lens.patching import Patch, Patching, patch
from manyheads.lens.paths import patch_paths
from manyheads.lens.patterns import Largest, Pattern, PatternSet, patterns, top_keys
from manyheads.lens.portrait import Portrait
from manyheads.lens.probes import probe
from manyheads.lens.redundancy import Double, Redundancy, redundancy
from manyheads.lens.resemblance import resemble_outputs
from manyheads.lens.result_types import load
from manyheads.lens.results import ByHead, Column
from manyheads.lens.statistics import Statistics, statistics
from manyheads.lens.storing import Result
from manyheads.lens.syntax_probe import SyntaxProbe, probe_syntax
from manyheads.lens.typology import Appearance, typology
from manyheads.lens.verdicts import Faithfulness, TaskVerdict

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
