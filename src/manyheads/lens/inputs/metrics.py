"""Metrics: one number per text, computed from the last hidden states of a model."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.encoding.encode import pool
from manyheads.errors import InputError
from manyheads.lens.inputs.texts import PackedTargets, Targets, check_targets, pack_targets
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.models.readout import ClassHead, ReadoutLayer
from manyheads.ragged import Lengths, Ragged

# Logits computed at once: 256 MB in float32.
MAX_LOGITS = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDifference:
    """logit(answer) - logit(distractor), one pair of tokens (or classes) per text.

    `at` is the position of the logits, one per text; classes of whole texts have none.
    """

    answer: tuple[int, ...]
    distractor: tuple[int, ...]
    at: Literal["last"] | tuple[int, ...] = "last"

    def __post_init__(self) -> None:
        counts = {len(self.answer), len(self.distractor)} | (
            set() if self.at == "last" else {len(self.at)}
        )
        if len(counts) > 1:
            raise InputError(
                f"there are {len(self.answer)} answers and {len(self.distractor)} distractors",
                "pass one of each per text",
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbabilityDifference:
    """The probability of some tokens minus that of others, after the last token of each text.

    Years after that of a text against years before it, as in arXiv 2305.00586.
    """

    answers: tuple[tuple[int, ...], ...]
    distractors: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len(self.answers) != len(self.distractors):
            raise InputError(
                f"there are answers of {len(self.answers)} texts and distractors of "
                f"{len(self.distractors)}",
                "pass the tokens of both for each text",
            )


@dataclass(frozen=True, slots=True)
class CustomMetric:
    """A function from logits and the numbers of their texts to one value per text."""

    function: Callable[[Ragged | Tensor, Sequence[int]], Float[Tensor, " b"]]
    better_direction: Literal["lower", "higher"] = "higher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The cosine similarity of a text's vector to that of the unchanged model; needs no readout.

    "own" pools tokens as the model's folder says, by the mean if it says nothing.
    """

    pooling: Pooling | Literal["own"] = "own"


@dataclass(frozen=True, slots=True)
class StateMetric:
    """A function from last hidden states and the numbers of their texts to one value per text.

    It needs no readout: the score of a text for a query is one.
    """

    function: Callable[[Ragged, Sequence[int]], Float[Tensor, " b"]]
    better_direction: Literal["lower", "higher"] = "higher"


