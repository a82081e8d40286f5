"""One update of the weights from the micro-batches of a step, or a reason to make none."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.data.permutation import mixed
from manyheads.data.stream import Step
from manyheads.models.build import Model
from manyheads.train.distributed import Crew
from manyheads.train.loop.model_wrapper import Entrance
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss, Task

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


def goes_ahead(optimiser: Optimizer) -> bool:
    """Whether it can learn from a device how far to go and whether at all: torch's fused AdamW."""
    weights = [each for group in optimiser.param_groups for each in group["params"]]
    return (
        isinstance(optimiser, torch.optim.AdamW)
        and bool(optimiser.defaults["fused"])
        and all(each.is_cuda and not hasattr(each, "full_tensor") for each in weights)
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Underway:
    """A step that a device may still be at; its numbers are on their way to the host.

    They are the loss of every micro-batch of all processes, the targets, whether to stop, each
    part of the loss, and the norm of the gradient before anything is divided.
    """

    numbers: Tensor
    ready: torch.cuda.Event | None
    batches: int
    names: tuple[str, ...]
    share: float

    def outcome(self) -> Outcome:
        """Wait for it: the only time that the host waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        *told, raw = self.numbers.tolist()
        totals, (found, stop, *parts) = told[: self.batches], told[self.batches :]
        targets = max(found, 1.0)
        return Outcome(
            loss=sum(totals) / targets,
            parts={name: part / targets for name, part in zip(self.names, parts, strict=True)},
            norm=raw * self.share / targets,
            targets=int(found),
            broken=tuple(place for place, total in enumerate(totals) if not math.isfinite(total)),
            stop=stop > 0,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Updater:
    """Gradients of all micro-batches, over all processes, divided by all targets.

    `score` is the objective's, perhaps compiled. `ahead` leaves it to the device to clip and to
    skip, so that the host can go on to the next step; the optimiser must be able to.
    """

    entrance: Entrance
    optimiser: Optimizer
    score: Score
    crew: Crew
    seed: int
    half: bool
    clip: float
    ahead: bool = False

    def run(self, asked: Asked, *, stop: bool = False) -> Outcome:
        """Follow the gradient of a step, to its end."""
        return self.begin(asked, stop=stop).outcome()

    def begin(self, asked: Asked, *, stop: bool = False) -> Underway:
        """Follow the gradient of a step; `ahead`, the device may take its time."""
        losses = [self._one(asked, index) for index in range(len(asked.tasks))]
        names, numbers = self._numbers(asked.step, losses, stop)
        batches = len(asked.step.places) * self.crew.world
        scale = self._scale(numbers, batches)
        if self.ahead:
            self._follow_unseen(scale, numbers, batches)
        told, ready = _sent(numbers)
        share = self.entrance.gradient_share
        underway = Underway(numbers=told, ready=ready, batches=batches, names=names, share=share)
        if not self.ahead and underway.outcome().sound:
            torch._foreach_mul_(self._gradients(), float(scale))
            self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return underway

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

    def _numbers(
        self, step: Step, losses: list[Loss], stop: bool
    ) -> tuple[tuple[str, ...], Tensor]:
        """The names of the parts, and what `Underway` holds, still on the device."""
        names = tuple(sorted(losses[0].parts))
        count = len(step.places) * self.crew.world
        told = torch.zeros(count + 2 + len(names), dtype=torch.float64, device=self.crew.device)
        # Filled, for to assign a number to a place on a device is to wait for the device.
        for place, loss in zip(step.places, losses, strict=True):
            told[place].copy_(loss.total)
        told[count].fill_(sum(loss.targets for loss in losses))
        told[count + 1].fill_(float(stop))
        for index, name in enumerate(names):
            parts = torch.stack([loss.parts[name] for loss in losses])
            told[count + 2 + index].copy_(parts.sum(dtype=told.dtype))
        norm = self._norm().to(told)
        return names, torch.cat((self.crew.sum(told), norm[None]))

    def _norm(self) -> Tensor:
        norm = nn.utils.get_total_norm(self._gradients())
        # Sharded, each process knows its part of it.
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def _scale(self, numbers: Tensor, batches: int) -> Tensor:
        """What gradients are multiplied by: the sum over all becomes a mean, and is clipped."""
        scale = self.entrance.gradient_share / numbers[batches].clamp(min=1)
        if self.clip:
            scale = scale * (self.clip / (numbers[-1] * scale + 1e-6)).clamp(max=1)
        return scale

    def _follow_unseen(self, scale: Tensor, numbers: Tensor, batches: int) -> None:
        """Where the host does not know the outcome, the optimiser looks for itself.

        By what torch's fused ones were given for half-precision gradients: they divide by the one,
        and where the other is one they do nothing.
        """
        sound = numbers[:batches].isfinite().all() & numbers[-1].isfinite()
        setattr(self.optimiser, "grad_scale", (1 / scale).float())  # noqa: B010
        setattr(self.optimiser, "found_inf", (~sound).float())  # noqa: B010
        self.optimiser.step()

    def _gradients(self) -> list[Tensor]:
        """Of the weights that the optimiser changes."""
        return [
            parameter.grad
            for group in self.optimiser.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]


def _sent(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """On their way to the host, and what says that they are there."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
