"""Fine-tuning of a model on some texts with the steps of the training loop, and recovery."""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from manyheads.argument_checks import check_fields
from manyheads.bridge.automatic import native_models_only
from manyheads.data.batch import Batch
from manyheads.data.stream import StreamPosition, StreamStep
from manyheads.errors import InputError, TrainingError
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, Targets, batch_ranges, read_inputs
from manyheads.models import build, decoder, encoder, readout
from manyheads.models.model_interface import ModelInputs
from manyheads.progress import Progress
from manyheads.surgery.finetune.trainable import copy_trainable
from manyheads.surgery.rebuild import AnyModel, full_plan, rebuild
from manyheads.taps import Site, Tap, Watcher
from manyheads.train import distributed
from manyheads.train.loop.train_step import MAX_SKIPPED, StepOutcome, Updater, prepare_steps
from manyheads.train.objectives import CausalLM, MaskedLM, Objective
from manyheads.train.objectives.objective import Loss, PreparedBatch, chain_watchers
from manyheads.train.optim import optimizers, schedules


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerLoss(Objective):
    """The loss that the lens measures, on the same texts and targets."""

    inputs: ModelInputs
    targets: Targets | None

    def check(self, model: Any) -> None:
        metrics.bind_metric(model, self.inputs, range(len(self.inputs)), "loss", self.targets)

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedBatch:
        del model, generator
        # A batch is a range of texts, and its labels are their numbers.
        assert batch.labels is not None
        return PreparedBatch(batch=batch, positions=batch.labels, labels=batch.labels)

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        texts = range(int(prepared.positions[0]), int(prepared.positions[-1]) + 1)
        metric = metrics.bind_metric(model, self.inputs, texts, "loss", self.targets)
        last = Site(-1, Tap.FINAL, stack=model.readout_stack)
        activations = cached_run.ActivationEditor({}, [last])
        model.run_inputs(self.inputs.select(texts), chain_watchers(watch, activations))
        losses = metric(activations[last])[0] * metric.weights
        return Loss(total=losses.sum(), targets=int(metric.weights.sum()))


def objective_for(model: build.Model, inputs: ModelInputs, targets: Targets | None) -> Objective:
    """Next tokens for a decoder, masked tokens for an encoder, or the targets."""
    scores_tokens = isinstance(model.config.readout, readout.LanguageHead)
    if targets is None and scores_tokens and isinstance(model, decoder.Decoder):
        return CausalLM()
    if targets is None and scores_tokens and isinstance(model, encoder.Encoder):
        return MaskedLM()
    return AnswerLoss(inputs=inputs, targets=targets)


SMALL_STEPS = optimizers.AdamW(lr=5e-5, decay=0.01)
DECAY = schedules.Cosine()


@check_fields
@dataclass(frozen=True, slots=True, kw_only=True)
class RecoveryConfig:
    """How a model is trained after pruning: a small learning rate with cosine decay."""

    optimizer: optimizers.OptimizerConfig = SMALL_STEPS
    schedule: schedules.Schedule = DECAY
    batch_tokens: int = 2048


DEFAULT = RecoveryConfig()


def finetune(
    model: build.Model,
    texts: Inputs,
    objective: Objective,
    config: RecoveryConfig,
    *,
    steps: int,
    seed: int,
    progress: bool,
    label: str = "recovering",
) -> list[StepOutcome]:
    """Train the trainable parameters in place, for `steps` steps of about `batch_tokens`."""
    if steps < 1:
        raise InputError(f"steps must be at least 1, got {steps}", "use 1 or more")
    inputs = read_inputs(model, texts)
    objective.check(model)
    processes = distributed.ProcessGroup(device=next(model.parameters()).device)
    updater = Updater(
        wrapper=distributed.ModelWrapper(model, processes),
        optimizer=config.optimizer.build(model),
        score=objective.score,
        lr_factor=lambda step: config.schedule.factor(step, steps),
        seed=seed,
    )
    batches = _steps(model, inputs, steps, config.batch_tokens, seed)
    prepared = prepare_steps(batches, objective, model, seed=seed, first=0)
    outcomes: list[StepOutcome] = []
    training, state = model.training, torch.get_rng_state()
    model.train()
    try:
        with Progress(label, total=steps, unit="steps", enabled=progress) as bar:
            for _, outcome in updater.run(prepared):
                outcomes.append(outcome)
                latest = outcomes[-MAX_SKIPPED:]
                if len(latest) == MAX_SKIPPED and not any(step.finite for step in latest):
                    raise TrainingError(
                        f"the loss was not finite in {MAX_SKIPPED} consecutive steps",
                        "use a smaller learning rate",
                    )
                bar.advance()
    finally:
        # Each step seeds torch's global generator, which the caller may use too.
        torch.set_rng_state(state)
        model.train(training)
    return outcomes


def _steps(
    model: build.Model, inputs: ModelInputs, steps: int, batch_tokens: int, seed: int
) -> Iterator[StreamStep[Batch]]:
    """Ranges of texts in a random order, epoch after epoch."""
    sizes = inputs.sizes(model)
    runs = list(batch_ranges(sizes, batch_tokens))
    order: list[range] = []
    draw = random.Random(seed)
    for number in range(steps):
        if not order:
            order = draw.sample(runs, len(runs))
        texts = order.pop()
        mine, numbers = inputs.select(texts), torch.tensor(list(texts))
        batch = Batch(texts=mine.ids, images=mine.images, labels=numbers)
        if mine.source is not None:
            batch = Batch(texts=mine.source, others=mine.ids, labels=numbers)
        yield StreamStep(
            number=number,
            batches=(batch.to("cpu"),),
            indices=(0,),
            tokens=sum(sizes[text] for text in texts),
            sequences=len(texts),
            after=StreamPosition(step=number + 1),
        )


@native_models_only
def recover(
    model: AnyModel,
    texts: Inputs,
    steps: int = 100,
    *,
    targets: Targets | None = None,
    objective: Objective | None = None,
    config: RecoveryConfig = DEFAULT,
    seed: int = 0,
    progress: bool = True,
) -> AnyModel:
    """A copy of the model, trained for `steps` steps on the texts.

    All parameters are trained, or those that `freeze` and `freeze_except` left trainable. The
    objective follows from the model: the next token, masked tokens, or the `targets`, as in
    `lens.ablate`; or it is any `objective` of training.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=4, vocabulary=50, seed=0)
    >>> recovered = recover(model, [[1, 2, 3, 4], [5, 6, 7]], steps=2)
    >>> recovered.config == model.config
    True
    """
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise InputError(
            "no parameter of this model is trainable", "call surgery.unfreeze_all(model)"
        )
    recovered = rebuild(model, full_plan(model))
    copy_trainable(recovered, model)
    inputs = read_inputs(recovered, texts)
    chosen = objective or objective_for(recovered, inputs, targets)
    finetune(recovered, inputs, chosen, config, steps=steps, seed=seed, progress=progress)
    return recovered
