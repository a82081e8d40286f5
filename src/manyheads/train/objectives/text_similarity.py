"""What retrieval objectives share: texts and candidates as vectors, and the scores between them.

With `cache_tokens` the vectors are computed a few texts at a time, and again in the backward pass
(GradCache, arXiv 2101.06983): memory grows with the vectors and not with the activations, and the
gradients are those of the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from manyheads.annotations import Above, NonNegativeInt
from manyheads.data.batch import Batch, map_lengths, map_ragged
from manyheads.encoding import late_scores, token_vectors
from manyheads.errors import ConfigError, InputError
from manyheads.models import encoder, provenance, readout
from manyheads.parts.experts import RouterLosses
from manyheads.parts.halting import AddedLoss, PonderLoss
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Watcher
from manyheads.train.objectives import late_interaction
from manyheads.train.objectives.objective import (
    PreparedBatch,
    RoutedObjective,
    unsuitable_model,
)

COSINE_TEMPERATURE, MAXSIM_TEMPERATURE = 0.05, 1.0


@dataclass(frozen=True, slots=True, eq=False)
class TextPart:
    """Texts that are encoded together.

    Of each no token attends to those beyond the first `attended`, and with late interaction the
    tokens at `kept` get a vector, or all.
    """

    ids: Ragged
    attended: tuple[int, ...]
    kept: Int[Tensor, " k"] | None

    def map(self, function: Callable[[Tensor], Tensor]) -> "TextPart":
        kept = None if self.kept is None else function(self.kept)
        return TextPart(map_ragged(self.ids, function), self.attended, kept)

    def split(self, most: int) -> "Iterator[TextPart]":
        """Parts of at most `most` tokens, or of one text; 0 is no limit."""
        start = end = first = 0
        for index, length in enumerate(self.ids.lengths.each):
            if index > first and most and end - start + length > most:
                yield self._slice(first, index, start, end)
                first, start = index, end
            end += length
        yield self._slice(first, len(self.ids), start, end)

    def _slice(self, first: int, last: int, start: int, end: int) -> "TextPart":
        lengths = Lengths.of(self.ids.lengths.each[first:last])
        kept = self.kept
        if kept is not None:
            kept = kept[(kept >= start) & (kept < end)] - start
        return TextPart(
            Ragged(self.ids.values[start:end], lengths), self.attended[first:last], kept
        )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedCandidates(PreparedBatch):
    """Texts, then their candidates, cut into `parts` that the model reads one after another.

    The candidates are the `count` second texts, in the order of the texts, then all negatives.
    `lengths` are the numbers of vectors of texts and of candidates with late interaction.
    `text_numbers` are equal for texts with the same tokens, and so are `candidate_numbers`.
    `groups` are the candidates of each text, its own first, then its negatives, and -1 where it has
    fewer than others; `teacher` are their scores.
    """

    parts: tuple[TextPart, ...]
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
            parts=tuple(part.map(function) for part in self.parts),
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


Temperature = Annotated[float, Above(0, "use a value such as 0.05")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSimilarity(RoutedObjective):
    """An objective on the scores between texts and candidates.

    A score is the cosine of two vectors, or MaxSim between the vectors of all tokens (late
    interaction); `similarity="model"` is MaxSim if the model has late interaction. It is divided by
    `temperature`, by default 0.05 for cosines and 1 for MaxSim. `pooling="model"` is the pooling of
    the model's folder, or the mean. At most `cache_tokens` tokens are encoded at a time; 0 is all
    of the micro-batch. A model that gets late interaction by training has token vectors of
    `token_width` numbers; 0 keeps those of the model.
    """

    temperature: Temperature | Literal["default"] = "default"
    similarity: Literal["model", "cosine", "maxsim"] = "model"
    pooling: provenance.Pooling | Literal["model"] = "model"
    cache_tokens: NonNegativeInt = 0
    token_width: NonNegativeInt = 128

    def attach(self, model: nn.Module) -> None:
        if isinstance(model, encoder.TextModel) and self.is_late(model):
            late_interaction.attach_projection(model, self.token_width)

    def check(self, model: nn.Module) -> None:
        if not isinstance(model, encoder.TextModel):
            raise unsuitable_model(self, model, "a text encoder or decoder")
        expansion = model.late.expansion if model.late and self.is_late(model) else None
        mixes = any(layer.mixer is not None for layer in model.config.stack.layers)
        if expansion is not None and not expansion.attend and mixes:
            raise ConfigError(
                "the tokens that expand a query cannot be hidden in a model with mixers",
                "use an expansion with attend=True, or none",
            )

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
        candidates = batch.others
        if batch.negatives is not None and negatives:
            candidates = Ragged.concatenate([batch.others, batch.negatives])
        whole, lengths = self._reading(model, batch.texts, candidates)
        groups = _groups(counts)
        positions = torch.arange(count if len(candidates) > 1 else 0)
        return PreparedCandidates(
            batch=Batch(),
            positions=positions,
            labels=positions,
            parts=tuple(whole.split(self.cache_tokens)),
            lengths=lengths,
            count=count,
            text_numbers=_first_equal(batch.texts),
            candidate_numbers=_first_equal(candidates),
            groups=groups,
            teacher=_teacher_scores(batch.scores, groups),
        )

    def _reading(
        self, model: Any, texts: Ragged, candidates: Ragged
    ) -> tuple[TextPart, tuple[Lengths, Lengths]]:
        """What the model reads, and how many vectors each text and candidate gets."""
        if not self.is_late(model):
            ids = Ragged.concatenate([texts, candidates])
            return TextPart(ids, ids.lengths.each, None), (texts.lengths, candidates.lengths)
        home = torch.device("cpu")
        query = token_vectors.role_batch(
            model, [ids.numpy() for ids in texts.to_list()], "query", home
        )
        documents = [ids.numpy() for ids in candidates.to_list()]
        document = token_vectors.role_batch(model, documents, "document", home)
        kept = torch.cat((query.kept, document.kept))
        part = TextPart(
            Ragged.concatenate([query.ids, document.ids]),
            query.attended + document.attended,
            None if bool(kept.all()) else kept.nonzero().squeeze(1),
        )
        return part, (query.kept_lengths, document.kept_lengths)

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
            both = vectors.split([lengths.positions.shape[0] for lengths in prepared.lengths])
            scores = late_scores.maxsim_with_gradients(*map(Ragged, both, prepared.lengths))
            return scores / self._temperature(MAXSIM_TEMPERATURE), added

    def is_late(self, model: Any) -> bool:
        """Whether all token vectors are compared."""
        if self.similarity == "model":
            return model.late is not None
        return self.similarity == "maxsim"

    def _temperature(self, default: float) -> float:
        return default if self.temperature == "default" else self.temperature

    def _vectors(
        self, model: Any, parts: Sequence[TextPart], watch: Watcher | None
    ) -> tuple[Float[Tensor, "n c"], tuple[AddedLoss, ...]]:
        """A vector per text, or per token, and the losses of routers and of halting."""

        def encode(part: TextPart) -> tuple[Tensor, tuple[AddedLoss, ...]]:
            hidden, added = model.hidden(part.ids, watch=_with_hidden_keys(part, watch))
            with torch.autocast(hidden.device.type, enabled=False):
                if not self.is_late(model):
                    return F.normalize(self._pooled(model, hidden), dim=-1), added
                states = hidden.values if part.kept is None else hidden.values[part.kept]
                return late_interaction.project_tokens(model, states.float()), added

        if len(parts) == 1 or not torch.is_grad_enabled():
            encoded = [encode(part) for part in parts]
        else:
            encoded = [checkpoint(encode, part, use_reentrant=False) for part in parts]
        tokens = [part.ids.values.shape[0] for part in parts]
        return torch.cat([vectors for vectors, _ in encoded]), mean_losses(
            [added for _, added in encoded], tokens
        )

    def _pooled(self, model: Any, hidden: Ragged) -> Float[Tensor, "b c"]:
        sentence = model.sentence or provenance.SentenceConfig()
        pooling = sentence.pooling if self.pooling == "model" else self.pooling
        vectors = readout.pooled(
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


def _with_hidden_keys(part: TextPart, watch: Watcher | None) -> Watcher | None:
    """A watcher that also hides the tokens that expand queries from the others."""
    if part.attended == part.ids.lengths.each:
        return watch
    # Regularizers import objectives.
    from manyheads.train.regularizers import WatcherChain

    hides = token_vectors.HiddenKeys(part.attended)
    return hides if watch is None else WatcherChain([hides, watch])


def _first_equal(texts: Ragged) -> Int[Tensor, " d"]:
    """For each text the number of the first one with the same tokens."""
    values, numbers = texts.values.numpy(), dict[bytes, int]()
    contents = (values[span].tobytes() for span in texts.lengths.slices())
    return torch.tensor(
        [numbers.setdefault(content, number) for number, content in enumerate(contents)]
    )


def _groups(counts: Sequence[int]) -> Int[Tensor, "q k"]:
    """
    >>> _groups([2, 0, 1])
    tensor([[ 0,  3,  4],
            [ 1, -1, -1],
            [ 2,  5, -1]])
    """
    limits = torch.tensor(counts).unsqueeze(1)
    starts = len(counts) + limits.cumsum(0) - limits
    columns = torch.arange(max(counts))
    negatives = torch.where(columns < limits, starts + columns, -1)
    return torch.cat((torch.arange(len(counts)).unsqueeze(1), negatives), dim=1)


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
    return tuple(_mean_loss(layer, shares) for layer in zip(*parts, strict=True))


def _mean_loss(losses: Sequence[AddedLoss], shares: Sequence[float]) -> AddedLoss:
    def mean(values: Iterator[Tensor]) -> Tensor:
        return torch.stack([s * value for s, value in zip(shares, values, strict=True)]).sum()

    routed = [loss for loss in losses if isinstance(loss, RouterLosses)]
    if routed:
        return replace(
            routed[0], balance=mean(loss.balance for loss in routed), z=mean(e.z for e in routed)
        )
    halted = [loss for loss in losses if isinstance(loss, PonderLoss)]
    return PonderLoss(
        mean(loss.ponder for loss in halted), torch.cat([loss.steps for loss in halted])
    )