MetricConfig: TypeAlias = (
    LogitDifference | ProbabilityDifference | Similarity | StateMetric | CustomMetric
)
NamedMetric: TypeAlias = Literal["loss"] | MetricConfig
Metric: TypeAlias = NamedMetric | Callable[[Ragged | Tensor, Sequence[int]], Float[Tensor, " b"]]


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class BoundMetric:
    """A metric bound to a model and some texts, to be called on copies of their hidden states.

    `weights` are the numbers of answers behind each text's value: a text without targets has the
    value and the weight 0.
    """

    model: Model
    texts: range
    lengths: Lengths
    targets: PackedTargets | None
    metric: NamedMetric
    weights: Float[Tensor, " b"]
    vectors: Float[Tensor, "b c"] | None = None

    def __call__(self, hidden: Ragged, copies: int = 1) -> Float[Tensor, "copies b"]:
        """The value of each text in each copy, in float32 or better."""
        if isinstance(self.metric, CustomMetric | StateMetric):
            return self._custom(self.metric, hidden, copies)
        if isinstance(self.metric, Similarity):
            vectors = _pool(self.model, self.metric, hidden).unflatten(0, (copies, -1))
            assert self.vectors is not None, "bind_metric() computes them"
            return (vectors * self.vectors).sum(-1)
        rows, targets = self._rows(hidden, copies), self.targets
        assert targets is not None, "these metrics have targets"
        if self.metric == "loss":
            losses = self._losses(rows, targets.answers.repeat(copies)).unflatten(0, (copies, -1))
            summed = losses.new_zeros(copies, len(self.texts)).index_add(1, targets.texts, losses)
            return summed / self.weights.clamp(min=1).to(losses.dtype)
        if isinstance(self.metric, ProbabilityDifference):
            return self._probabilities(rows, self.metric).unflatten(0, (copies, -1))
        return self._differences(rows, self.metric).unflatten(0, (copies, -1))

    def _readout(self) -> ReadoutLayer:
        assert self.model.readout is not None, "bind_metric() checks it"
        return self.model.readout

    def _rows(self, hidden: Ragged, copies: int) -> Float[Tensor, "km c"]:
        """The readout's features at the target rows, copy by copy."""
        assert self.targets is not None
        config, x = self._readout().config, hidden.values
        if isinstance(config, ClassHead):
            x = config.pooled(x, hidden.lengths)
        x = x.unflatten(0, (copies, -1))[:, self.targets.rows]
        return self._readout().features(x.flatten(0, 1))

    def _losses(
        self, rows: Float[Tensor, "m c"], answers: Int[Tensor, " m"]
    ) -> Float[Tensor, " m"]:
        readout = self._readout()
        vectors = readout.vectors(self.model.table)
        chunk = max(1, MAX_LOGITS // vectors.shape[0])
        chunks = list(zip(rows.split(chunk), answers.split(chunk), strict=True))

        def loss(rows: Float[Tensor, "m c"], answers: Int[Tensor, " m"]) -> Float[Tensor, " m"]:
            logits = readout.finish(F.linear(rows, vectors, readout.bias)).float()
            # Half the memory traffic of a full softmax.
            correct = logits.gather(1, answers.unsqueeze(1)).squeeze(1)
            return logits.logsumexp(1) - correct

        if len(chunks) > 1 and torch.is_grad_enabled() and rows.requires_grad:
            # The backward pass computes the logits again, so that they are never all in memory.
            losses = [checkpoint(loss, *chunk, use_reentrant=False) for chunk in chunks]
        else:
            losses = [loss(*chunk) for chunk in chunks]
        return torch.cat(losses)

    def _differences(
        self, rows: Float[Tensor, "kb c"], metric: LogitDifference
    ) -> Float[Tensor, " kb"]:
        chosen = slice(self.texts.start, self.texts.stop)
        answer, distractor = (
            torch.tensor(tokens[chosen], device=rows.device)
            for tokens in (metric.answer, metric.distractor)
        )
        readout, copies = self._readout(), rows.shape[0] // len(self.texts)
        vectors, bias = readout.vectors(self.model.table), readout.bias

        def logits(vector: Float[Tensor, "b c"], shift: Float[Tensor, " b"] | None) -> Tensor:
            products = (rows.float() * vector.repeat(copies, 1).float()).sum(-1)
            return products if shift is None else products + shift.repeat(copies)

        if readout.subtracts:
            # Subtracting the vectors, not the logits, avoids cancellation.
            shift = None if bias is None else bias[answer] - bias[distractor]
            return logits(vectors[answer] - vectors[distractor], shift)
        # Logits that are capped or scaled do not subtract as their vectors do.
        of_answer, of_distractor = (
            readout.finish(logits(vectors[token], None if bias is None else bias[token]))
            for token in (answer, distractor)
        )
        return of_answer - of_distractor

    def _probabilities(
        self, rows: Float[Tensor, "kb c"], metric: ProbabilityDifference
    ) -> Float[Tensor, " kb"]:
        readout, table = self._readout(), self.model.table
        logits = readout.finish(F.linear(rows, readout.vectors(table), readout.bias)).float()
        signs = torch.zeros(len(self.texts), logits.shape[1], device=rows.device)
        for sign, text in zip(signs, self.texts, strict=True):
            sign[list(metric.answers[text])] = 1
            sign[list(metric.distractors[text])] = -1
        return (logits.softmax(-1) * signs.repeat(len(rows) // len(signs), 1)).sum(-1)

    def _custom(
        self, metric: CustomMetric | StateMetric, hidden: Ragged, copies: int
    ) -> Float[Tensor, "copies b"]:
        by_copy = []
        for values in hidden.values.unflatten(0, (copies, -1)):
            states = Ragged(values, self.lengths)
            if isinstance(metric, StateMetric):
                result = metric.function(states, self.texts)
            else:
                result = metric.function(self._readout()(states, self.model.table), self.texts)
            if not isinstance(result, Tensor) or result.shape != (len(self.texts),):
                got = tuple(result.shape) if isinstance(result, Tensor) else type(result).__name__
                raise InputError(
                    f"the metric returned {got} for {len(self.texts)} texts",
                    "return one value per text",
                )
            by_copy.append(result)
        return torch.stack(by_copy)


def bind_metric(
    model: Model, inputs: ModelInputs, texts: range, metric: Metric, targets: Targets | None = None
) -> BoundMetric:
    """Bind a metric to the `texts` of these numbers among all `inputs`."""
    resolved = _resolve(metric)
    if model.readout is None and not isinstance(resolved, Similarity | StateMetric):
        raise InputError(
            f"this {type(model).__name__} has no readout",
            "use a model with a language or class head, or metric=Similarity()",
        )
    selected = inputs.select(texts)
    lengths = selected.lengths(model)
    packed, vectors = None, None
    weights = torch.ones(len(texts), device=lengths.offsets.device)
    if isinstance(resolved, Similarity):
        with eval_mode(model), torch.no_grad():
            hidden = model.run_inputs(selected).hidden
        assert isinstance(hidden, Ragged), "ragged in, ragged out"
        vectors = _pool(model, resolved, hidden)
    if resolved == "loss":
        chosen = None if targets is None else targets[texts.start : texts.stop]
        packed = pack_targets(model, selected, chosen)
        check_targets(inputs, targets)
        weights = torch.bincount(packed.texts, minlength=len(texts)).float()
    elif isinstance(resolved, LogitDifference | ProbabilityDifference):
        packed = _pair_targets(model, inputs, lengths, texts, resolved)
    return BoundMetric(
        model=model,
        texts=texts,
        lengths=lengths,
        targets=packed,
        metric=resolved,
        weights=weights,
        vectors=vectors,
    )


def better_direction(metric: Metric) -> Literal["lower", "higher"]:
    """Whether a better model has a lower or a higher value of the metric."""
    resolved = _resolve(metric)
    if isinstance(resolved, CustomMetric | StateMetric):
        return resolved.better_direction
    return "lower" if resolved == "loss" else "higher"


def metric_name(metric: Metric) -> str:
    """The name of a metric in results."""
    resolved = _resolve(metric)
    if isinstance(resolved, CustomMetric | StateMetric):
        return str(getattr(resolved.function, "__name__", "measure"))
    if isinstance(resolved, Similarity):
        return "similarity"
    if isinstance(resolved, ProbabilityDifference):
        return "probability difference"
    return "loss" if resolved == "loss" else "logit difference"


def weighted_mean(
    values: Float[Tensor, "b *rest"], weights: Float[Tensor, " b"]
) -> tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]:
    """The weighted mean over texts and its standard error, texts being independent.

    With equal weights it is the usual standard error; for a single text it is NaN.

    >>> mean, error = weighted_mean(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    >>> float(mean), round(float(error), 4)
    (2.0, 0.5774)
    """
    values = values.double()
    fractions = (weights.double() / weights.double().sum()).view(-1, *[1] * (values.dim() - 1))
    mean = (fractions * values).sum(0)
    count = int((weights > 0).sum())
    if count < 2:
        return mean, torch.full_like(mean, torch.nan)
    spread = (fractions * (values - mean)).square().sum(0)
    return mean, (spread * (count / (count - 1))).sqrt()


def _resolve(metric: Metric) -> NamedMetric:
    if isinstance(metric, str) and metric != "loss":
        raise InputError(
            f"metric={metric!r} is unknown",
            'use "loss", LogitDifference(...), ProbabilityDifference(...), Similarity(), '
            "StateMetric(...), CustomMetric(...) or a function",
        )
    if isinstance(metric, str | MetricConfig):
        return metric
    return CustomMetric(metric)


def _pool(model: Model, metric: Similarity, hidden: Ragged) -> Float[Tensor, "b c"]:
    sentence = model.sentence or SentenceConfig()
    pooling = sentence.pooling if metric.pooling == "own" else metric.pooling
    return pool(hidden, pooling, normalize=True, project=sentence.project)


def _pair_targets(
    model: Model,
    inputs: ModelInputs,
    lengths: Lengths,
    texts: range,
    metric: LogitDifference | ProbabilityDifference,
) -> PackedTargets:
    """The position of the difference, one per text, and the first answer there."""
    if isinstance(metric, ProbabilityDifference):
        first = tuple(tokens[0] if tokens else 0 for tokens in metric.answers)
        metric = LogitDifference(answer=first, distractor=first)
    if len(metric.answer) != len(inputs):
        raise InputError(
            f"{len(metric.answer)} answer pairs for {len(inputs)} texts", "pass one pair per text"
        )
    device = lengths.offsets.device
    numbers = torch.arange(len(texts), device=device)
    if isinstance(model.config.readout, ClassHead):
        rows = numbers
    elif metric.at == "last":
        rows = lengths.offsets[1:].long() - 1
    else:
        at = metric.at[texts.start : texts.stop]
        for text, position, length in zip(texts, at, lengths.each, strict=True):
            if not 0 <= position < length:
                raise InputError(
                    f"text {text} has no position {position}", f"use 0 to {length - 1}"
                )
        rows = lengths.offsets[:-1].long() + torch.tensor(at, device=device)
    answers = torch.tensor(metric.answer[texts.start : texts.stop], device=device)
    return PackedTargets(rows, answers, numbers)
