"""One update of the weights from the micro-batches of a step, or a reason to make none."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.data.order import mixed
from manyheads.data.stream import Step
from manyheads.models.build import Model
from manyheads.train.crew import Crew
from manyheads.train.entrance import Entrance
from manyheads.train.loss import Loss, Task
from manyheads.train.objectives import Objective

__all__ = ["Asked", "Outcome", "Updater", "asked", "seeded"]

Score = Callable[[Any, Task], Loss]


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What a step came to: losses a target, the gradient's norm before clipping.

    `broken` are the micro-batches whose loss is no number. `stop` is set where any process was
    asked to end.
    """

    loss: float
    parts: Mapping[str, float]
    norm: float
    targets: int
    broken: tuple[int, ...]
    stop: bool

    @property
    def sound(self) -> bool:
        return not self.broken and math.isfinite(self.norm)


def seeded(seed: int, step: int, place: int) -> torch.Generator:
    """The random numbers of one micro-batch: the same whoever computes it when.

    So there is no random state to save, and none to share out anew among other processes.
    """
    return torch.Generator().manual_seed(_number(seed, step, place))


def _number(seed: int, step: int, place: int) -> int:
    return mixed(mixed(mixed(seed) + step) + place) >> 1


@dataclass(frozen=True, slots=True, eq=False)
class Asked:
    """A step, which is `number` of the run, and what its micro-batches ask of the model."""

    step: Step
    number: int
    tasks: tuple[Task, ...]

    def pinned(self) -> "Asked":
        """The tasks are what goes to the device; the step's own batches have served."""
        return replace(self, tasks=tuple(task.pinned() for task in self.tasks))


def asked(
    steps: Iterator[Step], objective: Objective, model: Model, *, seed: int, first: int
) -> Iterator[Asked]:
    """What each step from number `first` of the run on asks, made ahead while a device computes."""
    for number, step in enumerate(steps, first):
        tasks = (
            objective.prepare(model, batch, seeded(seed, number, place))
            for batch, place in zip(step.batches, step.places, strict=True)
        )
        yield Asked(step, number, tuple(tasks))


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Updater:
    """Gradients of all micro-batches, over all processes, divided by all targets.

    `score` is the objective's, perhaps compiled.
    """

    entrance: Entrance
    optimiser: Optimizer
    score: Score
    crew: Crew
    seed: int
    half: bool
    clip: float

    def run(self, asked: Asked, *, stop: bool = False) -> Outcome:
        """Follow the gradient of a step."""
        losses = [self._one(asked, index) for index in range(len(asked.tasks))]
        outcome = self._outcome(asked.step, losses, stop)
        if outcome.sound:
            self._follow(outcome)
        self.optimiser.zero_grad(set_to_none=True)
        return outcome

    def _one(self, asked: Asked, index: int) -> Loss:
        """Add one micro-batch's gradients to those before."""
        last = index == len(asked.tasks) - 1
        # For dropout and the like.
        torch.manual_seed(_number(self.seed, asked.number, asked.step.places[index]))
        task = asked.tasks[index].to(self.crew.device)

        def work(model: Model) -> tuple[Tensor, Loss]:
            loss = self.score(model, task)
            parts = {name: part.detach() for name, part in loss.parts.items()}
            told = Loss(total=loss.total.detach(), targets=loss.targets, parts=parts)
            # Sharding puts a hook on it, which a view could lose.
            return loss.whole.clone(), told

        with self.entrance.holding(last=last):
            with torch.autocast(self.crew.device.type, torch.bfloat16, enabled=self.half):
                whole, loss = self.entrance.train(work)
            whole.backward()
        return cast(Loss, loss)

    def _outcome(self, step: Step, losses: list[Loss], stop: bool) -> Outcome:
        """All that the host must know, fetched at once: the only time it waits for the device."""
        names = sorted(losses[0].parts)
        count = len(step.places) * self.crew.world
        told = torch.zeros(count + 2 + len(names), dtype=torch.float64, device=self.crew.device)
        for place, loss in zip(step.places, losses, strict=True):
            told[place] = loss.total
        told[count] = sum(loss.targets for loss in losses)
        told[count + 1] = float(stop)
        for index, name in enumerate(names):
            told[count + 2 + index] = sum(loss.parts[name].double() for loss in losses)
        norm = self._norm().to(told)
        *numbers, raw = torch.cat((self.crew.sum(told), norm[None])).tolist()
        totals, targets = numbers[:count], max(numbers[count], 1.0)
        return Outcome(
            loss=sum(totals) / targets,
            parts={name: numbers[count + 2 + i] / targets for i, name in enumerate(names)},
            norm=raw * self.entrance.gradient_share / targets,
            targets=int(numbers[count]),
            broken=tuple(place for place, total in enumerate(totals) if not math.isfinite(total)),
            stop=numbers[count + 1] > 0,
        )

    def _norm(self) -> Tensor:
        norm = nn.utils.get_total_norm(self._gradients())
        # Sharded, each process knows its part of it.
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def _follow(self, outcome: Outcome) -> None:
        scale = self.entrance.gradient_share / max(outcome.targets, 1)
        if self.clip:
            scale *= min(1.0, self.clip / (outcome.norm + 1e-6))
        torch._foreach_mul_(self._gradients(), scale)
        self.optimiser.step()

    def _gradients(self) -> list[Tensor]:
        """Of the weights that the optimiser changes."""
        return [
            parameter.grad
            for group in self.optimiser.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]
