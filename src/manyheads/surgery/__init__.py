"""Change a model: cut, gate and adapt its heads."""

from manyheads.surgery.adapters import active, adapt, adapters, detach, merge, unmerge, use
from manyheads.surgery.choose import choose
from manyheads.surgery.gates import add_gates
from manyheads.surgery.layers import choose_layers
from manyheads.surgery.lowrank import LowRank
from manyheads.surgery.mending import mend
from manyheads.surgery.neurons import choose_neurons
from manyheads.surgery.peft_files import load_adapter, save_adapter
from manyheads.surgery.prune import prune, prune_layers, prune_neurons
from manyheads.surgery.quantised import dequantise, quantise
from manyheads.surgery.record import origins
from manyheads.surgery.trainable import learn_all, learn_all_but, learn_gates, learn_only

__all__ = [
    "LowRank",
    "active",
    "adapt",
    "adapters",
    "add_gates",
    "choose",
    "choose_layers",
    "choose_neurons",
    "dequantise",
    "detach",
    "learn_all",
    "learn_all_but",
    "learn_gates",
    "learn_only",
    "load_adapter",
    "mend",
    "merge",
    "origins",
    "prune",
    "prune_layers",
    "prune_neurons",
    "quantise",
    "save_adapter",
    "unmerge",
    "use",
]
