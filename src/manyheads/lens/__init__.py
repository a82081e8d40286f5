"""Look: what the heads of a model do.

>>> from manyheads import lens
>>> from manyheads.models.build import build
>>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
>>> result = lens.statistics(model, [[5, 6, 7, 5, 6], [8, 9]])
"""

# Some functions are named as the file they live in: here the name means the function.
from manyheads.lens.attention_maps.overlap import overlap
from manyheads.lens.attention_maps.patterns import Pattern, PatternSet, TopKeys, patterns, top_keys
from manyheads.lens.attention_maps.rollout import attention_flow, attention_rollout
from manyheads.lens.attention_maps.typology import PatternType, detect, typology
from manyheads.lens.attribution.attribute import (
    Attribution,
    Contribution,
    LayerPrediction,
    attribute,
)
from manyheads.lens.attribution.direct_logits import (
    DirectLogits,
    LogitLens,
    attribute_logits,
    logit_lens,
)
from manyheads.lens.attribution.gradients import (
    HeadAttribution,
    TokenAttribution,
    gradient_times_attention,
    integrate_heads,
    integrate_inputs,
)
from manyheads.lens.attribution.link_reasons import LinkReasons, why
from manyheads.lens.attribution.position_influence import influence
from manyheads.lens.attribution.source_tokens import TokenRoute, TokenRoutes, token_routes
from manyheads.lens.causal.ablation import (
    Ablation,
    CumulativeAblation,
    JointAblation,
    ablate,
    ablate_greedily,
    ablate_in_order,
    ablate_together,
)
from manyheads.lens.causal.attention_links import Link, LinkCut, cut
from manyheads.lens.causal.gradient_importance import Importance, importance
from manyheads.lens.causal.patching import Patch, Patching, patch
from manyheads.lens.causal.path_patching import patch_paths
from manyheads.lens.causal.racing import TopHeads
from manyheads.lens.causal.restoration import Restoration, restore
from manyheads.lens.causal.shapley_values import Shapley, shapley
from manyheads.lens.circuit_discovery.circuit import Circuit, FaithfulnessCurve, circuit
from manyheads.lens.circuit_discovery.graph import Edge
from manyheads.lens.circuit_discovery.known_circuits import (
    KnownCircuit,
    ProgramPairs,
    compile_rasp,
)
from manyheads.lens.circuit_discovery.scrubbing import Hypothesis, Scrub, scrub
from manyheads.lens.circuit_discovery.task_pairs import CircuitTask, circuit_task
from manyheads.lens.corpus.atlas import Atlas, HeadEntry, atlas
from manyheads.lens.corpus.examples import HeadExample
from manyheads.lens.corpus.token_sums import TokenLift
from manyheads.lens.diff.comparison import Comparison, Difference, Losses, compare
from manyheads.lens.faithful.faithfulness_report import Faithfulness, TaskVerdict, faithfulness
from manyheads.lens.head_kinds.criteria import Label
from manyheads.lens.head_kinds.ioi import IOIHeads, IOIPrompts, find_ioi_heads, ioi_prompts
from manyheads.lens.head_kinds.kinds import Kinds, kinds
from manyheads.lens.inputs.few_shot import FewShotPrompts, few_shot_prompts
from manyheads.lens.inputs.metrics import (
    CustomMetric,
    LogitDifference,
    ProbabilityDifference,
    Similarity,
    StateMetric,
)
from manyheads.lens.inspection import Inspection, ModelSummary, inspect, inspect_from_folder
from manyheads.lens.measure.activation_files import ActivationFiles, activations
from manyheads.lens.measure.approximation import lsh_missed_mass, performer_error
from manyheads.lens.measure.in_context import InContextScore, in_context_score
from manyheads.lens.measure.statistics import Statistics, statistics
from manyheads.lens.measure.streamed_statistics import statistics_from_folder
from manyheads.lens.measure.watcher import Activation
from manyheads.lens.probing.linear import probe
from manyheads.lens.probing.syntax import SyntaxProbe, probe_syntax
from manyheads.lens.redundant.collapse import Collapse, LayerState, collapse
from manyheads.lens.redundant.dead_heads import DeadHeads, dead_heads
from manyheads.lens.redundant.heads import DuplicatePair, Redundancy, redundancy
from manyheads.lens.redundant.outputs import output_similarity
from manyheads.lens.result_types import load
from manyheads.lens.results.addresses import Address, Block
from manyheads.lens.results.files import Result
from manyheads.lens.results.tables import ByHead, ByLayer, ByPair, Column
from manyheads.lens.task_heads.function_vectors import (
    FunctionVectorHeads,
    find_function_vector_heads,
)
from manyheads.lens.task_heads.long_context import (
    LongContextRecall,
    RecallScore,
    long_context_recall,
)
from manyheads.lens.task_heads.retrieval import (
    RetrievalHeads,
    find_retrieval_heads,
    retrieval_needles,
)
from manyheads.lens.task_heads.task_heads import HeldOutEffect, InductionOverlap
from manyheads.lens.weights.circuits import Circuits, FactoredMatrix, circuits, score_circuits
from manyheads.lens.weights.composition import composition_scores, weight_similarity
from manyheads.lens.weights.ffn_key_values import (
    KeyValueMemories,
    LayerKeyValues,
    Neuron,
    key_value_memories,
)
from manyheads.lens.weights.neurons import (
    Neurons,
    NeuronSummary,
    ScoredToken,
    TopActivation,
    neurons,
)

