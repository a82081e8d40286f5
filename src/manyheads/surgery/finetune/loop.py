"""A short training of a model on some texts, with the updates of the training loop."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from manyheads.data.batch import Batch
from manyheads.data.stream import StreamPosition, StreamStep
from manyheads.errors import InputError, TrainingError
from manyheads.lens.inputs.cached_run import Edits
from manyheads.lens.inputs.metrics import judge
from manyheads.lens.inputs.texts import Given, Targets, read, shares
from manyheads.models.build import Model
from manyheads.models.decoder import Decoder
from manyheads.models.encoder import Encoder
from manyheads.models.readout import LanguageHead
from manyheads.models.seq2seq import Seq2Seq
from manyheads.models.vision import Vision
from manyheads.progress import Progress
from manyheads.taps import Site, Tap, Watcher
from manyheads.train.distributed import ProcessGroup
from manyheads.train.loop.model_wrapper import ModelWrapper
from manyheads.train.loop.train_step import StepOutcome, Updater, prepare_steps
from manyheads.train.objectives import CausalLM, MaskedLM, Objective
from manyheads.train.objectives.objective import Loss, PreparedBatch
from manyheads.train.optim.optimisers import OptimiserConfig
from manyheads.train.optim.param_groups import set_learning_rate
from manyheads.train.optim.schedules import Schedule
from manyheads.train.regularisers import WatcherChain

# So many steps in a row without a finite loss end the training.
MOST_SKIPPED = 3
CLIP = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLoss(Objective):
    """The loss that the lens measures, on the same texts and targets."""

    given: Given
    targets: Targets | None

    def check(self, model: Any) -> None:
        judge(model, self.given, range(len(self.given)), "loss", self.targets)

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del model, generator
        # A batch is a run of neighbouring texts, known by their numbers.
        assert batch.labels is not None
        return PreparedBatch(batch=batch, positions=batch.labels, labels=batch.labels)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        texts = range(int(prepared.positions[0]), int(prepared.positions[-1]) + 1)
        judged = judge(model, self.given, texts, "loss", self.targets)
        last = Site(-1, Tap.FINAL, stack="decoder" if isinstance(model, Seq2Seq) else "main")
        seen = Edits({}, [last])
        watchers: list[Watcher] = [seen] if watch is None else [watch, seen]
        _run(model, prepared.batch, WatcherChain(watchers))
        losses = judged(seen[last])[0] * judged.weights
        return Loss(total=losses.sum(), targets=int(judged.weights.sum()))


def objective_for(model: Model, given: Given, targets: Targets | None) -> Objective:
    """Next tokens for a decoder, masked ones for an encoder, or the targets."""
    scores_tokens = isinstance(model.config.readout, LanguageHead)
    if targets is None and scores_tokens and isinstance(model, Decoder):
        return CausalLM()
    if targets is None and scores_tokens and isinstance(model, Encoder):
        return MaskedLM()
    return AnswerLoss(given=given, targets=targets)


def finetune(
    model: Model,
    texts: Any,
    objective: Objective,
    *,
    optimiser: OptimiserConfig,
    schedule: Schedule,
    steps: int,
    batch_tokens: int,
    seed: int,
    progress: bool,
    label: str,
) -> list[StepOutcome]:
    """Train the trainable parameters of a model in place, `steps` times about `batch_tokens`."""
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}", "use 1 or more")
    given = read(model, texts)
    objective.check(model)
    device = next(model.parameters()).device
    processes = ProcessGroup(device=device)
    wrapper = ModelWrapper(model, processes)
    built = optimiser.build(model)
    updater = Updater(
        wrapper=wrapper,
        optimiser=built,
        score=objective.score,
        processes=processes,
        seed=seed,
        half=False,
        clip=CLIP,
    )
    outcomes: list[StepOutcome] = []
    training, state = model.training, torch.get_rng_state()
    model.train()
    try:
        with Progress(label, total=steps, unit="steps", enabled=progress) as bar:
            batches = _steps(model, given, steps, batch_tokens, seed)
            for each in prepare_steps(batches, objective, model, seed=seed, first=0):
                set_learning_rate(built, schedule.factor(each.number, steps))
                outcomes.append(updater.run(each))
                _check(outcomes)
                bar.advance()
    finally:
        # Each step seeds torch's own numbers, which are somebody else's too.
        torch.set_rng_state(state)
        model.train(training)
    return outcomes


def _check(outcomes: Sequence[StepOutcome]) -> None:
    last = outcomes[-MOST_SKIPPED:]
    if len(last) == MOST_SKIPPED and not any(each.finite for each in last):
        raise TrainingError(
            f"the loss is not finite for {MOST_SKIPPED} steps in a row",
            "use a smaller learning rate",
        )


def _steps(
    model: Model, given: Given, steps: int, batch_tokens: int, seed: int
) -> Iterator[StreamStep]:
    """Runs of neighbouring texts in a random order, epoch after epoch."""
    sizes = given.sizes(model)
    runs = list(shares(sizes, batch_tokens))
    order: list[range] = []
    draw = random.Random(seed)
    for number in range(steps):
        if not order:
            order = draw.sample(runs, len(runs))
        texts = order.pop()
        yield StreamStep(
            number=number,
            batches=(_batch(given, texts),),
            indices=(0,),
            tokens=sum(sizes[text] for text in texts),
            sequences=len(texts),
            after=StreamPosition(step=number + 1),
        )


def _batch(given: Given, texts: range) -> Batch:
    mine, numbers = given.select(texts), torch.tensor(list(texts))
    if mine.source is not None:
        return Batch(texts=mine.source, others=mine.ids, labels=numbers).to("cpu")
    return Batch(texts=mine.ids, images=mine.images, labels=numbers).to("cpu")


def _run(model: Any, batch: Batch, watch: Watcher) -> None:
    if isinstance(model, Vision):
        model(list(batch.images), watch=watch)
    elif isinstance(model, Seq2Seq):
        model(batch.texts, batch.others, watch=watch)
    else:
        model(batch.texts, watch=watch)
