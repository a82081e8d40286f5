"""What retrieval objectives share: texts and candidates as vectors, and the scores between them.

With `cache_tokens` the vectors are computed a few texts at a time, and again in the backward pass
(GradCache, arXiv 2101.06983): memory grows with the vectors and not with the activations, and the
gradients are those of the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.data.batch import Batch, map_lengths, map_ragged
from manyheads.errors import ConfigError, InputError
from manyheads.models.encoder import TextModel
from manyheads.models.provenance import Pooling, SentenceConfig
from manyheads.models.readout import pooled
from manyheads.parts.experts import RouterLosses
from manyheads.parts.halting import AddedLoss, PonderLoss
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives.late_interaction import maxsim_scores
from manyheads.train.objectives.objective import (
    PreparedBatch,
    RoutedObjective,
    unsuitable_model,
)

COSINE_TEMPERATURE, MAXSIM_TEMPERATURE = 0.05, 1.0


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedCandidates(PreparedBatch):
    """Texts, then their candidates, cut into `parts` that the model reads one after another.

    The candidates are the `count` second texts, in the order of the texts, then all negatives.
    `lengths` are those of texts and of candidates.
    `text_numbers` are equal for texts with the same tokens, and so are `candidate_numbers`.
    `groups` are the candidates of each text, its own first, then its negatives, and -1 where it has
    fewer than others; `teacher` are their scores.
    """

    parts: tuple[Ragged, ...]
    lengths: tuple[Lengths, Lengths]
    count: int
    text_numbers: Int[Tensor, " q"]
    candidate_numbers: Int[Tensor, " d"]
    groups: Int[Tensor, "q k"]
    teacher: Float[Tensor, "q k"] | None = None

    def to(self, device: torch.device | str) -> "PreparedCandidates":
        return self._map(lambda tensor: tensor.to(device, non_blocking=True))

    def pin_memory(self) -> "PreparedCandidates":
        return self._map(Tensor.pin_memory)

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PreparedCandidates":
        return replace(
            self,
            parts=tuple(map_ragged(part, function) for part in self.parts),
            lengths=(
                map_lengths(self.lengths[0], function),
                map_lengths(self.lengths[1], function),
            ),
            positions=function(self.positions),
            labels=function(self.labels),
            text_numbers=function(self.text_numbers),
            candidate_numbers=function(self.candidate_numbers),
            groups=function(self.groups),
            teacher=None if self.teacher is None else function(self.teacher),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSimilarity(RoutedObjective):
    """An objective on the scores between texts and candidates.

    A score is the cosine of two vectors, or MaxSim between the vectors of all tokens (late
    interaction); `similarity="model"` is MaxSim if the model has late interaction. It is divided by
    `temperature`, by default 0.05 for cosines and 1 for MaxSim. `pooling="model"` is the pooling of
    the model's folder, or the mean. At most `cache_tokens` tokens are encoded at a time; 0 is all
    of the micro-batch.
    """

    temperature: float | Literal["default"] = "default"
    similarity: Literal["model", "cosine", "maxsim"] = "model"
    pooling: Pooling | Literal["model"] = "model"
    cache_tokens: int = 0

    def __post_init__(self) -> None:
        if self.temperature != "default" and not self.temperature > 0:
            raise ConfigError(
                f"temperature must be above 0, got {self.temperature:g}", "use a value such as 0.05"
            )
        if self.cache_tokens < 0:
            raise ConfigError(
                f"cache_tokens must be at least 0, got {self.cache_tokens}",
                "use 0 to encode a micro-batch at once",
            )

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, TextModel):
            raise unsuitable_model(self, model, "a text encoder or decoder")

    def prepare(self, model: Any, batch: Batch, generator: torch.Generator) -> PreparedCandidates:
        del generator
        name = type(self).__name__
        if batch.texts is None or batch.others is None or len(batch.texts) != len(batch.others):
            raise InputError(f"{name} needs pairs of texts", "give as many others as texts")
        count = len(batch.texts)
        counts = batch.negative_counts or (0,) * count
        negatives = 0 if batch.negatives is None else len(batch.negatives)
        if len(counts) != count or sum(counts) != negatives:
            raise InputError(
                f"{name} got {negatives} negatives, and {count} texts with counts {counts}",
                "give one count per text, which sum to the number of negatives",
            )
        del model
        candidates = batch.others
        if batch.negatives is not None and negatives:
            candidates = Ragged.concatenate([batch.others, batch.negatives])
        groups = _groups(counts)
        positions = torch.arange(count if len(candidates) > 1 else 0)
        return PreparedCandidates(
            batch=Batch(),
            positions=positions,
            labels=positions,
            parts=tuple(_parts([batch.texts, candidates], self.cache_tokens)),
            lengths=(batch.texts.lengths, candidates.lengths),
            count=count,
            text_numbers=_first_equal(batch.texts),
            candidate_numbers=_first_equal(candidates),
            groups=groups,
            teacher=_teacher_scores(batch.scores, groups),
        )

    def scores(
        self, model: Any, prepared: PreparedCandidates, watch: Watcher | None
    ) -> tuple[Float[Tensor, "q d"], tuple[AddedLoss, ...]]:
        """The score of every text with every candidate."""
        vectors, added = self._vectors(model, prepared.parts, watch)
        # Scores of half precision would be too coarse once they are divided by the temperature.
        with torch.autocast(vectors.device.type, enabled=False):
            if not self.is_late(model):
                texts, candidates = vectors[: prepared.count], vectors[prepared.count :]
                return texts @ candidates.T / self._temperature(COSINE_TEMPERATURE), added
            both = vectors.split([each.positions.shape[0] for each in prepared.lengths])
            scores = maxsim_scores(*map(Ragged, both, prepared.lengths))
            return scores / self._temperature(MAXSIM_TEMPERATURE), added

    def is_late(self, model: Any) -> bool:
        """Whether all token vectors are compared."""
        if self.similarity == "model":
            return getattr(model, "late", None) is not None
        return self.similarity == "maxsim"

    def _temperature(self, default: float) -> float:
        return default if self.temperature == "default" else self.temperature

    def _vectors(
        self, model: Any, parts: Sequence[Ragged], watch: Watcher | None
    ) -> tuple[Float[Tensor, "n c"], tuple[AddedLoss, ...]]:
        """A vector per text, or per token, and the losses of routers and of halting."""

        def encode(part: Ragged) -> tuple[Tensor, tuple[AddedLoss, ...]]:
            hidden, added = model.hidden(part, watch=watch)
            late = self.is_late(model)
            vectors = hidden.values.float() if late else self._pooled(model, hidden)
            return F.normalize(vectors, dim=-1), added

        if len(parts) == 1 or not torch.is_grad_enabled():
            read = [encode(part) for part in parts]
        else:
            read = [checkpoint(encode, part, use_reentrant=False) for part in parts]
        tokens = [part.values.shape[0] for part in parts]
        return torch.cat([vectors for vectors, _ in read]), mean_losses(
            [added for _, added in read], tokens
        )

    def _pooled(self, model: Any, hidden: Ragged) -> Float[Tensor, "b c"]:
        sentence = model.sentence or SentenceConfig()
        pooling = sentence.pooling if self.pooling == "model" else self.pooling
        vectors = pooled(
            hidden.values.float(), hidden.lengths, "first" if pooling == "cls" else pooling
        )
        return sentence.project(vectors)


def require_candidates(objective: TextSimilarity, batch: Batch) -> None:
    """Raise if a batch has nothing to compare."""
    if batch.texts is not None and len(batch.texts) == 1 and not batch.negatives:
        raise InputError(
            f"{type(objective).__name__} got one pair without negatives, and nothing to compare",
            "give two pairs or more, or negatives",
        )


def _parts(texts: Sequence[Ragged], most: int) -> Iterator[Ragged]:
    """All texts, in parts of at most `most` tokens, or of one text; 0 is no limit."""
    values = torch.cat([each.values for each in texts])
    start = end = 0
    lengths: list[int] = []
    for length in (length for each in texts for length in each.lengths.each):
        if lengths and most and end - start + length > most:
            yield Ragged(values[start:end], Lengths.of(lengths))
            start, lengths = end, []
        lengths.append(length)
        end += length
    yield Ragged(values[start:], Lengths.of(lengths))


def _first_equal(texts: Ragged) -> Int[Tensor, " d"]:
    """For each text the number of the first one with the same tokens."""
    values, known = texts.values.numpy(), dict[bytes, int]()
    each = (values[span].tobytes() for span in texts.lengths.slices())
    return torch.tensor([known.setdefault(one, number) for number, one in enumerate(each)])


def _groups(counts: Sequence[int]) -> Int[Tensor, "q k"]:
    """
    >>> _groups([2, 0, 1])
    tensor([[ 0,  3,  4],
            [ 1, -1, -1],
            [ 2,  5, -1]])
    """
    groups = torch.full((len(counts), 1 + max(counts)), -1)
    start = len(counts)
    for text, count in enumerate(counts):
        groups[text, 0] = text
        groups[text, 1 : count + 1] = torch.arange(start, start + count)
        start += count
    return groups


def _teacher_scores(
    scores: Float[Tensor, " s"] | None, groups: Int[Tensor, "q k"]
) -> Float[Tensor, "q k"] | None:
    if scores is None:
        return None
    real = groups >= 0
    if scores.shape != (int(real.sum()),) or not bool(scores.isfinite().all()):
        raise InputError(
            f"there are {scores.numel()} scores for {int(real.sum())} candidates, "
            f"{int(scores.isfinite().sum())} of them finite",
            "give one finite score per candidate: of the second text, then of its negatives",
        )
    return torch.zeros(groups.shape).masked_scatter(real, scores.float())


def mean_losses(
    parts: Sequence[tuple[AddedLoss, ...]], tokens: Sequence[int]
) -> tuple[AddedLoss, ...]:
    """The added losses of a batch that was read in parts: the mean over their tokens."""
    if len(parts) == 1:
        return parts[0]
    shares = [count / sum(tokens) for count in tokens]
    return tuple(_mean_loss(each, shares) for each in zip(*parts, strict=True))


def _mean_loss(losses: Sequence[AddedLoss], shares: Sequence[float]) -> AddedLoss:
    def mean(values: Iterator[Tensor]) -> Tensor:
        return torch.stack([s * value for s, value in zip(shares, values, strict=True)]).sum()

    routed = [each for each in losses if isinstance(each, RouterLosses)]
    if routed:
        return replace(
            routed[0], balance=mean(each.balance for each in routed), z=mean(e.z for e in routed)
        )
    halted = [each for each in losses if isinstance(each, PonderLoss)]
    return PonderLoss(
        mean(each.ponder for each in halted), torch.cat([each.steps for each in halted])
    )
