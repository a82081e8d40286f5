"""One optimizer step: gradients of all micro-batches, clipped, or skipped if not finite."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from manyheads.data.stream import StreamStep, mix_seed
from manyheads.models.build import Model
from manyheads.train.distributed import ModelWrapper, ProcessGroup
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss, PreparedBatch

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


@dataclass(frozen=True, slots=True, eq=False)
class PreparedStep:
    """Step `number` of the run, with its micro-batches prepared by the objective."""

    step: StreamStep
    number: int
    batches: tuple[PreparedBatch, ...]

    def pin_memory(self) -> "PreparedStep":
        """Pin what goes to the device: the prepared batches, no longer those of `step`."""
        return replace(self, batches=tuple(batch.pin_memory() for batch in self.batches))


def prepare_steps(
    steps: Iterator[StreamStep], objective: Objective, model: Model, *, seed: int, first: int
) -> Iterator[PreparedStep]:
    """The steps from number `first` on, prepared on the host while the device computes."""
    for number, step in enumerate(steps, first):
        batches = (
            objective.prepare(model, batch, micro_batch_generator(seed, number, index))
            for batch, index in zip(step.batches, step.indices, strict=True)
        )
        yield PreparedStep(step, number, tuple(batches))


def can_run_ahead(optimizer: Optimizer) -> bool:
    """Whether clipping and skipping can be left to the optimizer: torch's fused AdamW on CUDA."""
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    return (
        isinstance(optimizer, torch.optim.AdamW)
        and bool(optimizer.defaults["fused"])
        and all(each.is_cuda and not hasattr(each, "full_tensor") for each in weights)
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
        *numbers_out, raw = self.numbers.tolist()
        totals, (target_count, stop, *parts) = (
            numbers_out[: self.batches],
            numbers_out[self.batches :],
        )
        targets = max(target_count, 1.0)
        return StepOutcome(
            loss=sum(totals) / targets,
            parts={name: part / targets for name, part in zip(self.names, parts, strict=True)},
            norm=raw * self.gradient_scale / targets,
            targets=int(target_count),
            nonfinite=tuple(
                index for index, total in enumerate(totals) if not math.isfinite(total)
            ),
            stop=stop > 0,
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Updater:
    """Takes optimizer steps: gradients summed over micro-batches and processes, per target.

    `score` is the objective's method, possibly compiled. With `ahead` the device itself clips and
    skips, so that the host can queue the next step; see `can_run_ahead`.
    """

    wrapper: ModelWrapper
    optimizer: Optimizer
    score: Score
    processes: ProcessGroup
    seed: int
    half: bool
    clip: float
    ahead: bool = False

    def run(self, prepared: PreparedStep, *, stop: bool = False) -> StepOutcome:
        """Take a step and wait for its outcome."""
        return self.begin(prepared, stop=stop).outcome()

    def begin(self, prepared: PreparedStep, *, stop: bool = False) -> PendingOutcome:
        """Take a step; with `ahead` it may still be running on the device."""
        losses = [self._backward(prepared, index) for index in range(len(prepared.batches))]
        names, numbers = self._numbers(prepared.step, losses, stop)
        batches = len(prepared.step.indices) * self.processes.world_size
        scale = self._scale(numbers, batches)
        if self.ahead:
            self._step_on_device(scale, numbers, batches)
        numbers_out, ready = _copy_to_host(numbers)
        gradient_scale = self.wrapper.gradient_scale
        pending = PendingOutcome(
            numbers=numbers_out,
            ready=ready,
            batches=batches,
            names=names,
            gradient_scale=gradient_scale,
        )
        if not self.ahead and pending.outcome().finite:
            torch._foreach_mul_(self._gradients(), float(scale))
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return pending

    def _backward(self, prepared: PreparedStep, index: int) -> Loss:
        """Add the gradients of one micro-batch."""
        last = index == len(prepared.batches) - 1
        # For dropout.
        torch.manual_seed(_number(self.seed, prepared.number, prepared.step.indices[index]))
        batch = prepared.batches[index].to(self.processes.device)

        def work(model: Model) -> tuple[Tensor, Loss]:
            loss = self.score(model, batch)
            parts = {name: part.detach() for name, part in loss.parts.items()}
            detached = Loss(total=loss.total.detach(), targets=loss.targets, parts=parts)
            # FSDP puts a hook on this tensor, which a view could lose.
            return loss.combined.clone(), detached

        with self.wrapper.gradient_sync(last=last):
            with torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.half):
                whole, loss = self.wrapper.forward(work)
            whole.backward()
        return cast(Loss, loss)

    def _numbers(
        self, step: StreamStep, losses: list[Loss], stop: bool
    ) -> tuple[tuple[str, ...], Tensor]:
        """The names of the parts, and the numbers of `PendingOutcome`, still on the device."""
        names = tuple(sorted(losses[0].parts))
        count = len(step.indices) * self.processes.world_size
        numbers_out = torch.zeros(
            count + 2 + len(names), dtype=torch.float64, device=self.processes.device
        )
        # Assigning a number to an element would wait for the device; fill_ and copy_ do not.
        for index, loss in zip(step.indices, losses, strict=True):
            numbers_out[index].copy_(loss.total)
        numbers_out[count].fill_(sum(loss.targets for loss in losses))
        numbers_out[count + 1].fill_(float(stop))
        for index, name in enumerate(names):
            parts = torch.stack([loss.parts[name] for loss in losses])
            numbers_out[count + 2 + index].copy_(parts.sum(dtype=numbers_out.dtype))
        norm = self._norm().to(numbers_out)
        return names, torch.cat((self.processes.all_reduce(numbers_out), norm[None]))

    def _norm(self) -> Tensor:
        norm = nn.utils.get_total_norm(self._gradients())
        # With sharded weights each process has a part of the norm.
        whole: Tensor = norm.full_tensor() if hasattr(norm, "full_tensor") else norm
        return whole

    def _scale(self, numbers: Tensor, batches: int) -> Tensor:
        """The factor on the summed gradients that makes them a mean and clips it."""
        scale = self.wrapper.gradient_scale / numbers[batches].clamp(min=1)
        if self.clip:
            scale = scale * (self.clip / (numbers[-1] * scale + 1e-6)).clamp(max=1)
        return scale

    def _step_on_device(self, scale: Tensor, numbers: Tensor, batches: int) -> None:
        """Step without waiting for the outcome.

        torch's fused optimizers divide gradients by `grad_scale` and skip the step if `found_inf`
        is 1, which torch uses for half-precision gradients.
        """
        finite = numbers[:batches].isfinite().all() & numbers[-1].isfinite()
        setattr(self.optimizer, "grad_scale", (1 / scale).float())  # noqa: B010
        setattr(self.optimizer, "found_inf", (~finite).float())  # noqa: B010
        self.optimizer.step()

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
