"""Linear probes: what can be read off a head, a layer or a pattern, and what the probe learned."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.encoding.text_reader import fill
from manyheads.errors import InputError, MissingExtraError
from manyheads.lens.inputs.batches import streaming_batch_tokens
from manyheads.lens.inputs.cached_run import Part, StackName, part_of
from manyheads.lens.inputs.metrics import weighed
from manyheads.lens.inputs.texts import climb
from manyheads.lens.measure.row_sums import Wanted, sum_rows
from manyheads.lens.measure.score_tiles import meet
from manyheads.lens.probing.items import Item, Items, find_items
from manyheads.lens.results.by_head import ByHead
from manyheads.lens.results.by_layer import ByLayer
from manyheads.models.build import Model
from manyheads.models.eval_mode import resting
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap

Source = Literal["heads", "residuals", "patterns"]
Pool = Literal["mean", "first", "last"]
# Of a layer, one row an item; heads stand side by side, each with as many channels.
Features = dict[int, Float[Tensor, "k h d"]]

# What a linear probe sees of a pattern: the weights on keys around the query.
OFFSETS = tuple(range(-8, 9))


@dataclass(frozen=True, slots=True, eq=False)
class _Pooling:
    """From the tokens of a batch to its items."""

    tokens: Int[Tensor, " m"]
    owners: Int[Tensor, " m"]
    counts: Float[Tensor, " k"]

    @classmethod
    def of(
        cls, lengths: Lengths, texts: Sequence[int], items: Sequence[Item], pool: Pool
    ) -> "_Pooling":
        start = dict(zip(texts, lengths.starts, strict=True))
        tokens, owners, counts = [], [], []
        for number, item in enumerate(items):
            every = {"mean": item.places, "first": item.places[:1], "last": item.places[-1:]}
            kept = every[pool]
            tokens += [start[item.text] + place for place in kept]
            owners += [number] * len(kept)
            counts.append(float(len(kept)))
        return cls(torch.tensor(tokens), torch.tensor(owners), torch.tensor(counts))

    def __call__(self, values: Float[Tensor, "n h d"]) -> Float[Tensor, "k h d"]:
        chosen = values[self.tokens.to(values.device)].float().cpu()
        summed = chosen.new_zeros(len(self.counts), *chosen.shape[1:])
        return summed.index_add(0, self.owners, chosen) / self.counts[:, None, None]


class _Keeping:
    """A watcher that keeps the items' share of what it sees, and lets the rest go."""

    def __init__(self, part: Part, source: Source, pool: Callable[[Lengths], _Pooling]) -> None:
        self.found: Features = {}
        self._part, self._source, self._pool = part, source, pool
        self._query: Ragged | None = None
        self._sites = _sites(part, source)

    def wants(self, site: Site) -> bool:
        return site in self._sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is asked for"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        values = value.values
        lengths = value.lengths
        if site.tap is Tap.KEY:
            assert self._query is not None
            values, lengths = self._looks(site, self._query, value), self._query.lengths
        elif values.dim() == 2:
            values = values.unsqueeze(1)
        self.found[self._sites[site]] = self._pool(lengths)(values)

    def _looks(self, site: Site, query: Ragged, key: Ragged) -> Float[Tensor, "n h d"]:
        """Weights around the query and on the first key, and the entropy of each row."""
        nothing = torch.zeros(key.lengths.total, 0, device=key.device)
        wanted = Wanted(offsets=OFFSETS, marks=nothing, ids=None)
        sums = sum_rows(meet(self._part.stack, site, query, key), wanted)
        more = torch.stack((sums.first, sums.entropy), dim=-1)
        return torch.cat((sums.offsets, more), dim=-1)


def gather_features(
    part: Part, items: Items, source: Source, pool: Pool, progress: bool
) -> Features:
    """One row an item in each layer; the embeddings stand at layer -1.

    Memory grows with the items, and not with the square of their texts.
    """
    by_text: dict[int, list[int]] = {}
    for number, item in enumerate(items.each):
        by_text.setdefault(item.text, []).append(number)
    order: list[int] = []
    parts: dict[int, list[Tensor]] = {}
    asked = sorted(by_text)
    sizes = items.given.sizes(part.model)
    with (
        Progress("reading", total=len(asked), unit="texts", enabled=progress) as bar,
        resting(part.model),
    ):
        for some in fill([sizes[text] for text in asked], streaming_batch_tokens(part.model)):
            texts = [asked[place] for place in some]
            numbers = [number for text in texts for number in by_text[text]]
            mine = [items.each[number] for number in numbers]

            def pooling(
                lengths: Lengths, texts: list[int] = texts, mine: list[Item] = mine
            ) -> _Pooling:
                return _Pooling.of(lengths, texts, mine, pool)

            keeping = _Keeping(part, source, pooling)
            with torch.inference_mode():
                climb(part.model, items.given.select(texts), keeping)
            for layer, values in keeping.found.items():
                parts.setdefault(layer, []).append(values)
            order += numbers
            bar.advance(len(texts))
    back = torch.tensor(order).argsort()
    return {layer: torch.cat(each)[back] for layer, each in parts.items()}


