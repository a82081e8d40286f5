"""How well a model answers: one number per text, read off the last hidden states."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypeAlias

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from manyheads.encoding.pooling import pool
from manyheads.errors import InputError
from manyheads.lens.inputs.texts import Asked, Given, Targets, ask, check_asked, run
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.models.provenance import Pooling
from manyheads.models.readout import ClassHead, ReadoutLayer, pooled
from manyheads.models.vision import Vision
from manyheads.ragged import Lengths, Ragged

# Scores of all words held at once: 256 MB in float32.
ROOM = 2**26


@dataclass(frozen=True, slots=True, kw_only=True)
class LogitDifference:
    """logit(answer) - logit(distractor), one pair of tokens (or classes) a text.

    `at` is the position whose answer counts, one a text; classes of whole texts have none.
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
                f"{len(self.answer)} answers and {len(self.distractor)} distractors make no pairs",
                "give one of each a text",
            )


@dataclass(frozen=True, slots=True)
class Measure:
    """A metric of one's own: from logits and the numbers of their texts to one value per text."""

    function: Callable[[Ragged | Tensor, Sequence[int]], Float[Tensor, " b"]]
    better: Literal["lower", "higher"] = "higher"


@dataclass(frozen=True, slots=True, kw_only=True)
class Similarity:
    """The cosine of a text's vector with the one that the whole model gives; it needs no readout.

    "own" pools tokens as the model's folder says, and means where it says nothing.
    """

    pooling: Pooling | Literal["own"] = "own"


