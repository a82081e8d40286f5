"""Small models trained alike: AdamW with a warm-up and a cosine, steps recorded as CUDA graphs."""

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.models import Decoder
from manyheads.parts.halting import AddedLoss
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged

# What a step reads: ids with the byte that follows the last, or several tensors.
Batch = tuple[Tensor, ...]
Loss = Callable[[nn.Module, Batch], Tensor]
BETAS, EAGER_STEPS = (0.9, 0.95), 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How a model is trained; the rate rises over `warm_up` steps, then falls by a cosine."""

    steps: int
    lr: float
    warm_up: int = 100
    weight_decay: float = 0.1
    clip: float | None = 1.0
    # The rate at the end, as a share of the highest; 1 keeps it constant.
    final: float = 0.05
    # Training ends once the mean loss of 100 steps is below this.
    learned: float | None = None
    # Whether steps are recorded on CUDA: not where they wait for the device, or a kernel refuses.
    recorded: bool = True

    def rate(self, step: int) -> float:
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.lr * min((step + 1) / self.warm_up, self.final + (1 - self.final) * cosine)


@dataclass(slots=True)
class TrainingLog:
    """What was seen while a model trained."""

    losses: list[float] = field(default_factory=list)
    gradient_norms: list[float] = field(default_factory=list)
    # By step, what `watch` has returned.
    watched: dict[int, Any] = field(default_factory=dict)
    seconds_per_step: float = math.nan

    @property
    def diverged(self) -> bool:
        """Whether the loss became infinite, or ended above where it began."""
        tail = self.losses[-20:]
        return not all(map(math.isfinite, tail)) or sum(tail) / len(tail) > self.losses[0]

    def spikes(self, above: float = 0.5, window: int = 50) -> int:
        """How often the loss rises by `above` nats over the median of the `window` steps before."""
        count, quiet = 0, 0
        for step in range(window, len(self.losses)):
            median = sorted(self.losses[step - window : step])[window // 2]
            is_high = not self.losses[step] < median + above
            count += is_high and quiet == 0
            quiet = window // 2 if is_high else max(0, quiet - 1)
        return count


class Trainer:
    """Trains one model; on CUDA a step is recorded at its fourth batch of a shape."""

    def __init__(self, model: nn.Module, recipe: Recipe, loss: Loss | None = None) -> None:
        self.model, self.recipe, self.loss = model.train(), recipe, loss or next_byte_loss
        parameters = [each for each in model.parameters() if each.requires_grad]
        groups = [
            {
                "params": [each for each in parameters if each.ndim > 1],
                "weight_decay": recipe.weight_decay,
            },
            {"params": [each for each in parameters if each.ndim <= 1], "weight_decay": 0.0},
        ]
        self.parameters, self.cuda = parameters, parameters[0].is_cuda
        # A tensor, so that a recorded step reads what it is now.
        self.rate = torch.tensor(recipe.lr, device=parameters[0].device)
        self.optimizer = torch.optim.AdamW(
            groups, lr=self.rate, betas=BETAS, fused=True, capturable=self.cuda
        )
        self.seen: dict[Any, int] = {}
        self.recorded: dict[Any, tuple[torch.cuda.CUDAGraph, Batch, tuple[Tensor, Tensor]]] = {}

    def run(
        self,
        batches: Iterable[Tensor | Batch],
        title: str = "training",
        watch: Mapping[int, Callable[[nn.Module], Any]] | None = None,
    ) -> TrainingLog:
        """Train on the batches; before the steps that `watch` names, it sees the model."""
        log, seen, watch = TrainingLog(), [], dict(watch or {})
        steps, half = self.recipe.steps, self.recipe.steps // 2
        paused = 0.0
        with Progress(title, total=steps, unit="steps") as bar, self._own_stream():
            for step, batch in enumerate(islice(batches, steps)):
                if step == half:
                    start = self._time()
                if step in watch:
                    before = self._time()
                    log.watched[step] = self._watch(watch[step])
                    paused += (self._time() - before) * (step > half)
                self.rate.fill_(self.recipe.rate(step))
                seen.append(self._step((batch,) if isinstance(batch, Tensor) else batch))
                bar.advance()
                if self._has_learned(seen):
                    break
            else:
                # By then all is compiled and recorded.
                log.seconds_per_step = (self._time() - start - paused) / (steps - half)
            if steps in watch:
                log.watched[steps] = self._watch(watch[steps])
        values = torch.stack(seen).tolist()
        log.losses, log.gradient_norms = [each[0] for each in values], [each[1] for each in values]
        self.model.eval()
        return log

    def _has_learned(self, seen: Sequence[Tensor]) -> bool:
        bound = self.recipe.learned
        if bound is None or len(seen) % 100:
            return False
        return bool(torch.stack(list(seen[-100:]))[:, 0].mean() < bound)

    def _watch(self, look: Callable[[nn.Module], Any]) -> Any:
        self.model.eval()
        seen = look(self.model)
        self.model.train()
        return seen

    def _time(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _step(self, batch: Batch) -> Tensor:
        shape = tuple(each.shape for each in batch)
        self.seen[shape] = self.seen.get(shape, 0) + 1
        if not (self.cuda and self.recipe.recorded) or self.seen[shape] <= EAGER_STEPS:
            return torch.stack(self._learn(batch))
        if shape not in self.recorded:
            fixed, graph = tuple(each.clone() for each in batch), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                seen = self._learn(fixed)
            self.recorded[shape] = graph, fixed, seen
        graph, fixed, seen = self.recorded[shape]
        for one, other in zip(fixed, batch, strict=True):
            one.copy_(other)
        graph.replay()
        return torch.stack(seen)

    def _learn(self, batch: Batch) -> tuple[Tensor, Tensor]:
        self.optimizer.zero_grad(set_to_none=True)
        loss = self.loss(self.model, batch)
        loss.backward()
        bound = math.inf if self.recipe.clip is None else self.recipe.clip
        norm = nn.utils.clip_grad_norm_(self.parameters, bound)
        self.optimizer.step()
        return loss.detach().float(), norm.detach().float()

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Steps can be recorded on any stream but the one that is there from the start."""
        if not self.cuda:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