def residual_sites(part: Part) -> dict[Site, int]:
    """Where the residual stream is seen as it enters the first layer and as it leaves each."""
    found = {Site(-1, Tap.EMBEDDINGS, stack=part.stack_name): -1}
    for index, layer in enumerate(part.stack.config.layers):
        last = Sublayer.FEEDFORWARD
        if layer.feedforward is None:
            last = Sublayer.ATTENTION if layer.cross is None else Sublayer.CROSS
        found[Site(index, Tap.AFTER, last, part.stack_name)] = index
    return found


def _sites(part: Part, source: Source) -> dict[Site, int]:
    if source == "residuals":
        return residual_sites(part)
    taps = (Tap.HEAD_OUTPUT,) if source == "heads" else (Tap.QUERY, Tap.KEY)
    return {part.site(layer, tap): layer for layer in part.layers for tap in taps}


# How freely a probe may follow its examples: the inverse of its regularisation.
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
MOST_STEPS = 1000
FOLDS = 3


def probe(
    model: Model,
    texts: Any,
    labels: Sequence[Any],
    at: Source = "heads",
    *,
    pool: Pool = "mean",
    strength: int | float | Literal["chosen"] = 1.0,
    test: float = 0.25,
    stack: StackName | None = None,
    sublayer: Sublayer = Sublayer.ATTENTION,
    seed: int = 0,
    progress: bool = True,
) -> ByHead | ByLayer:
    """How well a linear classifier tells labels from what is inside, on texts it has not seen.

    `labels` are one a text, or a list a text with one a token; where texts are lists of words, one
    a word. None labels nothing. What is probed `at`:

    - "heads": each head's output, before the output projection; a result by head
    - "patterns": each head's weights on the keys around the query and on the first, and their
      entropy; a result by head
    - "residuals": the residual stream as it leaves each layer; a result by layer

    Words and texts of several tokens are pooled. Texts are split into those to learn from and the
    share `test`; "chosen" strengths are cross-validated among the former. "accuracy" has a standard
    error over texts; "majority" always says the commonest label. "control" is the accuracy on a
    task of equal shape that has nothing to it (arXiv 1909.03368): each type of token or word, or
    each text, has a label drawn at random. "selectivity" is accuracy less control: what the probe
    found rather than learned by heart.

    Needs scikit-learn: pip install 'manyheads[probes]'.
    """
    _sklearn("linear_model")
    if not 0 < test < 1:
        raise InputError(f"test={test} is no share of the texts", "use 0 < test < 1")
    if strength != "chosen" and strength <= 0:
        raise InputError(f"strength={strength} learns nothing", "use a positive number")
    if at not in ("heads", "residuals", "patterns"):
        raise InputError(f"nothing is called {at!r}", 'use "heads", "residuals" or "patterns"')
    part = part_of(model, stack, sublayer)
    items = find_items(part, texts, labels)
    split = _Split.of(items, test, seed)
    task = _Task.of(items, split, seed)
    features = gather_features(part, items, at, pool, progress)
    scores = _score_all(features, task, strength, progress)
    facts = {
        "at": at,
        "level": items.level,
        "classes": [str(name) for name in task.names],
        "items": len(items.each),
        "tested": int(split.tested.sum()),
        "texts": len(split.texts),
        "strength": strength,
    }
    if at == "residuals":
        layers = tuple(sorted(features))
        means, errors = _columns([scores[layer] for layer in layers])
        return ByLayer(
            kind=f"probe of {at}", layers=layers, means=means, errors=errors, facts=facts
        )
    blocks = tuple(block for block in part.blocks if block.layer in features)
    means, errors = _columns([scores[block.layer] for block in blocks])
    return ByHead(kind=f"probe of {at}", blocks=blocks, means=means, errors=errors, facts=facts)


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Which items are tested, and the text of each as a number from 0 on."""

    texts: tuple[int, ...]
    owners: Int[np.ndarray, " k"]
    tested: Bool[np.ndarray, " k"]
    folds: Int[np.ndarray, " k"]

    @classmethod
    def of(cls, items: Items, test: float, seed: int) -> "_Split":
        texts = tuple(sorted({item.text for item in items.each}))
        if len(texts) < 2:
            raise InputError(
                f"{len(texts)} texts have labels",
                "give two or more: one to learn from, one to test",
            )
        generator = np.random.default_rng(seed)
        order = generator.permutation(len(texts))
        count = min(len(texts) - 1, max(1, round(test * len(texts))))
        place = {text: number for number, text in enumerate(texts)}
        owners = np.array([place[item.text] for item in items.each])
        rank = np.empty(len(texts), dtype=np.int64)
        rank[order] = np.arange(len(texts))
        return cls(texts, owners, rank[owners] < count, rank[owners] % FOLDS)


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """Labels as numbers, those of the task and those of its control."""

    split: _Split
    names: tuple[Hashable, ...]
    labels: Int[np.ndarray, " k"]
    control: Int[np.ndarray, " k"]

    @classmethod
    def of(cls, items: Items, split: _Split, seed: int) -> "_Task":
        names = tuple(sorted({item.label for item in items.each}, key=str))
        number = {name: place for place, name in enumerate(names)}
        labels = np.array([number[item.label] for item in items.each])
        if len(np.unique(labels[~split.tested])) < 2:
            raise InputError(
                "the texts to learn from have one label alone", "give texts with two or more"
            )
        # A type draws its label as often as the labels are met.
        generator = np.random.default_rng([seed, 1])
        types: dict[Hashable, int] = {}
        for item in items.each:
            types.setdefault(item.type, int(labels[generator.integers(len(labels))]))
        control = np.array([types[item.type] for item in items.each])
        return cls(split, names, labels, control)

    @property
    def majority(self) -> Float[Tensor, " k"]:
        """Whether each tested item has the label that is commonest where one learns."""
        tested = self.split.tested
        most = Counter(self.labels[~tested].tolist()).most_common(1)[0][0]
        return torch.from_numpy((self.labels[tested] == most).astype(np.float64))

    def mean(self, hits: Float[Tensor, " k"]) -> tuple[float, float]:
        """Over the tested items, with an error over their texts."""
        owners = torch.from_numpy(self.split.owners[self.split.tested])
        counts = torch.bincount(owners).double()
        sums = torch.zeros_like(counts).index_add(0, owners, hits)
        mean, error = weighed(sums / counts.clamp(min=1), counts)
        return float(mean), float(error)


Score = dict[str, tuple[float, float]]


def _score_all(
    features: Features, task: _Task, strength: int | float | Literal["chosen"], progress: bool
) -> dict[int, list[Score]]:
    majority = task.mean(task.majority)
    total = sum(values.shape[1] for values in features.values())
    found: dict[int, list[Score]] = {}
    with Progress("probing", total=total, unit="probes", enabled=progress) as bar:
        for layer, values in sorted(features.items()):
            found[layer] = []
            for one in values.unbind(1):
                found[layer].append(_score(one.double().numpy(), task, strength, majority))
                bar.advance()
    return found


def _score(
    values: Float[np.ndarray, "k d"],
    task: _Task,
    strength: int | float | Literal["chosen"],
    majority: tuple[float, float],
) -> Score:
    right, control = (
        _hits(values, each, task.split, strength) for each in (task.labels, task.control)
    )
    return {
        "accuracy": task.mean(right),
        "majority": majority,
        "control": task.mean(control),
        "selectivity": task.mean(right - control),
    }


def _hits(
    values: Float[np.ndarray, "k d"],
    labels: Int[np.ndarray, " k"],
    split: _Split,
    strength: int | float | Literal["chosen"],
) -> Float[Tensor, " tested"]:
    learned, tested = ~split.tested, split.tested
    if strength == "chosen":
        strength = _choose(values[learned], labels[learned], split.folds[learned])
    said = _learn(values[learned], labels[learned], values[tested], strength)
    return torch.from_numpy((said == labels[tested]).astype(np.float64))


def _choose(
    values: Float[np.ndarray, "k d"], labels: Int[np.ndarray, " k"], folds: Int[np.ndarray, " k"]
) -> float:
    """The strength that does best on texts left out in turn; of equals the weakest."""
    hits = dict.fromkeys(STRENGTHS, 0)
    for fold in np.unique(folds):
        out = folds == fold
        if out.all():
            return 1.0
        for strength in STRENGTHS:
            said = _learn(values[~out], labels[~out], values[out], strength)
            hits[strength] += int((said == labels[out]).sum())
    return max(STRENGTHS, key=lambda each: (hits[each], -each))


def _learn(
    values: Float[np.ndarray, "k d"],
    labels: Int[np.ndarray, " k"],
    asked: Float[np.ndarray, "m d"],
    strength: float,
) -> Int[np.ndarray, " m"]:
    """What a logistic regression says that learned from examples, channels of equal spread."""
    if len(np.unique(labels)) < 2:
        return np.full(len(asked), labels[0])
    scale = _sklearn("preprocessing").StandardScaler().fit(values)
    learner = _sklearn("linear_model").LogisticRegression(C=strength, max_iter=MOST_STEPS)
    with warnings.catch_warnings():
        # A probe that follows its examples without end is stopped, and judged by what it says.
        warnings.simplefilter("ignore", _sklearn("exceptions").ConvergenceWarning)
        learner.fit(scale.transform(values), labels)
    said: Any = learner.predict(scale.transform(asked))
    return said


def _columns(
    scores: Sequence[Sequence[Score]],
) -> tuple[dict[str, Any], dict[str, Any]]:
    flat = [score for each in scores for score in each]
    means = {name: np.array([score[name][0] for score in flat]) for name in flat[0]}
    errors = {name: np.array([score[name][1] for score in flat]) for name in flat[0]}
    return means, errors


def _sklearn(name: str) -> Any:
    try:
        return import_module(f"sklearn.{name}")
    except ImportError:
        raise MissingExtraError(
            "probes need the package scikit-learn", "pip install 'manyheads[probes]'"
        ) from None
