"""Neurons of a feed-forward: the tokens that activate them, and the tokens they write."""

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.errors import InputError
from manyheads.formatting import percent, plain_table
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.inputs.texts import Inputs, for_each_batch
from manyheads.lens.measure.statistics import ids_by_stack
from manyheads.lens.results import files, tables
from manyheads.lens.weights.circuits import VocabularyProjection, vocabulary_projection
from manyheads.lens.weights.ffn_key_values import Expert, FeedForwards, Neuron, feed_forwards_of
from manyheads.models import build, model_interface, vision
from manyheads.parts.feedforward import FeedForward
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

Order = Literal["largest", "smallest", "absolute"]


@dataclass(frozen=True, slots=True)
class TopActivation:
    """A neuron's value at one token of a text, with the tokens around it; `text` is decoded.

    An image has a position and no token.
    """

    number: int
    position: int
    value: float
    token: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    text: tuple[str, str, str] | None = None

    def __str__(self) -> str:
        where = f"{self.value:+.3g} at {self.position} of text {self.number}"
        if self.text is not None:
            before, token, after = (part.replace("\n", "\\n") for part in self.text)
            return f"{where}: {before}[{token}]{after}"
        if self.token is None:
            return where
        before, after = (" ".join(map(str, side)) for side in (self.before, self.after))
        return f"{where}: {before} [{self.token}] {after}"