@cache
def even_lengths(count: int, length: int, device: torch.device) -> Lengths:
    return Lengths.of([length] * count, device)


def logits_of(model: Any, ids: Tensor) -> Tensor:
    """Logits by byte [n v], in bfloat16 on CUDA; ids are not checked, which would wait."""
    return run_decoder(model, ids)[0]


def run_decoder(model: Any, ids: Tensor) -> tuple[Tensor, tuple[AddedLoss, ...]]:
    """`logits_of`, and what routers add to the loss."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        if not isinstance(model, Decoder):
            return model(ids), ()
        batch = Ragged(ids.flatten(), even_lengths(*ids.shape, ids.device))
        hidden, added = model.stack(model.embedding.embed(batch, batch.lengths.positions))
        assert model.readout is not None
        return model.readout(hidden, model.table).values, added


def losses_of(model: Any, passages: Tensor) -> Tensor:
    """The loss in nats of every byte but the first of passages [b t + 1]: [b t]."""
    logits = logits_of(model, passages[:, :-1]).float()
    targets = passages[:, 1:]
    return F.cross_entropy(logits, targets.flatten(), reduction="none").view_as(targets)


def next_byte_loss(model: nn.Module, batch: Batch) -> Tensor:
    """The mean loss of the next byte."""
    return losses_of(model, batch[0]).mean()


@torch.no_grad()
def bits_per_byte(model: nn.Module, passages: Tensor, batch: int = 16) -> float:
    """Of held-out passages, some at a time."""
    losses = [losses_of(model, part).mean(1) for part in passages.split(batch)]
    return float(torch.cat(losses).mean()) / math.log(2)


@torch.no_grad()
def loss_by_position(model: nn.Module, passages: Tensor, batch: int = 16) -> list[float]:
    """The mean loss in nats at every position."""
    losses = torch.cat([losses_of(model, part) for part in passages.split(batch)])
    return losses.mean(0).tolist()


def smooth(values: Sequence[float], window: int = 20) -> list[float]:
    """Means of `window` values each, for a curve of few points."""
    return [
        sum(values[at : at + window]) / len(values[at : at + window])
        for at in range(0, len(values), window)
    ]
