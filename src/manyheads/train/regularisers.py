"""What keeps heads apart or lets them go: diversity, L1 on their scales, L0 gates."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from manyheads.attention import Attention
from manyheads.data.batch import Batch
from manyheads.errors import ConfigError
from manyheads.models.stack import Stack
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap, Watcher
from manyheads.train.hard_concrete import HardConcrete, HeadGates, settled
from manyheads.train.objectives.objective import Loss, Objective, Task, check_weight

GATES = "head_gates"


class Together:
    """Several watchers as one; each sees what those before it have left."""

    def __init__(self, watchers: Sequence[Watcher]) -> None:
        self.watchers = tuple(watchers)

    def wants(self, site: Site) -> bool:
        return any(watcher.wants(site) for watcher in self.watchers)

    def see(self, site: Site, value: Ragged | Patterns) -> Ragged | Patterns:
        for watcher in self.watchers:
            if watcher.wants(site):
                answer = watcher.see(site, value)
                value = value if answer is None else answer
        return value


class Penalty(ABC):
    """A regulariser at work on one forward: it may watch, and then says what it costs."""

    def watchers(self) -> Sequence[Watcher]:
        return ()

    @abstractmethod
    def cost(self) -> Float[Tensor, ""]:
        """Before its weight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Regulariser(ABC):
    """Something added to the loss, times `weight`."""

    weight: float

    def __post_init__(self) -> None:
        check_weight("weight", self.weight)

    @property
    @abstractmethod
    def name(self) -> str:
        """What its part of the loss is called."""

    def attach(self, model: nn.Module) -> None:
        """Give the model what is trained along, before the optimiser is built."""
        del model

    @abstractmethod
    def begin(self, model: nn.Module) -> Penalty:
        """For one forward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadDiversity(Regulariser):
    """Heads of a layer that say or see the same cost something (arXiv 1810.10183).

    Of "outputs" the mean cosine, of "patterns" the mean of what two heads look at in common, over
    distinct pairs, tokens and layers. Patterns must be formed, which takes the reference kernel
    and memory by the square of the length.
    """

    of: Literal["outputs", "patterns"] = "outputs"

    @property
    def name(self) -> str:
        return f"head {self.of}"

    def begin(self, model: nn.Module) -> "Alikeness":
        del model
        return Alikeness(Tap.HEAD_OUTPUT if self.of == "outputs" else Tap.PATTERN)


class Alikeness(Penalty):
    """Watches heads and adds up how alike they are."""

    def __init__(self, tap: Tap) -> None:
        self.tap = tap
        self.found: list[Tensor] = []

    def watchers(self) -> Sequence[Watcher]:
        return (self,)

    def wants(self, site: Site) -> bool:
        return site.tap is self.tap

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        del site
        if isinstance(value, Patterns):
            each = [_alike(pattern.transpose(0, 1)) for pattern in value.each]
        else:
            each = [_alike(F.normalize(value.values.float(), dim=-1))]
        tokens = torch.cat(each)
        if tokens.numel():
            self.found.append(tokens.mean())

    def cost(self) -> Float[Tensor, ""]:
        return torch.stack(self.found).mean() if self.found else torch.zeros(())


def _alike(x: Float[Tensor, "n h d"]) -> Float[Tensor, " n"]:
    """The mean product of two different heads, from the square of their sum."""
    heads = x.shape[1]
    pairs = x.sum(1).square().sum(-1) - x.square().sum((1, 2))
    return pairs / max(heads * (heads - 1), 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class L1Scales(Regulariser):
    """The sum of the sizes of all heads' scales, so that some go to zero."""

    @property
    def name(self) -> str:
        return "head scales"

    def attach(self, model: nn.Module) -> None:
        _scales(model)

    def begin(self, model: nn.Module) -> "Sizes":
        return Sizes(_scales(model))


class Sizes(Penalty):
    def __init__(self, scales: Sequence[Tensor]) -> None:
        self.scales = scales

    def cost(self) -> Float[Tensor, ""]:
        return torch.cat([scale.float().abs() for scale in self.scales]).sum()


