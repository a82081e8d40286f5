"""Look: what the heads of a model do.

>>> from manyheads import lens
>>> from manyheads.models.build import build
>>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
>>> found = lens.statistics(model, [[5, 6, 7, 5, 6], [8, 9]])
"""

# Some functions are named as the file they live in: here the name means the function.
from manyheads.lens.ablation import ablate, ablate_greedily, ablate_in_order, ablate_together
from manyheads.lens.addresses import Address
from manyheads.lens.answering import attribute
from manyheads.lens.attribution import attribute_logits
from manyheads.lens.circuits import circuits, score_circuits
from manyheads.lens.collapse import collapse
from manyheads.lens.compare import compare
from manyheads.lens.composition import compose, resemble
from manyheads.lens.dead import dead
from manyheads.lens.detectors import detect
from manyheads.lens.faithfulness import faithfulness
from manyheads.lens.flow import attention_flow, attention_rollout
from manyheads.lens.gradients import gradient_times_attention, integrate_heads, integrate_inputs
from manyheads.lens.importance import importance
from manyheads.lens.inspection import inspect
from manyheads.lens.ioi import find_name_heads, indirect_objects
from manyheads.lens.kinds import kinds
from manyheads.lens.logit_lens import logit_lens
from manyheads.lens.memories import memories
from manyheads.lens.metrics import LogitDifference, Similarity
from manyheads.lens.neurons import neurons
from manyheads.lens.overlap import overlap
from manyheads.lens.patching import patch
from manyheads.lens.paths import patch_paths
from manyheads.lens.patterns import patterns, top_keys
from manyheads.lens.probes import probe
from manyheads.lens.redundancy import redundancy
from manyheads.lens.resemblance import resemble_outputs
from manyheads.lens.statistics import statistics
from manyheads.lens.syntax_probe import probe_syntax
from manyheads.lens.typology import typology

__all__ = [
    "Address",
    "LogitDifference",
    "Similarity",
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
