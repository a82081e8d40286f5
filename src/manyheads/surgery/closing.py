"""Gates that learn which parts a model can do without, all weights being frozen."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.errors import ConfigError
from manyheads.lens.given import Targets, read
from manyheads.lens.trunk import StackName
from manyheads.models.build import Model
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.surgery.keeping import Kept, find_stack, whole
from manyheads.surgery.passage import neuron_site, passage
from manyheads.surgery.rebuilding import rebuild
from manyheads.surgery.tuning import objective_for, tune
from manyheads.surgery.wishes import What
from manyheads.taps import Patterns, Site
from manyheads.train.hard_concrete import GatedSite, HardConcrete, HeadGates
from manyheads.train.optim.optimisers import AdamW
from manyheads.train.optim.schedules import Stable
from manyheads.train.regularisers import GATES, L0Gates, Regularised

__all__ = ["CLOSING", "Closing", "LayerGates", "NeuronGates", "close_gates"]

# What an open gate costs, an open head's being 1. By weights it would be a hundredth for a neuron
# and 24 for a layer of house-gpt. There few neurons close, and at 10 to 60 all layers stay open, so
# that their order says little. Of four costs of neurons and seven of layers, tried once each on
# house-gpt, these were taken; `studies/prune` has the numbers.
COSTS: Mapping[What, float] = {"heads": 1.0, "neurons": 0.1, "layers": 100.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Closing:
    """How gates are trained: each open head costs `weight` of the loss a target.

    A neuron costs a tenth of that and a layer a hundred times it, as `house-gpt` was found to need.
    """

    weight: float = 0.01
    steps: int = 300
    rate: float = 0.1
    batch_tokens: int = 2048
    start: float = 0.9

    def __post_init__(self) -> None:
        if self.steps < 1 or self.rate <= 0:
            raise ConfigError(
                f"steps={self.steps} at rate={self.rate:g} close nothing", "use numbers above 0"
            )


CLOSING = Closing()


class NeuronGates(HardConcrete):
    """A gate for every neuron of a stack's feed-forwards; experts have none."""

    def __init__(self, stack: Stack, start: float = 0.9) -> None:
        found = []
        for layer, config in enumerate(stack.config.layers):
            neurons = len(Kept.all_of(layer, config).neurons)
            if neurons:
                found.append(GatedSite(neuron_site(stack, layer), neurons, _device(stack)))
        super().__init__(found, start)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged:
        assert isinstance(value, Ragged)
        return value.with_values(value.values * self.values(site).to(value.values.dtype))


class LayerGates(HardConcrete):
    """A gate z for every layer, from which x + z (layer(x) - x) comes where x entered.

    A closed one lets through what entered, as where `prune_layers` has taken the layer out.
    """

    def __init__(self, stack: Stack, start: float = 0.9) -> None:
        every = (passage(stack, layer) for layer in range(len(stack.config.layers)))
        passages = [each for each in every if each is not None]
        super().__init__([GatedSite(left, 1, _device(stack)) for _, left in passages], start)
        self._leaves = dict(passages)
        self._enters = {left: entered for entered, left in passages}
        self._entered: dict[Site, Tensor] = {}

    def wants(self, site: Site) -> bool:
        return site in self._leaves or site in self._enters

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | None:
        assert isinstance(value, Ragged)
        if site in self._leaves:
            self._entered[site] = value.values
            return None
        entered = self._entered.pop(self._enters[site])
        # Exact at both ends.
        gate = self.values(site).to(entered.dtype)
        return value.with_values(torch.lerp(entered, value.values, gate))


@dataclass(frozen=True, slots=True, kw_only=True)
class PartGates(L0Gates):
    """A gate for every part of some kind, of one stack; of heads for those of all stacks."""

    what: What
    stack: StackName | None

    @property
    def name(self) -> str:
        return f"open {self.what}"

    def make(self, model: nn.Module) -> HardConcrete:
        if self.what == "heads":
            return HeadGates(model, self.start)
        kind = NeuronGates if self.what == "neurons" else LayerGates
        return kind(find_stack(cast(Model, model), self.stack), self.start)


def close_gates(
    model: Model,
    texts: Any,
    how: Closing,
    what: What = "heads",
    *,
    targets: Targets | None,
    stack: StackName | None = None,
    seed: int,
    shown: bool,
) -> Mapping[Site, Float[Tensor, " k"]]:
    """How open each part's hard concrete gate is after training (arXiv 1905.09418): a logit.

    The gates of all heads of the model, or of all neurons or layers of a stack, are trained
    together, on a copy.
    """
    copy = rebuild(model, whole(model))
    copy.requires_grad_(False)
    given = read(copy, texts)
    cost = PartGates(weight=how.weight * COSTS[what], start=how.start, what=what, stack=stack)
    gated = Regularised(objective=objective_for(copy, given, targets), regularisers=(cost,))
    gated.attach(copy)
    gates = getattr(copy, GATES)
    assert isinstance(gates, HardConcrete)
    tune(
        copy,
        given,
        gated,
        optimiser=AdamW(rate=how.rate, decay=0.0),
        schedule=Stable(),
        steps=how.steps,
        room=how.batch_tokens,
        seed=seed,
        shown=shown,
        label="closing gates",
    )
    found: dict[Site, Tensor] = {}
    for (site, _, _), openness in zip(gates.sites, gates.openness, strict=True):
        found[site] = openness.detach().double().cpu()
        assert torch.isfinite(found[site]).all(), "an unsound step is never followed"
    return found


def _device(stack: Stack) -> torch.device:
    return next(stack.parameters()).device
