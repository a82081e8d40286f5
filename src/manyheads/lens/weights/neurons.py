"""A neuron of a feed-forward: the texts that move it, and the words it writes."""

import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from manyheads.errors import InputError
from manyheads.lens.inputs.batches import lead
from manyheads.lens.inputs.cached_run import StackName
from manyheads.lens.inputs.texts import Given, climb
from manyheads.lens.measure.statistics import ids_by_stack
from manyheads.lens.results.by_head import Tabular
from manyheads.lens.results.files import Facts
from manyheads.lens.weights.circuits import Vocabulary, vocabulary_of
from manyheads.lens.weights.ffn_key_values import Expert, Feeds, Neuron, feeds_of
from manyheads.models.build import Model
from manyheads.models.vision import Vision
from manyheads.parts.feedforward import FeedForward
from manyheads.ragged import Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

Order = Literal["largest", "smallest", "absolute"]


@dataclass(frozen=True, slots=True)
class Moment:
    """A token of a text, the value there, and the tokens around it; `text` reads them out.

    Of an image there is a position and no token.
    """

    number: int
    position: int
    value: float
    token: int | None = None
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    text: tuple[str, str, str] | None = None

    def told(self, before: str, token: str, after: str) -> "Moment":
        return replace(self, text=(before, token, after))

    def __str__(self) -> str:
        where = f"{self.value:+.3g} at {self.position} of text {self.number}"
        if self.text is not None:
            before, token, after = (part.replace("\n", "\\n") for part in self.text)
            return f"{where}: {before}[{token}]{after}"
        if self.token is None:
            return where
        before, after = (" ".join(map(str, side)) for side in (self.before, self.after))
        return f"{where}: {before} [{self.token}] {after}"


