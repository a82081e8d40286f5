"""How well a model does on texts that it does not train on."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from manyheads.data.stream import Stream
from manyheads.models.build import Model
from manyheads.train.distributed import Crew
from manyheads.train.interrupt import stop_asked
from manyheads.train.loop.model_wrapper import Entrance
from manyheads.train.loop.train_step import seeded
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Validation:
    """One epoch of held-out batches; what is masked in them is the same each time.

    Asked to stop, it ends with the batches seen so far and says which `share` of all they are.
    `bytes_a_token` gives bits a byte, where every token is asked for; 0 where that says nothing.
    """

    stream: Stream
    objective: Objective
    crew: Crew
    seed: int
    half: bool
    bytes_a_token: float = 0.0

    def run(self, entrance: Entrance) -> dict[str, float]:
        """Loss a target in nats, perplexity, bits a byte; of classes the share of right answers."""
        model = entrance.model
        training = model.training
        model.eval()
        epoch = list(self.stream.epoch(0))
        sums = torch.zeros(3, dtype=torch.float64, device=self.crew.device)
        tells_right = False
        # Sharded weights are gathered by all at once, so all take equally many turns.
        seen = 0
        for turn in range(0, len(epoch), self.crew.world):
            if turn and self._stops():
                break
            seen = min(turn + self.crew.world, len(epoch))
            place = turn + self.crew.rank
            loss = self._loss(entrance, epoch, min(place, len(epoch) - 1))
            tells_right = loss.right is not None
            if place < len(epoch):
                right = sums.new_zeros(()) if loss.right is None else loss.right.double()
                targets = sums.new_tensor(float(loss.targets))
                sums += torch.stack((loss.total.double(), targets, right))
        model.train(training)
        total, count, correct = self.crew.sum(sums).tolist()
        loss_a_target = total / max(count, 1.0)
        found = {"loss": loss_a_target}
        if tells_right:
            found["accuracy"] = correct / max(count, 1.0)
        else:
            found["perplexity"] = _exp(loss_a_target)
        if self.bytes_a_token:
            found["bits_a_byte"] = loss_a_target / math.log(2) / self.bytes_a_token
        if seen < len(epoch):
            found["share"] = seen / len(epoch)
        return found

    def _stops(self) -> bool:
        """Whether any process was asked to: all end at the same turn."""
        if self.crew.alone:
            return stop_asked()
        return bool(self.crew.sum(torch.tensor(float(stop_asked()), device=self.crew.device)))

    def _loss(self, entrance: Entrance, epoch: list[Sequence[int]], place: int) -> Loss:
        batch = self.stream.pieces.batch(epoch[place])
        asked = self.objective.prepare(entrance.model, batch, seeded(self.seed, 0, place))
        task = asked.to(self.crew.device)

        def work(model: Model) -> Loss:
            return self.objective.score(model, task)

        with torch.autocast(self.crew.device.type, torch.bfloat16, enabled=self.half):
            return entrance.look(work)


def _exp(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf
