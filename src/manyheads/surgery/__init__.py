"""Change a model: select and prune heads, neurons and layers, add gates, train adapters."""

from manyheads.surgery.finetune.loop import RecoveryConfig, recover
from manyheads.surgery.finetune.trainable import (
    freeze,
    freeze_except,
    freeze_except_gates,
    unfreeze_all,
)
from manyheads.surgery.gates import GatedModel, add_gates, train_gates
from manyheads.surgery.lora.adapters import (
    Adapter,
    active_adapters,
    adapt,
    delete_adapter,
    list_adapters,
    merge,
    set_adapter,
    unmerge,
)
from manyheads.surgery.lora.low_rank import LoraConfig
from manyheads.surgery.lora.peft_files import load_adapter, save_adapter
from manyheads.surgery.lora.quantization import dequantize, quantize
from manyheads.surgery.pipeline import PruningConfig, PruningResult, run_pruning
from manyheads.surgery.pruning import origins, prune, prune_layers, prune_neurons
from manyheads.surgery.selection.heads import HeadSelection, select_heads
from manyheads.surgery.selection.l0_selection import L0Config
from manyheads.surgery.selection.layers import LayerSelection, select_layers
from manyheads.surgery.selection.neurons import NeuronSelection, select_neurons

__all__ = [
    "Adapter",
    "GatedModel",
    "HeadSelection",
    "L0Config",
    "LayerSelection",
    "LoraConfig",
    "NeuronSelection",
    "PruningConfig",
    "PruningResult",
    "RecoveryConfig",
    "active_adapters",
    "adapt",
    "add_gates",
    "delete_adapter",
    "dequantize",
    "freeze",
    "freeze_except",
    "freeze_except_gates",
    "list_adapters",
    "load_adapter",
    "merge",
    "origins",
    "prune",
    "prune_layers",
    "prune_neurons",
    "quantize",
    "recover",
    "run_pruning",
    "save_adapter",
    "select_heads",
    "select_layers",
    "select_neurons",
    "set_adapter",
    "train_gates",
    "unfreeze_all",
    "unmerge",
]
