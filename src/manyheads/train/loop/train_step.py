"""One optimizer step: gradients of all micro-batches, clipped, or skipped if not finite."""

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.data.batch import Batch
from manyheads.data.stream import StreamStep, mix_seed
from manyheads.models.build import Model
from manyheads.progress import InterruptHandler
from manyheads.train import distributed
from manyheads.train.context_parallel import own_part
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss, PreparedBatch
from manyheads.train.optim.param_groups import set_learning_rate

Score = Callable[[Any, PreparedBatch], Loss]
# A run ends after this many consecutive steps with a loss that is not finite.
MAX_SKIPPED = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class StepOutcome:
    """The result of a step: losses per target, and the gradient norm before clipping.

    `nonfinite` are the micro-batches whose loss is NaN or infinite. `stop` is true if any process
    received an interrupt.
    """

    loss: float
    parts: Mapping[str, float]
    norm: float
    targets: int
    nonfinite: tuple[int, ...]
    stop: bool

    @property
    def finite(self) -> bool:
        return not self.nonfinite and math.isfinite(self.norm)


def micro_batch_generator(seed: int, step: int, index: int) -> torch.Generator:
    """The random generator of one micro-batch, which depends on nothing else.

    So there is no random state to save, and the number of processes can change between runs.
    """
    return torch.Generator().manual_seed(_number(seed, step, index))


def _number(seed: int, step: int, index: int) -> int:
    return mix_seed(mix_seed(mix_seed(seed) + step) + index) >> 1


PreparedStep = StreamStep[PreparedBatch]
ALONE = distributed.ProcessGroup()


def prepare_steps(
    steps: Iterator[StreamStep[Batch]],
    objective: Objective,
    model: Model,
    *,
    seed: int,
    first: int,
    processes: distributed.ProcessGroup = ALONE,
) -> Iterator[PreparedStep]:
    """The steps, numbered from `first` on, with micro-batches prepared by the objective.

    Of texts that processes share these are the tokens of this process.
    """
    for number, step in enumerate(steps, first):
        batches = tuple(
            own_part(
                objective.prepare(model, batch, micro_batch_generator(seed, number, index)),
                processes,
            )
            for batch, index in zip(step.batches, step.indices, strict=True)
        )
        yield cast(PreparedStep, replace(cast(Any, step), number=number, batches=batches))