Metric: TypeAlias = (
    Literal["loss"]
    | LogitDifference
    | Similarity
    | Measure
    | Callable[[Ragged | Tensor, Sequence[int]], Float[Tensor, " b"]]
)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class Judge:
    """A metric of some texts of one model; it is shown copies of them side by side.

    `weights` are the numbers of answers that went into a text's value: a text that was asked
    nothing has the value and the weight 0.
    """

    model: Model
    texts: range
    lengths: Lengths
    asked: Asked | None
    metric: LogitDifference | Measure | Similarity | Literal["loss"]
    weights: Float[Tensor, " b"]
    vectors: Float[Tensor, "b c"] | None = None

    def __call__(self, hidden: Ragged, copies: int = 1) -> Float[Tensor, "copies b"]:
        """The value of each text in each copy, in float32 or better."""
        if isinstance(self.metric, Measure):
            return self._measured(self.metric, hidden, copies)
        if isinstance(self.metric, Similarity):
            mine = _pooled(self.model, self.metric, hidden).unflatten(0, (copies, -1))
            assert self.vectors is not None, "judge() has asked the whole model"
            return (mine * self.vectors).sum(-1)
        rows, asked = self._rows(hidden, copies), self.asked
        assert asked is not None, "every metric but one's own asks at places"
        if self.metric == "loss":
            losses = self._losses(rows, asked.answers.repeat(copies)).unflatten(0, (copies, -1))
            summed = losses.new_zeros(copies, len(self.texts)).index_add(1, asked.owners, losses)
            return summed / self.weights.clamp(min=1).to(losses.dtype)
        return self._differences(rows, self.metric).unflatten(0, (copies, -1))

    def _readout(self) -> ReadoutLayer:
        assert self.model.readout is not None, "judge() has seen that there is one"
        return self.model.readout

    def _table(self) -> Float[Tensor, "v c"] | None:
        return None if isinstance(self.model, Vision) else self.model.table

    def _rows(self, hidden: Ragged, copies: int) -> Float[Tensor, "km c"]:
        """The hidden states that are asked, copy by copy, as they meet the vectors of the words."""
        assert self.asked is not None
        config, x = self._readout().config, hidden.values
        if isinstance(config, ClassHead):
            x = pooled(x, hidden.lengths, config.pool)
        x = x.unflatten(0, (copies, -1))[:, self.asked.places]
        return self._readout().features(x.flatten(0, 1))

    def _losses(
        self, rows: Float[Tensor, "m c"], answers: Int[Tensor, " m"]
    ) -> Float[Tensor, " m"]:
        vectors, bias = self._readout().vectors(self._table()), self._readout().bias
        at_once = max(1, ROOM // vectors.shape[0])
        pieces = zip(rows.split(at_once), answers.split(at_once), strict=True)
        entropy = partial(_cross_entropy, vectors, bias)
        if torch.is_grad_enabled() and rows.requires_grad:
            # The scores are made again on the way back, so that they are never held all at once.
            found = [checkpoint(entropy, *piece, use_reentrant=False) for piece in pieces]
        else:
            found = [entropy(*piece) for piece in pieces]
        return torch.cat(found)

    def _differences(
        self, rows: Float[Tensor, "kb c"], metric: LogitDifference
    ) -> Float[Tensor, " kb"]:
        chosen = slice(self.texts.start, self.texts.stop)
        answer, distractor = (
            torch.tensor(each[chosen], device=rows.device)
            for each in (metric.answer, metric.distractor)
        )
        vectors, bias = self._readout().vectors(self._table()), self._readout().bias
        copies = rows.shape[0] // len(self.texts)
        # A difference of two near numbers is taken before their digits are spent.
        towards = (vectors[answer] - vectors[distractor]).repeat(copies, 1)
        found = (rows.float() * towards.float()).sum(-1)
        return found if bias is None else found + (bias[answer] - bias[distractor]).repeat(copies)

    def _measured(self, metric: Measure, hidden: Ragged, copies: int) -> Float[Tensor, "copies b"]:
        found = []
        for values in hidden.values.unflatten(0, (copies, -1)):
            logits = self._readout()(Ragged(values, self.lengths), self._table())
            one = metric.function(logits, self.texts)
            if not isinstance(one, Tensor) or one.shape != (len(self.texts),):
                got = tuple(one.shape) if isinstance(one, Tensor) else type(one).__name__
                raise InputError(
                    f"the metric answers {got} to {len(self.texts)} texts", "give one value a text"
                )
            found.append(one)
        return torch.stack(found)


def judge(
    model: Model, given: Given, texts: range, metric: Metric, targets: Targets | None = None
) -> Judge:
    """The metric of the texts of these numbers, of which `given` holds all."""
    known = _known(metric)
    if model.readout is None and not isinstance(known, Similarity):
        raise InputError(
            f"this {type(model).__name__} has no readout and answers nothing",
            "use one with a language or class head, or metric=Similarity()",
        )
    mine = given.select(texts)
    lengths = mine.lengths(model)
    asked, vectors = None, None
    if isinstance(known, Similarity):
        with resting(model), torch.no_grad():
            hidden = run(model, mine).hidden
        assert isinstance(hidden, Ragged), "ragged in, ragged out"
        vectors = _pooled(model, known, hidden)
    if known == "loss":
        chosen = None if targets is None else targets[texts.start : texts.stop]
        asked = ask(model, mine, chosen)
        check_asked(given, targets)
    elif isinstance(known, LogitDifference):
        asked = _ask_pairs(model, given, lengths, texts, known)
    weights = torch.ones(len(texts), device=lengths.offsets.device)
    if known == "loss":
        assert asked is not None
        weights = torch.bincount(asked.owners, minlength=len(texts)).float()
    return Judge(
        model=model,
        texts=texts,
        lengths=lengths,
        asked=asked,
        metric=known,
        weights=weights,
        vectors=vectors,
    )


def better(metric: Metric) -> Literal["lower", "higher"]:
    """Which way the metric goes when a model gets better."""
    known = _known(metric)
    if isinstance(known, Measure):
        return known.better
    return "lower" if known == "loss" else "higher"


def named(metric: Metric) -> str:
    """What a metric is called where a result is read."""
    known = _known(metric)
    if isinstance(known, Measure):
        return str(getattr(known.function, "__name__", "measure"))
    if isinstance(known, Similarity):
        return "similarity"
    return "loss" if known == "loss" else "logit difference"


def weighed(
    values: Float[Tensor, "b *rest"], weights: Float[Tensor, " b"]
) -> tuple[Float[Tensor, "*rest"], Float[Tensor, "*rest"]]:
    """The weighted mean over texts and its standard error, texts being drawn one by one.

    With equal weights the error is the usual one; of a single text it is not known, and NaN.

    >>> mean, error = weighed(torch.tensor([1.0, 2.0, 3.0]), torch.ones(3))
    >>> float(mean), round(float(error), 4)
    (2.0, 0.5774)
    """
    values = values.double()
    shares = (weights.double() / weights.double().sum()).view(-1, *[1] * (values.dim() - 1))
    mean = (shares * values).sum(0)
    count = int((weights > 0).sum())
    if count < 2:
        return mean, torch.full_like(mean, torch.nan)
    spread = (shares * (values - mean)).square().sum(0)
    return mean, (spread * (count / (count - 1))).sqrt()


def _known(metric: Metric) -> LogitDifference | Measure | Similarity | Literal["loss"]:
    if isinstance(metric, LogitDifference | Measure | Similarity):
        return metric
    if isinstance(metric, str):
        if metric != "loss":
            raise InputError(
                f"metric={metric!r} is not known",
                'use "loss", LogitDifference(...), Similarity(), Measure(...) or a function',
            )
        return "loss"
    return Measure(metric)


def _pooled(model: Model, metric: Similarity, hidden: Ragged) -> Float[Tensor, "b c"]:
    own = model.sentence.pooling if model.sentence is not None else "mean"
    return pool(hidden, own if metric.pooling == "own" else metric.pooling, normalise=True)


def _cross_entropy(
    vectors: Float[Tensor, "v c"],
    bias: Float[Tensor, " v"] | None,
    rows: Float[Tensor, "m c"],
    answers: Int[Tensor, " m"],
) -> Float[Tensor, " m"]:
    logits = F.linear(rows, vectors, bias).float()
    # Half the memory traffic of a softmax that nobody reads.
    right = logits.gather(1, answers.unsqueeze(1)).squeeze(1)
    return logits.logsumexp(1) - right


def _ask_pairs(
    model: Model, given: Given, lengths: Lengths, texts: range, metric: LogitDifference
) -> Asked:
    """Where the difference of two logits is read: once a text."""
    if len(metric.answer) != len(given):
        raise InputError(
            f"{len(metric.answer)} pairs of answers were given for {len(given)} texts",
            "give one pair a text",
        )
    device = lengths.offsets.device
    owners = torch.arange(len(texts), device=device)
    if isinstance(model.config.readout, ClassHead):
        places = owners
    elif metric.at == "last":
        places = lengths.offsets[1:].long() - 1
    else:
        at = metric.at[texts.start : texts.stop]
        for text, position, length in zip(texts, at, lengths.each, strict=True):
            if not 0 <= position < length:
                raise InputError(
                    f"text {text} has no position {position}", f"use 0 to {length - 1}"
                )
        places = lengths.offsets[:-1].long() + torch.tensor(at, device=device)
    answers = torch.tensor(metric.answer[texts.start : texts.stop], device=device)
    return Asked(places, answers, owners)