class Moved:
    """The `top_k` moments of one number per token, its mean, deviation and share above 0."""

    def __init__(self, top_k: int, order: Order, context: int) -> None:
        if context < 0:
            raise InputError(f"context={context} is before the token itself", "use 0 or more")
        self.moments: list[Moment] = []
        self._top_k, self._order, self._context = top_k, order, context
        self._count, self._sum, self._squares, self._above = 0, 0.0, 0.0, 0

    def take(self, values: Ragged, ids: Ragged | None, numbers: Sequence[int]) -> None:
        """The values of a batch of texts, with the numbers the texts have."""
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
        found = [
            self._moment(
                int(owner[place]), int(position[place]), float(column[place]), ids, numbers
            )
            for place in best.tolist()
        ]
        joined = [*self.moments, *found]
        order = self._rank(torch.tensor([each.value for each in joined], dtype=torch.float64))
        kept = order.argsort(descending=True, stable=True)[: self._top_k]
        self.moments = [joined[place] for place in kept.tolist()]

    def spread(self) -> tuple[float, float, float]:
        """Mean, standard deviation and share above 0 over all tokens."""
        count = max(1, self._count)
        mean = self._sum / count
        return mean, math.sqrt(max(0.0, self._squares / count - mean**2)), self._above / count

    def _rank(self, column: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        match self._order:
            case "largest":
                return column
            case "smallest":
                return -column
            case "absolute":
                return column.abs()

    def _moment(
        self,
        sequence: int,
        position: int,
        value: float,
        ids: Ragged | None,
        numbers: Sequence[int],
    ) -> Moment:
        if ids is None:
            return Moment(numbers[sequence], position, value)
        text = ids.of(sequence)
        before = text[max(0, position - self._context) : position].tolist()
        after = text[position + 1 : position + 1 + self._context].tolist()
        return Moment(
            numbers[sequence], position, value, int(text[position]), tuple(before), tuple(after)
        )


KIND = "neurons"


@dataclass(frozen=True, slots=True)
class ScoredWord:
    """A word with its score; `text` where the model has a tokenizer."""

    token: int
    score: float
    text: str | None = None

    def __str__(self) -> str:
        return str(self.token) if self.text is None else repr(self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NeuronMemory:
    """One neuron: when it speaks, what it says, and what it listens to.

    `moments` are the tokens that move it most, in their contexts. `raised` and `lowered` are the
    words whose scores its value vector raises and lowers most; `reads` those whose vectors lie
    nearest to its key. Its coefficient, which multiplies the value, has a `mean` and a `deviation`
    over all tokens, and is above 0 for a share `active` of them.
    """

    neuron: Neuron
    moments: tuple[Moment, ...]
    raised: tuple[ScoredWord, ...]
    lowered: tuple[ScoredWord, ...]
    reads: tuple[ScoredWord, ...]
    mean: float
    deviation: float
    active: float

    @property
    def agreement(self) -> float | None:
        """The share of moments whose next token is among the raised words; None without any.

        What Geva et al. (arXiv 2012.14913) find above chance in upper layers of language models.
        """
        after = [each.after[0] for each in self.moments if each.after]
        raised = {word.token for word in self.raised}
        return sum(token in raised for token in after) / len(after) if after and raised else None

    def __str__(self) -> str:
        lines = [
            f"{self.neuron}: coefficient {self.mean:.3g} ±{self.deviation:.2g}, above 0 for "
            f"{self.active:.0%} of tokens"
        ]
        for name, words in (
            ("writes", self.raised),
            ("against", self.lowered),
            ("reads", self.reads),
        ):
            if words:
                lines.append(f"  {name}: {', '.join(map(str, words))}")
        return "\n".join([*lines, *(f"  {each}" for each in self.moments)])


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class Neurons(Tabular):
    """Neurons that were looked at; `facts["through"]` says how values were put into words."""

    each: tuple[NeuronMemory, ...]
    facts: Facts = field(default_factory=dict)

    def of(self, neuron: Neuron | str) -> NeuronMemory:
        wanted = Neuron.parse(neuron) if isinstance(neuron, str) else neuron
        for memory in self.each:
            if memory.neuron == wanted:
                return memory
        raise InputError(f"{wanted} was not asked for", "name it in neurons(...)")

    def rows(self) -> list[dict[str, Any]]:
        """One record per neuron."""
        return [
            {
                "neuron": str(each.neuron),
                "mean": each.mean,
                "deviation": each.deviation,
                "active": each.active,
                "largest": each.moments[0].value if each.moments else None,
                "agreement": each.agreement,
                "writes": " ".join(map(str, each.raised)),
                "reads": " ".join(map(str, each.reads)),
            }
            for each in self.each
        ]

    def table(self) -> Any:
        """A rich table: each neuron, what moves it most, what it writes and reads."""
        from rich.table import Table

        names = ("neuron", "moved by", "writes", "reads")
        table = Table(*names, box=None, pad_edge=False, title=KIND, title_justify="left")
        for each in self.each:
            moved = str(each.moments[0]) if each.moments else "-"
            words = (" ".join(map(str, side[:5])) or "-" for side in (each.raised, each.reads))
            table.add_row(str(each.neuron), moved, *words)
        return table

    def __str__(self) -> str:
        return "\n".join(str(each) for each in self.each)

    __repr__ = __str__


def neurons(
    model: Model,
    texts: Any,
    which: Sequence[Neuron | str | tuple[int, int]],
    *,
    top_k: int = 10,
    by: Order = "largest",
    context: int = 8,
    words: int = 10,
    stack: StackName | None = None,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> Neurons:
    """For each named neuron the tokens that move it most, the words it writes, those it reads.

    A feed-forward is a memory of keys and values (Geva et al., arXiv 2012.14913): the coefficient
    of a neuron is act(key . x), for a gated one act(gate . x) times (passed . x), and it adds the
    coefficient times its value vector to the residual stream. The value's words are those it raises
    through the final norm and the unembedding (Geva et al., arXiv 2203.14680); without a language
    head through the embedding's own table. Neurons are named as "L3N120", (3, 120) or `Neuron`; of
    experts as "L3E2N5", of a shared one "L3SN5", whose coefficients count the router's weight.

    `by` says which coefficients are kept: the `top_k` "largest", "smallest" or largest "absolute".
    Images have moments and no words. Texts stream by; only what is kept stays.

    >>> from manyheads.models.build import build
    >>> model = build("gpt2", layers=1, width=32, heads=2, vocabulary=50, seed=0)
    >>> found = neurons(model, [[5, 6, 7], [8, 9]], ["L0N3"], top_k=2, words=3)
    >>> len(found.of("L0N3").moments), len(found.of("L0N3").raised)
    (2, 3)
    """
    for name, value in (("top_k", top_k), ("words", words)):
        if value < 1:
            raise InputError(f"{name} must be at least 1, got {value}", "use 1 or more")
    feeds = feeds_of(model, stack)
    chosen = feeds.find(which)
    found = {neuron: Moved(top_k, by, context) for neuron in chosen}

    def visit(given: Given, numbers: list[int]) -> None:
        ids = ids_by_stack(model, given).get(feeds.stack.name)
        watcher = _Coefficients(feeds, chosen)
        with torch.inference_mode():
            climb(model, given, watcher)
        for neuron, values in watcher.seen.items():
            found[neuron].take(values, ids, numbers)

    passed = lead(
        model, texts, visit, label="reading", batch_tokens=batch_tokens, progress=progress
    )
    vocabulary = None if isinstance(model, Vision) else vocabulary_of(model, stack)
    through = None if vocabulary is None else vocabulary.through
    said = _Words(vocabulary, None if isinstance(model, Vision) else model.tokenizer, words)
    return Neurons(
        tuple(_told(feeds, neuron, moved, said) for neuron, moved in found.items()),
        passed.facts | {"through": through, "by": by},
    )


class _Coefficients:
    """A watcher that keeps the coefficients of some neurons for one batch."""

    def __init__(self, feeds: Feeds, chosen: Sequence[Neuron]) -> None:
        self.seen: dict[Neuron, Ragged] = {}
        self._feeds = feeds
        self._wanted: dict[int, dict[Expert, list[Neuron]]] = defaultdict(lambda: defaultdict(list))
        for neuron in chosen:
            self._wanted[neuron.layer][neuron.expert].append(neuron)

    def wants(self, site: Site) -> bool:
        mine = site.stack == self._feeds.stack.name and site.sublayer is Sublayer.FEEDFORWARD
        return mine and site.layer in self._wanted and site.tap is self._tap(site.layer)

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        for expert, mine in self._wanted[site.layer].items():
            indices = [neuron.index for neuron in mine]
            if site.tap is Tap.INSIDE:
                columns = value.values[:, indices]
            else:
                columns = self._feeds.coefficients(site.layer, expert, indices, value.values)
            for neuron, column in zip(mine, columns.float().unbind(1), strict=True):
                self.seen[neuron] = value.with_values(column)

    def _tap(self, layer: int) -> Literal[Tap.INSIDE, Tap.BEFORE]:
        """Experts show nothing of what they compute: it is computed again from what they read."""
        plain = isinstance(self._feeds.module(layer), FeedForward)
        return Tap.INSIDE if plain else Tap.BEFORE


@dataclass(frozen=True, slots=True, eq=False)
class _Words:
    """How directions are put into words; there are none for images."""

    vocabulary: Vocabulary | None
    tokenizer: Any
    most: int

    def written(
        self, value: Float[Tensor, " c"]
    ) -> tuple[tuple[ScoredWord, ...], tuple[ScoredWord, ...]]:
        """The words that a value raises most, and lowers most."""
        if self.vocabulary is None or not bool(value.any()):
            return (), ()
        scores = self.vocabulary.said(value[None])[0]
        return self._best(scores), self._best(scores, largest=False)

    def read(self, key: Float[Tensor, " c"]) -> tuple[ScoredWord, ...]:
        if self.vocabulary is None or not bool(key.any()):
            return ()
        return self._best(self.vocabulary.read(key[None])[0])

    def _best(self, scores: Float[Tensor, " v"], *, largest: bool = True) -> tuple[ScoredWord, ...]:
        found = scores.topk(min(self.most, len(scores)), largest=largest)
        return tuple(
            ScoredWord(token, score, self._text(token))
            for token, score in zip(found.indices.tolist(), found.values.tolist(), strict=True)
        )

    def _text(self, token: int) -> str | None:
        if self.tokenizer is None:
            return None
        return str(self.tokenizer.decode([token], skip_special_tokens=False))


def _told(feeds: Feeds, neuron: Neuron, moved: Moved, words: _Words) -> NeuronMemory:
    with torch.no_grad():
        key = feeds.keys(neuron.layer, neuron.expert)[neuron.index]
        value = feeds.values(neuron.layer, neuron.expert)[neuron.index]
        raised, lowered = words.written(value)
        reads = words.read(key)
    mean, deviation, active = moved.spread()
    return NeuronMemory(
        neuron=neuron,
        moments=tuple(_read_out(moved.moments, words.tokenizer)),
        raised=raised,
        lowered=lowered,
        reads=reads,
        mean=mean,
        deviation=deviation,
        active=active,
    )


def _read_out(moments: Sequence[Moment], tokenizer: Any) -> Iterator[Moment]:
    """Moments with their tokens as text, where the model has a tokenizer."""
    for each in moments:
        if tokenizer is None or each.token is None:
            yield each
            continue
        parts = (
            tokenizer.decode(list(ids), skip_special_tokens=False) if ids else ""
            for ids in (each.before, (each.token,), each.after)
        )
        yield each.told(*parts)