def can_run_ahead(optimizer: Optimizer) -> bool:
    """Whether clipping and skipping can be left to the optimizer: torch's fused AdamW on CUDA."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return (
        isinstance(optimizer, torch.optim.AdamW)
        and bool(optimizer.defaults["fused"])
        and all(weight.is_cuda and not hasattr(weight, "full_tensor") for weight in parameters)
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PendingOutcome:
    """A step that the device may still be computing; its numbers are being copied to the host.

    They are the loss of every micro-batch of all processes, the number of targets, whether to stop,
    each part of the loss, and the norm of the summed gradient.
    """

    numbers: Tensor
    ready: torch.cuda.Event | None
    batches: int
    names: tuple[str, ...]
    gradient_scale: float

    def outcome(self) -> StepOutcome:
        """Wait for the numbers: the only time that the host waits for the device."""
        if self.ready is not None:
            self.ready.synchronize()
        *numbers, norm = self.numbers.tolist()
        totals, (target_count, stop, *parts) = numbers[: self.batches], numbers[self.batches :]
        targets = max(target_count, 1.0)
        return StepOutcome(
            loss=sum(totals) / targets,
            parts={name: part / targets for name, part in zip(self.names, parts, strict=True)},
            norm=norm * self.gradient_scale / targets,
            targets=int(target_count),
            nonfinite=tuple(i for i, total in enumerate(totals) if not math.isfinite(total)),
            stop=stop > 0,
        )


def constant_lr(step: int) -> float:
    """The peak learning rate at every step."""
    del step
    return 1.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Updater:
    """Takes optimizer steps: gradients summed over micro-batches and processes, per target.

    `score` is the objective's method, possibly compiled, and `lr_factor` the schedule. With `ahead`
    the device itself clips and skips, so that the host can queue the next step; see
    `can_run_ahead`.
    """

    wrapper: distributed.ModelWrapper
    optimizer: Optimizer
    score: Score
    lr_factor: Callable[[int], float] = constant_lr
    seed: int = 0
    half: bool = False
    clip: float = 1.0
    ahead: bool = False

    @property
    def processes(self) -> distributed.ProcessGroup:
        return self.wrapper.processes

    def run(
        self,
        steps: Iterable[PreparedStep],
        pauses: Callable[[int], bool] | None = None,
        stop: InterruptHandler | None = None,
    ) -> Iterator[tuple[PreparedStep, StepOutcome]]:
        """Take the steps, and yield them in order with their outcomes, until an interrupt.

        With `ahead` the host reads the outcome of a step while the device computes the next one,
        unless the run `pauses` after so many steps, because the weights are needed.
        """
        begun: deque[tuple[PreparedStep, PendingOutcome]] = deque()
        stopped = False
        for step in steps:
            begun.append((step, self.begin(step, stop=stop is not None and stop.requested)))
            ahead = self.ahead and not (pauses is not None and pauses(step.number + 1))
            while len(begun) > (1 if ahead and not stopped else 0):
                finished, pending = begun.popleft()
                outcome = pending.outcome()
                yield finished, outcome
                stopped = stopped or outcome.stop
            if stopped:
                return
        for finished, pending in begun:
            yield finished, pending.outcome()

    def begin(self, step: PreparedStep, *, stop: bool = False) -> PendingOutcome:
        """Start a step; with `ahead` it may still be running on the device."""
        set_learning_rate(self.optimizer, self.lr_factor(step.number))
        losses = [self._backward(step, position) for position in range(len(step.batches))]
        names, numbers = self._numbers(step, losses, stop)
        batches = len(step.indices) * self.processes.data_size
        scale = self._scale(numbers, batches)
        if self.ahead:
            # Without waiting for the outcome: torch's fused optimizers divide gradients by
            # `grad_scale` and skip the step if `found_inf` is 1, as for half-precision gradients.
            finite = numbers[:batches].isfinite().all() & numbers[-1].isfinite()
            setattr(self.optimizer, "grad_scale", (1 / scale).float())  # noqa: B010
            setattr(self.optimizer, "found_inf", (~finite).float())  # noqa: B010
            self.optimizer.step()
        host, ready = _copy_to_host(numbers)
        pending = PendingOutcome(
            numbers=host,
            ready=ready,
            batches=batches,
            names=names,
            gradient_scale=self.wrapper.gradient_scale,
        )
        if not self.ahead and pending.outcome().finite:
            torch._foreach_mul_(self._gradients(), float(scale))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return pending

    def _backward(self, step: PreparedStep, position: int) -> Loss:
        """Add the gradients of one micro-batch."""
        last = position == len(step.batches) - 1
        # For dropout, which differs between the processes that share a text.
        shared = self.processes.rank % self.processes.context
        number = _number(self.seed, step.number, step.indices[position])
        torch.manual_seed(mix_seed(number + shared) >> 1 if shared else number)
        batch = step.batches[position].to(self.processes.device)

        def work(model: Model) -> tuple[Tensor, Loss]:
            loss = self.score(model, batch)
            parts = {name: part.detach() for name, part in loss.parts.items()}
            detached = Loss(total=loss.total.detach(), targets=loss.targets, parts=parts)
            # FSDP puts a hook on this tensor, which a view could lose.
            return loss.combined.clone(), detached

        with self.wrapper.gradient_sync(last=last):
            with torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.half):
                combined, loss = self.wrapper.forward(work)
            combined.backward()
        return cast(Loss, loss)

    def _numbers(
        self, step: PreparedStep, losses: list[Loss], stop: bool
    ) -> tuple[tuple[str, ...], Tensor]:
        """The names of the parts, and the numbers of `PendingOutcome`, still on the device."""
        names = tuple(sorted(losses[0].parts))
        count = len(step.indices) * self.processes.data_size
        numbers = torch.zeros(
            count + 2 + len(names), dtype=torch.float64, device=self.processes.device
        )
        # Assigning a number to an element would wait for the device; fill_ and copy_ do not.
        for index, loss in zip(step.indices, losses, strict=True):
            numbers[index].copy_(loss.total)
        numbers[count].fill_(sum(loss.targets for loss in losses))
        numbers[count + 1].fill_(float(stop))
        for index, name in enumerate(names):
            parts = torch.stack([loss.parts[name] for loss in losses])
            numbers[count + 2 + index].copy_(parts.sum(dtype=numbers.dtype))
        norm: Tensor = nn.utils.get_total_norm(self._gradients())
        if hasattr(norm, "full_tensor"):
            # With sharded weights each process has a part of the norm.
            norm = norm.full_tensor()
        return names, torch.cat((self.processes.all_reduce(numbers), norm.to(numbers)[None]))

    def _scale(self, numbers: Tensor, batches: int) -> Tensor:
        """The factor on the summed gradients that makes them a mean and clips it."""
        scale = self.wrapper.gradient_scale / numbers[batches].clamp(min=1)
        if self.clip:
            scale = scale * (self.clip / (numbers[-1] * scale + 1e-6)).clamp(max=1)
        return scale

    def _gradients(self) -> list[Tensor]:
        """The gradients of all parameters of the optimizer."""
        return [
            parameter.grad
            for group in self.optimizer.param_groups
            for parameter in group["params"]
            if parameter.grad is not None
        ]


def _copy_to_host(numbers: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """An asynchronous copy, and the event that tells when it is complete."""
    if not numbers.is_cuda:
        return numbers, None
    host = torch.empty(numbers.shape, dtype=numbers.dtype, pin_memory=True)
    host.copy_(numbers, non_blocking=True)
    ready = torch.cuda.Event()
    ready.record()
    return host, ready