class ActivationTracker:
    """The `top_k` activations of one neuron, its mean, deviation and fraction above 0."""

    def __init__(self, top_k: int, order: Order, context: int) -> None:
        if context < 0:
            raise InputError(f"context must be at least 0, got {context}", "use 0 or more")
        self.top_activations: list[TopActivation] = []
        self._top_k, self._order, self._context = top_k, order, context
        self._count, self._sum, self._squares, self._above = 0, 0.0, 0.0, 0

    def update(self, values: Ragged, ids: Ragged | None, numbers: Sequence[int]) -> None:
        """Add the values of a batch of texts with these numbers."""
        column: Float[Tensor, " n"] = values.values
        if not len(column):
            return
        doubled = column.double()
        self._count += len(column)
        self._sum += float(doubled.sum())
        self._squares += float(doubled.square().sum())
        self._above += int((column > 0).sum())
        best = self._rank(column).topk(min(self._top_k, len(column))).indices
        owner, position = values.lengths.sequence_of_token, values.lengths.positions
        joined = list(self.top_activations)
        for index in best.tolist():
            sequence, place = int(owner[index]), int(position[index])
            activation = TopActivation(numbers[sequence], place, float(column[index]))
            if ids is not None:
                text = ids.of(sequence)
                before = tuple(text[max(0, place - self._context) : place].tolist())
                after = tuple(text[place + 1 : place + 1 + self._context].tolist())
                token = int(text[place])
                activation = replace(activation, token=token, before=before, after=after)
            joined.append(activation)
        joined_values = torch.tensor([top.value for top in joined], dtype=torch.float64)
        order = self._rank(joined_values).argsort(descending=True, stable=True)
        self.top_activations = [joined[index] for index in order[: self._top_k].tolist()]

    def spread(self) -> tuple[float, float, float]:
        """Mean, standard deviation and fraction above 0 over all tokens."""
        count = max(1, self._count)
        mean = self._sum / count
        return mean, math.sqrt(max(0.0, self._squares / count - mean**2)), self._above / count

    def _rank(self, column: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        if self._order == "absolute":
            return column.abs()
        return column if self._order == "largest" else -column


KIND = "neurons"


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token with its score; `text` if the model has a tokenizer."""

    token: int
    score: float
    text: str | None = None

    def __str__(self) -> str:
        return str(self.token) if self.text is None else repr(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronSummary:
    """When a neuron is active, what it writes, and what it reads.

    `top_activations` are the tokens that activate it most, with their contexts. `raised` and
    `lowered` are the tokens whose logits its value raises and lowers most; `reads` those whose
    embeddings are nearest to its key. Its coefficient, which multiplies the value, has a `mean` and
    a `deviation` over all tokens, and is above 0 for a fraction `active` of them.
    """

    neuron: Neuron
    top_activations: tuple[TopActivation, ...]
    raised: tuple[ScoredToken, ...]
    lowered: tuple[ScoredToken, ...]
    reads: tuple[ScoredToken, ...]
    mean: float
    deviation: float
    active: float

    @property
    def agreement(self) -> float | None:
        """The fraction of top activations whose next token is among the raised ones.

        Geva et al. (arXiv 2012.14913) find it above chance in upper layers of language models.
        """
        after = [activation.after[0] for activation in self.top_activations if activation.after]
        raised = {word.token for word in self.raised}
        return sum(token in raised for token in after) / len(after) if after and raised else None

    def __str__(self) -> str:
        lines = [
            f"{self.neuron}: coefficient {self.mean:.3g} ±{self.deviation:.2g}, above 0 for "
            f"{percent(self.active)} of tokens"
        ]
        tokens = {"raises": self.raised, "lowers": self.lowered, "reads": self.reads}
        lines += [f"  {name}: {', '.join(map(str, own))}" for name, own in tokens.items() if own]
        return "\n".join([*lines, *(f"  {activation}" for activation in self.top_activations)])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Neurons(tables.Tabular):
    """Several neurons; `metadata["through"]` names the projection of their values."""

    each: tuple[NeuronSummary, ...]
    metadata: files.Metadata = field(default_factory=dict)

    def of(self, neuron: Neuron | str) -> NeuronSummary:
        address = Neuron.parse(neuron) if isinstance(neuron, str) else neuron
        for memory in self.each:
            if memory.neuron == address:
                return memory
        raise InputError(f"{address} is not in this result", "name it in neurons(...)")

    def rows(self) -> list[dict[str, Any]]:
        """One record per neuron."""
        return [
            {
                "neuron": str(summary.neuron),
                "mean": summary.mean,
                "deviation": summary.deviation,
                "active": summary.active,
                "largest": summary.top_activations[0].value if summary.top_activations else None,
                "agreement": summary.agreement,
                "writes": " ".join(map(str, summary.raised)),
                "reads": " ".join(map(str, summary.reads)),
            }
            for summary in self.each
        ]

    def table(self) -> Any:
        """A rich table: the top activation of each neuron, what it writes and reads."""
        rows = []
        for summary in self.each:
            best = str(summary.top_activations[0]) if summary.top_activations else "-"
            sides = (summary.raised, summary.reads)
            words = (" ".join(map(str, side[:5])) or "-" for side in sides)
            rows.append([str(summary.neuron), best, *words])
        return plain_table(["neuron", "top activation", "writes", "reads"], [], rows, title=KIND)

    def __str__(self) -> str:
        return "\n".join(str(summary) for summary in self.each)

    __repr__ = __str__


@wrapping_models
def neurons(
    model: build.Model,
    texts: Inputs,
    which: Sequence[Neuron | str | tuple[int, int]],
    *,
    top_k: int = 10,
    by: Order = "largest",
    context: int = 8,
    top_tokens: int = 10,
    stack: StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Neurons:
    """The tokens that activate each named neuron most, the tokens it writes, and those it reads.

    A feed-forward is a key-value memory (Geva et al., arXiv 2012.14913): the coefficient of a
    neuron is act(key . x), for a gated one act(gate . x) times (up . x), and it adds the
    coefficient times its value vector to the residual stream. It writes the `top_tokens` that the
    value raises through the final norm and the unembedding (Geva et al., arXiv 2203.14680; without
    a language head through the embedding). Neurons are named as "L3N120", (3, 120) or `Neuron`,
    those of experts as "L3E2N5", of a shared expert as "L3SN5"; coefficients of experts include the
    router's weight.

    `by` selects the `top_k` "largest", "smallest" or largest "absolute" coefficients. Images have
    activations and no tokens. Texts are streamed; only the top activations stay in memory.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> result = neurons(model, [[5, 6, 7], [8, 9]], ["L0N3"], top_k=2, top_tokens=3)
    >>> len(result.of("L0N3").top_activations), len(result.of("L0N3").raised)
    (2, 3)
    """
    for name, value in (("top_k", top_k), ("top_tokens", top_tokens)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}", "use 1 or more")
    feed_forwards = feed_forwards_of(model, stack)
    chosen = feed_forwards.find(which)
    trackers = {neuron: ActivationTracker(top_k, by, context) for neuron in chosen}

    def visit(inputs: model_interface.ModelInputs, numbers: list[int]) -> None:
        ids = ids_by_stack(model, inputs).get(feed_forwards.stack.name)
        watcher = _Coefficients(feed_forwards, chosen)
        with torch.inference_mode():
            model.run_hidden(inputs, watcher)
        for neuron, values in watcher.seen.items():
            trackers[neuron].update(values, ids, numbers)

    passed = for_each_batch(
        model, texts, visit, label="reading", batch_tokens=batch_tokens, progress=progress
    )
    vocabulary = tokenizer = None
    if not isinstance(model, vision.Vision):
        vocabulary, tokenizer = vocabulary_projection(model, stack), model.tokenizer
    reader = _TokenReader(vocabulary, tokenizer, top_tokens)
    summaries = [_summarize(feed_forwards, *pair, reader) for pair in trackers.items()]
    through = None if vocabulary is None else vocabulary.through
    return Neurons(tuple(summaries), passed.metadata | {"through": through, "by": by})


class _Coefficients:
    """A watcher that records the coefficients of some neurons for one batch."""

    def __init__(self, feed_forwards: FeedForwards, chosen: Sequence[Neuron]) -> None:
        self.seen: dict[Neuron, Ragged] = {}
        self._feed_forwards = feed_forwards
        self._wanted: dict[int, dict[Expert, list[Neuron]]] = defaultdict(lambda: defaultdict(list))
        for neuron in chosen:
            self._wanted[neuron.layer][neuron.expert].append(neuron)

    def wants(self, site: Site) -> bool:
        in_stack = site.stack == self._feed_forwards.stack.name
        in_layer = site.sublayer is Sublayer.FEEDFORWARD and site.layer in self._wanted
        if not in_stack or not in_layer:
            return False
        # Experts have no inner tap: their coefficients are recomputed from their inputs.
        plain = isinstance(self._feed_forwards.module(site.layer), FeedForward)
        return site.tap is (Tap.INSIDE if plain else Tap.BEFORE)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is requested"
        for expert, mine in self._wanted[site.layer].items():
            indices = [neuron.index for neuron in mine]
            if site.tap is Tap.INSIDE:
                columns = value.values[:, indices]
            else:
                columns = self._feed_forwards.coefficients(
                    site.layer, expert, indices, value.values
                )
            for neuron, column in zip(mine, columns.float().unbind(1), strict=True):
                self.seen[neuron] = value.with_values(column)


@dataclass(frozen=True, slots=True, eq=False)
class _TokenReader:
    """The tokens that a neuron writes and reads; none for images."""

    vocabulary: VocabularyProjection | None
    tokenizer: Any
    top_k: int

    def written(
        self, value: Float[Tensor, " c"]
    ) -> tuple[tuple[ScoredToken, ...], tuple[ScoredToken, ...]]:
        """The tokens whose logits a value raises most, and lowers most."""
        if self.vocabulary is None or not bool(value.any()):
            return (), ()
        scores = self.vocabulary.write_scores(value[None])[0]
        return self._best(scores), self._best(scores, largest=False)

    def read(self, key: Float[Tensor, " c"]) -> tuple[ScoredToken, ...]:
        if self.vocabulary is None or not bool(key.any()):
            return ()
        return self._best(self.vocabulary.read_scores(key[None])[0])

    def _best(
        self, scores: Float[Tensor, " v"], *, largest: bool = True
    ) -> tuple[ScoredToken, ...]:
        best = scores.topk(min(self.top_k, len(scores)), largest=largest)
        return tuple(
            ScoredToken(token, score, None if self.tokenizer is None else self._decode([token]))
            for token, score in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        )

    def with_text(self, activation: TopActivation) -> TopActivation:
        """The activation with its tokens as text, if the model has a tokenizer."""
        if self.tokenizer is None or activation.token is None:
            return activation
        parts = activation.before, (activation.token,), activation.after
        before, token, after = (self._decode(ids) if ids else "" for ids in parts)
        return replace(activation, text=(before, token, after))

    def _decode(self, ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(list(ids), skip_special_tokens=False))


def _summarize(
    feed_forwards: FeedForwards, neuron: Neuron, tracker: ActivationTracker, reader: _TokenReader
) -> NeuronSummary:
    with torch.no_grad():
        key = feed_forwards.keys(neuron.layer, neuron.expert)[neuron.index]
        value = feed_forwards.values(neuron.layer, neuron.expert)[neuron.index]
        raised, lowered = reader.written(value)
        reads = reader.read(key)
    mean, deviation, active = tracker.spread()
    return NeuronSummary(
        neuron=neuron,
        top_activations=tuple(map(reader.with_text, tracker.top_activations)),
        raised=raised,
        lowered=lowered,
        reads=reads,
        mean=mean,
        deviation=deviation,
        active=active,
    )
