"""Four tasks with a trained model each: next bytes, similar passages, sentiment and entities."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads import load
from manyheads.checkpoints.classification_head import with_classes
from manyheads.encoding.encode import pool
from manyheads.lens import CustomMetric, StateMetric
from manyheads.lens.inputs import cached_run, metrics
from manyheads.lens.inputs.texts import read_inputs
from manyheads.models.build import Model
from manyheads.ragged import Ragged
from manyheads.surgery import prune_layers
from manyheads.surgery.finetune.loop import AnswerLoss, RecoveryConfig, finetune
from manyheads.taps import Site, Tap, Watcher
from manyheads.train.objectives import Objective
from manyheads.train.objectives.objective import Loss, PreparedBatch, chain_watchers
from manyheads.train.optim import optimizers, schedules
from studies.byte_texts import ByteTexts, read_bytes
from studies.labeled_texts import read_labeled, read_tagged, shuffled
from studies.small_models import language_model
from studies.study import Settings
from studies.training import Recipe, Trainer

ENCODER = "house-bert"
# Cosines are divided by this before the softmax over the passages of a batch.
TEMPERATURE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """Texts, what they should give, and how the loss and the score of each text are measured."""

    texts: list[list[int]]
    targets: Any = None
    loss: metrics.Metric = "loss"
    score: metrics.Metric
    # Texts that are scored together; similar passages are looked for among them.
    batch_tokens: int | None = None

    def options(self, metric: metrics.Metric) -> dict[str, Any]:
        """The arguments of an analysis by the lens."""
        targets = self.targets if metric == "loss" else None
        return {
            "metric": metric,
            "targets": targets,
            "batch_tokens": self.batch_tokens,
            "progress": False,
        }


@dataclass(frozen=True, slots=True)
class Task:
    """A trained model; texts to train gates on, to choose heads by, and to score what is left."""

    model: Model
    learned: Sample
    chosen: Sample
    scored: Sample


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleLoss(AnswerLoss):
    """The loss of a sample, which need not be that of a readout."""

    metric: metrics.Metric

    def check(self, model: Any) -> None:
        self._bind(model, range(len(self.inputs)))

    def score(self, model: Any, prepared: PreparedBatch, *, watch: Watcher | None = None) -> Loss:
        texts = range(int(prepared.positions[0]), int(prepared.positions[-1]) + 1)
        metric = self._bind(model, texts)
        last = Site(-1, Tap.FINAL, stack=model.readout_stack)
        activations = cached_run.ActivationEditor({}, [last])
        model.run_inputs(self.inputs.select(texts), chain_watchers(watch, activations))
        losses = metric(activations[last])[0] * metric.weights
        return Loss(total=losses.sum(), targets=int(metric.weights.sum()))

    def _bind(self, model: Any, texts: range) -> metrics.BoundMetric:
        return metrics.bind_metric(model, self.inputs, texts, self.metric, self.targets)


def objective_of(model: Model, sample: Sample) -> Objective:
    inputs = read_inputs(model, sample.texts)
    return SampleLoss(inputs=inputs, targets=sample.targets, metric=sample.loss)


def train_encoder(model: Model, sample: Sample, settings: Settings, seed: int) -> None:
    """Fine-tune the model in place."""
    config = RecoveryConfig(
        optimizer=optimizers.AdamW(lr=settings["finetune_lr"], decay=0.01),
        schedule=schedules.Cosine(warmup=settings["finetune_steps"] // 10),
        batch_tokens=sample.batch_tokens or settings["batch_tokens"],
    )
    steps, objective = settings["finetune_steps"], objective_of(model, sample)
    finetune(model, sample.texts, objective, config, steps=steps, seed=seed, progress=False)
    model.eval()


def make_language(settings: Settings, device: str, seed: int) -> Task:
    """A decoder of bytes; its score is the share of next bytes that it predicts."""
    texts, length = ByteTexts(settings["text"], device, settings["limit"]), settings["length"]
    model = language_model(
        width=settings["width"], layers=settings["layers"], heads=settings["heads"], seed=seed
    ).to(device)
    train_language(model, texts, settings, settings["steps"], seed)

    def sample(passages: Tensor) -> Sample:
        labels = [torch.cat((passage[1:], passage.new_tensor([-1]))) for passage in passages]
        return Sample(texts=passages.tolist(), score=CustomMetric(partial(token_accuracy, labels)))

    count = settings["passages"]
    passages = texts.held_out(2 * count, length)
    learned = next(texts.batches(settings["gate_passages"], length, seed + 1000))
    return Task(model, sample(learned), sample(passages[:count]), sample(passages[count:]))


def train_language(
    model: Model, texts: ByteTexts, settings: Settings, steps: int, seed: int
) -> None:
    recipe = Recipe(steps=steps, lr=settings["lr"], warm_up=max(1, steps // 20))
    batches = texts.batches(settings["batch"], settings["length"], seed)
    Trainer(model, recipe).run(batches, "pruning")


def make_classification(settings: Settings, device: str, seed: int) -> Task:
    """house-bert that tells classes of sentences apart; its score is the share it gets right."""
    model = with_classes(_encoder(settings), 2, seed=seed).to(device)
    texts = read_labeled(settings["labeled"])[: settings["labeled_texts"]]
    ids = _encode(model, [text for text, _ in texts], settings["max_tokens"])

    def sample(part: slice) -> Sample:
        labels = torch.tensor([label for _, label in texts[part]], device=device)
        score = CustomMetric(partial(text_accuracy, labels))
        return Sample(texts=ids[part], targets=labels.tolist(), score=score)

    return _finetuned(model, sample, len(texts), settings, seed)


def make_entities(settings: Settings, device: str, seed: int) -> Task:
    """house-bert that tags entities; its score is the mean F1 of the sentences that have any.

    The first piece of a word has its tag. Sentences to choose and score by have an entity.
    """
    texts = read_tagged(settings["tagged"])[: settings["tagged_texts"]]
    fit = len(texts) - 2 * _held_out(len(texts))
    texts = texts[:fit] + [pair for pair in texts[fit:] if set(pair[1]) != {"O"}]
    names = ["O", *sorted({tag for _, tags in texts for tag in tags} - {"O"})]
    model = with_classes(_encoder(settings), len(names), "tokens", seed=seed).to(device)
    ids, targets = [], []
    for words, tags in texts:
        pieces = _encode(model, [f" {word}" for word in words], settings["max_tokens"])
        starts = [sum(map(len, pieces[:index])) for index in range(len(pieces))]
        row = [token for piece in pieces for token in piece][: settings["max_tokens"]]
        pairs = zip(starts, tags, pieces, strict=True)
        ids.append(row)
        targets.append(
            {at: names.index(tag) for at, tag, piece in pairs if piece and at < len(row)}
        )

    def sample(part: slice) -> Sample:
        labels = []
        for row, answers in zip(ids[part], targets[part], strict=True):
            labels.append(torch.tensor([answers.get(at, -1) for at in range(len(row))]).to(device))
        score = CustomMetric(partial(token_f1, labels))
        return Sample(texts=ids[part], targets=targets[part], score=score)

    return _finetuned(model, sample, len(texts), settings, seed, fit)


def make_similarity(settings: Settings, device: str, seed: int) -> Task:
    """house-bert whose vectors of two halves of a passage are similar.

    Its score is the share of halves whose other half is the nearest of a batch.
    """
    model, length = _encoder(settings).to(device), settings["half_tokens"]
    data = read_bytes(settings["text"], settings["limit"])
    size = 12 * length
    starts = shuffled(range(0, len(data) - size, size))[: settings["pairs"]]
    passages = [data[start : start + size].decode("utf-8", "ignore") for start in starts]
    rows = [row for row in _encode(model, passages, 2 * length) if len(row) == 2 * length]
    group = settings["similar_among"]
    rows = rows[: len(rows) // group * group]
    ids = [half for row in rows for half in (row[:length], row[length:])]

    def sample(part: slice) -> Sample:
        return Sample(
            texts=ids[part],
            loss=StateMetric(pair_loss, "lower"),
            score=StateMetric(pair_accuracy),
            batch_tokens=2 * group * length,
        )

    return _finetuned(model, sample, len(ids), settings, seed, unit=2 * group)


TASKS: dict[str, Callable[[Settings, str, int], Task]] = {
    "language": make_language,
    "similarity": make_similarity,
    "classification": make_classification,
    "entities": make_entities,
}


def text_accuracy(labels: Tensor, logits: Tensor, texts: Sequence[int]) -> Tensor:
    """1 for every text whose most likely class is the right one."""
    return (logits.argmax(-1) == labels[texts[0] : texts[-1] + 1]).float()


def token_accuracy(labels: Sequence[Tensor], logits: Ragged, texts: Sequence[int]) -> Tensor:
    """The share of right tokens by text; a label of -1 does not count."""
    answers = torch.cat([labels[text] for text in texts])
    right, counted = logits.values.argmax(-1) == answers, answers >= 0
    return _by_text(logits, right) / _by_text(logits, counted).clamp(min=1)


def token_f1(labels: Sequence[Tensor], logits: Ragged, texts: Sequence[int]) -> Tensor:
    """F1 of the tokens with a class other than 0, by text; a label of -1 does not count."""
    answers, classes = torch.cat([labels[text] for text in texts]), logits.values.argmax(-1)
    right = (classes == answers) & (answers > 0)
    predicted, actual = (classes > 0) & (answers >= 0), answers > 0
    both = _by_text(logits, predicted) + _by_text(logits, actual)
    return 2 * _by_text(logits, right) / both.clamp(min=1)


def pair_loss(hidden: Ragged, texts: Sequence[int]) -> Tensor:
    """Of each half, the cross-entropy of its other half among those of the texts."""
    del texts
    cosines = _pair_cosines(hidden) / TEMPERATURE
    own = torch.arange(len(cosines), device=cosines.device)
    both = [F.cross_entropy(rows, own, reduction="none") for rows in (cosines, cosines.T)]
    return torch.stack(both, dim=1).flatten()


def pair_accuracy(hidden: Ragged, texts: Sequence[int]) -> Tensor:
    """1 for every half whose nearest is its other half."""
    del texts
    cosines = _pair_cosines(hidden)
    own = torch.arange(len(cosines), device=cosines.device)
    both = [rows.argmax(1) == own for rows in (cosines, cosines.T)]
    return torch.stack(both, dim=1).flatten().float()


def _pair_cosines(hidden: Ragged) -> Tensor:
    vectors = pool(hidden, "mean", normalize=True)
    return vectors[::2] @ vectors[1::2].T


def _by_text(logits: Ragged, values: Tensor) -> Tensor:
    sums = torch.zeros(logits.lengths.count, device=values.device)
    return sums.index_add(0, logits.lengths.sequence_of_token, values.float())


def _encoder(settings: Settings) -> Model:
    """house-bert, or its first layers."""
    model = load(ENCODER)
    layers = len(model.config.stack.layers)
    return prune_layers(model, list(range(settings["encoder_layers"], layers)))


def _encode(model: Model, texts: Sequence[str], limit: int) -> list[list[int]]:
    assert model.tokenizer is not None
    return [encoding.ids[:limit] for encoding in model.tokenizer.encode_batch(list(texts))]


def _held_out(count: int, unit: int = 1) -> int:
    """A sixth to choose by, as many to score by."""
    return max(1, count // 6 // unit) * unit


def _finetuned(
    model: Model,
    sample: Callable[[slice], Sample],
    count: int,
    settings: Settings,
    seed: int,
    fit: int = 0,
    unit: int = 1,
) -> Task:
    """Train on the first texts, choose heads by up to half of the others, score by the rest."""
    fit = fit or count - 2 * _held_out(count, unit)
    chosen = min((count - fit) // 2, max(settings["chosen_texts"], unit))
    middle = fit + chosen // unit * unit
    learned = sample(slice(0, fit))
    train_encoder(model, learned, settings, seed)
    return Task(model, learned, sample(slice(fit, middle)), sample(slice(middle, count)))
