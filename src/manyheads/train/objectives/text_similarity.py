"""What retrieval objectives share: texts and candidates as vectors, and the scores between them.

With `cache_tokens` the vectors are computed a few texts at a time, and again in the backward pass
(GradCache, arXiv 2101.06983): memory grows with the vectors and not with the activations, and the
gradients are those of the whole batch.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
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
from manyheads.train.objectives import late_interaction, objective

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
        ids = Ragged(self.ids.values[start:end], Lengths.of(self.ids.lengths.each[first:last]))
        kept = self.kept
        if kept is not None:
            kept = kept[(kept >= start) & (kept < end)] - start
        return TextPart(ids, self.attended[first:last], kept)


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class PreparedCandidates(objective.PreparedBatch):
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

    def _map(self, function: Callable[[Tensor], Tensor]) -> "PreparedCandidates":
        texts, candidates = self.lengths
        return replace(
            self,
            positions=function(self.positions),
            labels=function(self.labels),
            parts=tuple(part.map(function) for part in self.parts),
            lengths=(map_lengths(texts, function), map_lengths(candidates, function)),
            text_numbers=function(self.text_numbers),
            candidate_numbers=function(self.candidate_numbers),
            groups=function(self.groups),
            teacher=None if self.teacher is None else function(self.teacher),
        )


Temperature = Annotated[float, Above(0, "use a value such as 0.05")]


@dataclass(frozen=True, slots=True, kw_only=True)
class TextSimilarity(objective.RoutedObjective):
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
        objective.check_kind(self, model, encoder.TextModel)
        assert isinstance(model, encoder.TextModel)
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
        read = partial(token_vectors.role_batch, model, device=torch.device("cpu"))
        query = read([ids.numpy() for ids in texts.to_list()], "query")
        document = read([ids.numpy() for ids in candidates.to_list()], "document")
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
            if self.is_late(model):
                both = vectors.split([lengths.positions.shape[0] for lengths in prepared.lengths])
                scores = late_scores.maxsim_with_gradients(*map(Ragged, both, prepared.lengths))
                default = MAXSIM_TEMPERATURE
            else:
                scores = vectors[: prepared.count] @ vectors[prepared.count :].T
                default = COSINE_TEMPERATURE
            return scores / (default if self.temperature == "default" else self.temperature), added

    def is_late(self, model: Any) -> bool:
        """Whether all token vectors are compared."""
        if self.similarity == "model":
            return model.late is not None
        return self.similarity == "maxsim"

    def _vectors(
        self, model: Any, parts: Sequence[TextPart], watch: Watcher | None
    ) -> tuple[Float[Tensor, "n c"], tuple[AddedLoss, ...]]:
        """A vector per text, or per token, and the losses of routers and of halting."""

        def encode(part: TextPart) -> tuple[Tensor, tuple[AddedLoss, ...]]:
            # The tokens that expand queries are hidden from the others.
            hides = part.attended != part.ids.lengths.each
            hiding = token_vectors.HiddenKeys(part.attended) if hides else None
            hidden, added = model.hidden(part.ids, watch=objective.chain_watchers(hiding, watch))
            with torch.autocast(hidden.device.type, enabled=False):
                if not self.is_late(model):
                    sentence = self.sentence_of(model)
                    pooling = "first" if sentence.pooling == "cls" else sentence.pooling
                    pooled = readout.pooled(hidden.values.float(), hidden.lengths, pooling)
                    return F.normalize(sentence.project(pooled), dim=-1), added
                states = hidden.values if part.kept is None else hidden.values[part.kept]
                return late_interaction.project_tokens(model, states.float()), added

        if len(parts) == 1 or not torch.is_grad_enabled():
            encoded = [encode(part) for part in parts]
        else:
            encoded = [checkpoint(encode, part, use_reentrant=False) for part in parts]
        vectors, added = zip(*encoded, strict=True)
        return torch.cat(vectors), mean_losses(added, [len(part.ids.values) for part in parts])

    def sentence_of(self, model: Any) -> provenance.SentenceConfig:
        """How the model's sentence vectors are made, with the pooling of this objective."""
        sentence: provenance.SentenceConfig = model.sentence or provenance.SentenceConfig()
        return sentence if self.pooling == "model" else replace(sentence, pooling=self.pooling)


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

    def mean(losses: Sequence[Any], name: str) -> Tensor:
        values = [share * getattr(loss, name) for share, loss in zip(shares, losses, strict=True)]
        return torch.stack(values).sum()

    def mean_of_layer(losses: Sequence[Any]) -> AddedLoss:
        if isinstance(losses[0], RouterLosses):
            return replace(losses[0], balance=mean(losses, "balance"), z=mean(losses, "z"))
        return PonderLoss(mean(losses, "ponder"), torch.cat([loss.steps for loss in losses]))

    return tuple(map(mean_of_layer, zip(*parts, strict=True)))