def _scales(model: nn.Module) -> Sequence[Tensor]:
    attentions = [module for module in model.modules() if isinstance(module, Attention)]
    found = [each.head_scale for each in attentions if each.head_scale is not None]
    if not found:
        raise ConfigError(
            "no head of this model has a scale",
            'set model.heads.scale="learned" in a run file, '
            'head_scale="learned" in AttentionConfig',
        )
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class L0Gates(Regulariser):
    """A gate a head that learns to close; the cost is the expected number of open ones.

    Hard concrete gates on the heads' outputs (arXiv 1905.09418). `start` is how likely a gate is
    open at first.
    """

    start: float = 0.9

    def __post_init__(self) -> None:
        Regulariser.__post_init__(self)
        if not 0 < self.start < 1:
            raise ConfigError(
                f"start={self.start:g} is no likelihood of a gate", "use a number between 0 and 1"
            )

    @property
    def name(self) -> str:
        return "open heads"

    def make(self, model: nn.Module) -> HardConcrete:
        """All gates, as they are before they learn."""
        return HeadGates(model, self.start)

    def attach(self, model: nn.Module) -> None:
        if not hasattr(model, GATES):
            model.add_module(GATES, self.make(model))

    def begin(self, model: nn.Module) -> Penalty:
        gates = getattr(model, GATES, None)
        if not isinstance(gates, HardConcrete):
            raise ConfigError("the model has no gates for its heads", "call attach(model) first")
        return GateCost(gates)


class GateCost(Penalty):
    def __init__(self, gates: HardConcrete) -> None:
        self.gates = gates

    def watchers(self) -> Sequence[Watcher]:
        return (self.gates,)

    def cost(self) -> Float[Tensor, ""]:
        return self.gates.expected_open()


@dataclass(frozen=True, slots=True, kw_only=True)
class Regularised(Objective):
    """An objective and what is added to it, each part under its own name."""

    objective: Objective
    regularisers: tuple[Regulariser, ...]

    def __post_init__(self) -> None:
        names = [each.name for each in self.regularisers]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"{names.count(name)} regularisers work on {name}", "keep one")

    def attach(self, model: nn.Module) -> None:
        """Give the model what the regularisers train along, before the optimiser is built."""
        for each in self.regularisers:
            each.attach(model)

    def check(self, model: nn.Module) -> None:
        self.objective.check(model)
        for each in self.regularisers:
            each.begin(model)

    def prepare(self, model: Any, batch: Batch, draw: torch.Generator) -> Task:
        return self.objective.prepare(model, batch, draw)

    def score(self, model: Any, task: Task, *, watch: Watcher | None = None) -> Loss:
        begun = [(each, each.begin(model)) for each in self.regularisers]
        watchers = [watcher for _, penalty in begun for watcher in penalty.watchers()]
        everyone = [*watchers, *([] if watch is None else [watch])]
        loss = self.objective.score(model, task, watch=Together(everyone) if everyone else None)
        return loss.plus({each.name: each.weight * penalty.cost() for each, penalty in begun})


def final_gates(model: nn.Module) -> Mapping[Site, Float[Tensor, " h"]]:
    """What each head's L0 gate came to, from 0 (closed) to 1, by layer; none without gates.

    The value of a hard concrete gate at test time (arXiv 1712.01312): nothing is drawn.

    >>> from manyheads.models.build import build
    >>> final_gates(build("gpt2", layers=1, width=32, heads=2, vocabulary=50))
    {}
    """
    gates = getattr(model, GATES, None)
    return gates.settled() if isinstance(gates, HeadGates) else {}


def folded(model: nn.Module, weights: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Weights of a model without the gates that were trained along, doing what they did.

    A gate scales what a head says, so it goes into the columns by which the output projection reads
    that head. The given weights stay as they are.
    """
    found = {name: each for name, each in weights.items() if not name.startswith(f"{GATES}.")}
    gates = getattr(model, GATES, None)
    if not isinstance(gates, HeadGates):
        return found
    stacks = {each.name: name for name, each in model.named_modules() if isinstance(each, Stack)}
    for index, (site, heads, _) in enumerate(gates.sites):
        part = "cross" if site.sublayer is Sublayer.CROSS else "attention"
        name = f"{stacks[site.stack]}.layers.{site.layer}.{part}.output.weight"
        gate = settled(weights[f"{GATES}.openness.{index}"])
        columns = torch.repeat_interleave(gate, found[name].shape[1] // heads)
        found[name] = found[name] * columns.to(found[name])
    return found