__all__ = [
    "Ablation",
    "Activation",
    "ActivationFiles",
    "Address",
    "Atlas",
    "Attribution",
    "Block",
    "ByHead",
    "ByLayer",
    "ByPair",
    "Circuit",
    "CircuitTask",
    "Circuits",
    "Collapse",
    "Column",
    "Comparison",
    "Contribution",
    "CumulativeAblation",
    "CustomMetric",
    "DeadHeads",
    "Difference",
    "DirectLogits",
    "DuplicatePair",
    "FactoredMatrix",
    "FewShotPrompts",
    "FunctionVectorHeads",
    "HeadExample",
    "Edge",
    "Faithfulness",
    "FaithfulnessCurve",
    "HeadAttribution",
    "HeadEntry",
    "Hypothesis",
    "HeldOutEffect",
    "IOIHeads",
    "IOIPrompts",
    "Importance",
    "InContextScore",
    "InductionOverlap",
    "Inspection",
    "JointAblation",
    "KeyValueMemories",
    "Kinds",
    "KnownCircuit",
    "Label",
    "LayerKeyValues",
    "LayerPrediction",
    "LayerState",
    "Link",
    "LinkCut",
    "LinkReasons",
    "LogitDifference",
    "LogitLens",
    "LongContextRecall",
    "Losses",
    "ModelSummary",
    "Neuron",
    "NeuronSummary",
    "Neurons",
    "Patch",
    "Patching",
    "Pattern",
    "PatternSet",
    "PatternType",
    "ProbabilityDifference",
    "ProgramPairs",
    "Redundancy",
    "Restoration",
    "Result",
    "RecallScore",
    "RetrievalHeads",
    "ScoredToken",
    "Scrub",
    "Shapley",
    "Similarity",
    "StateMetric",
    "Statistics",
    "SyntaxProbe",
    "TaskVerdict",
    "TokenAttribution",
    "TokenRoute",
    "TokenRoutes",
    "TopHeads",
    "TokenLift",
    "TopActivation",
    "TopKeys",
    "ablate",
    "ablate_greedily",
    "ablate_in_order",
    "ablate_together",
    "activations",
    "atlas",
    "attention_flow",
    "attention_rollout",
    "attribute",
    "attribute_logits",
    "circuit",
    "circuit_task",
    "circuits",
    "collapse",
    "compare",
    "compile_rasp",
    "composition_scores",
    "cut",
    "dead_heads",
    "detect",
    "faithfulness",
    "few_shot_prompts",
    "find_function_vector_heads",
    "find_ioi_heads",
    "find_retrieval_heads",
    "gradient_times_attention",
    "importance",
    "in_context_score",
    "influence",
    "inspect",
    "inspect_from_folder",
    "integrate_heads",
    "integrate_inputs",
    "ioi_prompts",
    "key_value_memories",
    "kinds",
    "load",
    "logit_lens",
    "long_context_recall",
    "lsh_missed_mass",
    "neurons",
    "output_similarity",
    "overlap",
    "patch",
    "patch_paths",
    "patterns",
    "performer_error",
    "probe",
    "probe_syntax",
    "redundancy",
    "restore",
    "retrieval_needles",
    "score_circuits",
    "scrub",
    "shapley",
    "statistics",
    "statistics_from_folder",
    "token_routes",
    "top_keys",
    "typology",
    "weight_similarity",
    "why",
]
