"""Validation: loss and accuracy on held-out data."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyheads.data.stream import Stream
from manyheads.models.build import Model
from manyheads.train.distributed import ProcessGroup
from manyheads.train.interrupt import interrupt_requested
from manyheads.train.loop.model_wrapper import ModelWrapper
from manyheads.train.loop.train_step import micro_batch_generator
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Validation:
    """One epoch over held-out batches, with the same masks each time.

    If interrupted, it ends with the batches seen so far and reports the `fraction` of all batches.
    `bytes_per_token` is for bits per byte, where every token is predicted; 0 leaves them out.
    """

    stream: Stream
    objective: Objective
    processes: ProcessGroup
    seed: int
    half: bool
    bytes_per_token: float = 0.0

    def run(self, wrapper: ModelWrapper) -> dict[str, float]:
        """Loss per target in nats, perplexity and bits per byte, or the accuracy of classes."""
        model = wrapper.model
        training = model.training
        model.eval()
        epoch = list(self.stream.epoch(0))
        sums = torch.zeros(3, dtype=torch.float64, device=self.processes.device)
        has_accuracy = False
        # Sharded weights are gathered by all processes at once, so all take equally many turns.
        seen = 0
        for turn in range(0, len(epoch), self.processes.world_size):
            if turn and self._interrupted():
                break
            seen = min(turn + self.processes.world_size, len(epoch))
            index = turn + self.processes.rank
            loss = self._loss(wrapper, epoch, min(index, len(epoch) - 1))
            has_accuracy = loss.correct is not None
            if index < len(epoch):
                right = sums.new_zeros(()) if loss.correct is None else loss.correct.double()
                targets = sums.new_tensor(float(loss.targets))
                sums += torch.stack((loss.total.double(), targets, right))
        model.train(training)
        total, count, correct = self.processes.all_reduce(sums).tolist()
        loss_per_target = total / max(count, 1.0)
        found = {"loss": loss_per_target}
        if has_accuracy:
            found["accuracy"] = correct / max(count, 1.0)
        else:
            found["perplexity"] = _exp(loss_per_target)
        if self.bytes_per_token:
            found["bits_per_byte"] = loss_per_target / math.log(2) / self.bytes_per_token
        if seen < len(epoch):
            found["fraction"] = seen / len(epoch)
        return found

    def _interrupted(self) -> bool:
        """Whether any process was interrupted: all of them end at the same turn."""
        if self.processes.is_single:
            return interrupt_requested()
        return bool(
            self.processes.all_reduce(
                torch.tensor(float(interrupt_requested()), device=self.processes.device)
            )
        )

    def _loss(self, wrapper: ModelWrapper, epoch: list[Sequence[int]], index: int) -> Loss:
        batch = self.stream.chunks.batch(epoch[index])
        prepared = self.objective.prepare(
            wrapper.model, batch, micro_batch_generator(self.seed, 0, index)
        )
        prepared = prepared.to(self.processes.device)

        def work(model: Model) -> Loss:
            return self.objective.score(model, prepared)

        with torch.autocast(self.processes.device.type, torch.bfloat16, enabled=self.half):
            return wrapper.evaluate(work)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
