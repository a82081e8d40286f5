"""Selection by L0 gates, trained with all weights frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import count
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.annotations import PositiveFloat, PositiveInt
from manyheads.argument_checks import check_fields
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.inputs.texts import Inputs, Targets, read_inputs
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.surgery.addresses import find_stack, layer_ends, neuron_site
from manyheads.surgery.finetune import loop
from manyheads.surgery.rebuild import LayerPlan, full_plan, rebuild
from manyheads.surgery.selection.results import UnitName
from manyheads.taps import Patterns, Site
from manyheads.train import regularizers
from manyheads.train.optim import optimizers, schedules

# The cost of an open gate, relative to a head. In proportion to the weights of house-gpt it is
# 0.01 for a neuron and 24 for a layer, but then few neurons close and no layer does. These are the
# best of four costs of neurons and seven of layers, tried on house-gpt; see `studies/prune`.
COSTS: Mapping[UnitName, float] = {"heads": 1.0, "neurons": 0.1, "layers": 100.0}


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class L0Config:
    """How gates are trained: each open head costs `weight` of the loss per target.

    An open neuron costs a tenth of that, and an open layer a hundred times as much.
    """

    weight: float = 0.01
    steps: PositiveInt = 300
    lr: PositiveFloat = 0.1
    batch_tokens: int = 2048
    start: float = 0.9


DEFAULT_L0 = L0Config()


class NeuronGates(regularizers.HardConcrete):
    """A gate for every neuron of a stack's feed-forwards; experts have none."""

    def __init__(self, stack: Stack, start: float = 0.9) -> None:
        device, plans = _device(stack), map(LayerPlan.all_of, count(), stack.config.layers)
        sites = [
            regularizers.GatedSite(neuron_site(stack, plan.source), len(plan.neurons), device)
            for plan in plans
            if plan.neurons
        ]
        super().__init__(sites, start)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        return value.with_values(value.values * self.values(site).to(value.values.dtype))


class LayerGates(regularizers.HardConcrete):
    """A gate z for every layer, whose output becomes x + z (layer(x) - x).

    With a closed gate the input passes unchanged, as after `prune_layers`.
    """

    def __init__(self, stack: Stack, start: float = 0.9) -> None:
        every = (layer_ends(stack, layer) for layer in range(len(stack.config.layers)))
        ends = [both for both in every if both is not None]
        device = _device(stack)
        super().__init__([regularizers.GatedSite(after, 1, device) for _, after in ends], start)
        self._leaves = dict(ends)
        self._enters = {leaving: entered for entered, leaving in ends}
        self._entered: dict[Site, Tensor] = {}

    def wants(self, site: Site) -> bool:
        return site in self._leaves or site in self._enters

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged)
        if site in self._leaves:
            self._entered[site] = value.values
            return None
        entered = self._entered.pop(self._enters[site])
        # lerp is exact for a gate of 0 and of 1.
        gate = self.values(site).to(entered.dtype)
        return value.with_values(torch.lerp(entered, value.values, gate))


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class UnitGates(regularizers.L0Gates):
    """A gate for every unit of one kind in one stack; for heads, in all stacks."""

    unit: UnitName
    stack: StackName | None

    @property
    def name(self) -> str:
        return f"open {self.unit}"

    def make(self, model: nn.Module) -> regularizers.HardConcrete:
        if self.unit == "heads":
            return regularizers.HeadGates(model, self.start)
        kind = NeuronGates if self.unit == "neurons" else LayerGates
        return kind(find_stack(cast(Model, model), self.stack), self.start)


def train_l0_gates(
    model: Model,
    texts: Inputs,
    config: L0Config,
    unit: UnitName = "heads",
    *,
    targets: Targets | None,
    stack: StackName | None = None,
    seed: int,
    progress: bool,
) -> Mapping[Site, Float[Tensor, " k"]]:
    """The logit of each unit's hard concrete gate after training (arXiv 1905.09418).

    All gates, of the heads of the model or of the neurons or layers of a stack, are trained
    together on a copy.
    """
    copy = rebuild(model, full_plan(model))
    copy.requires_grad_(False)
    inputs = read_inputs(copy, texts)
    cost = UnitGates(weight=config.weight * COSTS[unit], start=config.start, unit=unit, stack=stack)
    gated = regularizers.Regularized(
        objective=loop.objective_for(copy, inputs, targets), regularizers=(cost,)
    )
    gated.attach(copy)
    gates = getattr(copy, regularizers.GATES)
    assert isinstance(gates, regularizers.HardConcrete)
    training = loop.RecoveryConfig(
        optimizer=optimizers.AdamW(lr=config.lr, decay=0.0),
        schedule=schedules.Stable(),
        batch_tokens=config.batch_tokens,
    )
    label, steps = "training gates", config.steps
    loop.finetune(
        copy, inputs, gated, training, steps=steps, seed=seed, progress=progress, label=label
    )
    by_site: dict[Site, Tensor] = {}
    for (site, _, _), gate_probability in zip(gates.sites, gates.gate_probability, strict=True):
        by_site[site] = gate_probability.detach().double().cpu()
        assert torch.isfinite(by_site[site]).all(), "steps that are not finite are skipped"
    return by_site


def _device(stack: Stack) -> torch.device:
    return next(stack.parameters()).device
