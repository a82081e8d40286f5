"""Linear probes: which labels a linear classifier predicts from heads, layers or patterns."""

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

from manyheads.encoding.text_reader import batch_by_length, require_text_model, resolve_max_length
from manyheads.errors import InputError, MissingPackageError
from manyheads.lens.inputs.annotated import AnnotatedText, align_words
from manyheads.lens.inputs.cached_run import HeadScope, StackName, head_scope
from manyheads.lens.inputs.metrics import weighted_mean
from manyheads.lens.inputs.texts import default_batch_tokens, read_inputs
from manyheads.lens.measure.row_sums import RowSumSpec, sum_rows
from manyheads.lens.measure.score_tiles import tiled_scores
from manyheads.lens.results.tables import ByHead, ByLayer
from manyheads.models.build import Model, eval_mode
from manyheads.models.model_interface import ModelInputs
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from manyheads.taps import Patterns, Site, Sublayer, Tap
from manyheads.tokenizers import plain_copy, surrogates_refused

Level = Literal["token", "word", "text"]


@dataclass(frozen=True, slots=True)
class Item:
    """A labeled token, word or text: its text, the positions of its tokens, and its type.

    Tokens with the same id have one type, and so do words with the same letters.
    """

    text: int
    positions: tuple[int, ...]
    type: Hashable
    label: Hashable


@dataclass(frozen=True, slots=True, eq=False)
class Items:
    """All labeled items, and their texts."""

    inputs: ModelInputs
    level: Level
    each: tuple[Item, ...]


def find_items(scope: HeadScope, texts: Any, labels: Sequence[Any]) -> Items:
    """Labels per text, per token, or per word if texts are lists of words; None skips an item."""
    labels = [each.tolist() if hasattr(each, "tolist") else each for each in labels]
    if _are_words(texts) and not scope.model.reads_pairs:
        return _words(scope.model, texts, labels)
    inputs = read_inputs(scope.model, texts)
    if len(labels) != len(inputs):
        raise InputError(f"got {len(labels)} labels for {len(inputs)} texts", "give one per text")
    if all(each is None or isinstance(each, str | int) for each in labels):
        return Items(inputs, "text", _texts(scope, inputs, labels))
    return Items(inputs, "token", _tokens(scope, inputs, labels))


def split_words(
    model: Model, sentences: Sequence[Sequence[str]]
) -> tuple[ModelInputs, list[tuple[tuple[int, ...], ...]]]:
    """Sentences as token ids, and for each the token positions of its words.

    Words are joined with spaces. A word without a token of its own has no positions.
    """
    reader = require_text_model(model)
    if reader.tokenizer is None:
        raise InputError(
            "this model has no tokenizer to read words with", "set model.tokenizer, or give ids"
        )
    longest = resolve_max_length(reader, None)
    tokenizer = plain_copy(reader.tokenizer)
    rows, positions = [], []
    for number, words in enumerate(sentences):
        written = AnnotatedText.from_words(words, ())
        with surrogates_refused([written.text], first=number):
            encoded = tokenizer.encode(written.text)
        if longest is not None and len(encoded.ids) > longest:
            raise InputError(
                f"sentence {number} has {len(encoded.ids)} tokens, more than {longest}",
                "leave it out or split it",
            )
        rows.append(encoded.ids)
        positions.append(align_words(encoded, written.text, written.words))
    return read_inputs(model, rows), positions


def _are_words(texts: Any) -> bool:
    if (
        isinstance(texts, str | Ragged | ModelInputs)
        or not isinstance(texts, Sequence)
        or not texts
    ):
        return False
    first = texts[0]
    return isinstance(first, list | tuple) and bool(first) and isinstance(first[0], str)


def _words(model: Model, texts: Sequence[Sequence[str]], labels: Sequence[Any]) -> Items:
    inputs, positions = split_words(model, texts)
    found = []
    if len(labels) != len(texts):
        raise InputError(f"got {len(labels)} labels for {len(texts)} texts", "give one per text")
    for text, (words, mine) in enumerate(zip(texts, labels, strict=True)):
        _check_count(text, "words", len(words), mine)
        for word, where, label in zip(words, positions[text], mine, strict=True):
            if where and label is not None:
                found.append(Item(text, where, word, label))
    return Items(inputs, "word", tuple(found))


def _tokens(scope: HeadScope, inputs: ModelInputs, labels: Sequence[Any]) -> tuple[Item, ...]:
    found = []
    for text, (length, mine) in enumerate(zip(_lengths(scope, inputs), labels, strict=True)):
        _check_count(text, "tokens", length, mine)
        ids = _ids(scope, inputs, text)
        for place, label in enumerate(mine):
            if label is not None:
                kind = (text, place) if ids is None else ids[place]
                found.append(Item(text, (place,), kind, label))
    return tuple(found)


def _texts(scope: HeadScope, inputs: ModelInputs, labels: Sequence[Any]) -> tuple[Item, ...]:
    found = []
    for text, (length, label) in enumerate(zip(_lengths(scope, inputs), labels, strict=True)):
        if label is not None:
            ids = _ids(scope, inputs, text)
            kind = text if ids is None else tuple(ids)
            found.append(Item(text, tuple(range(length)), kind, label))
    return tuple(found)


def _check_count(text: int, what: str, count: int, labels: Any) -> None:
    if isinstance(labels, str | int) or labels is None or len(labels) != count:
        got = 1 if isinstance(labels, str | int) or labels is None else len(labels)
        raise InputError(
            f"text {text} has {count} {what} and {got} labels",
            "give one label each, None to skip",
        )


def _lengths(scope: HeadScope, inputs: ModelInputs) -> tuple[int, ...]:
    if scope.stack_name == "encoder" and inputs.source is not None:
        return inputs.source.lengths.each
    return inputs.lengths(scope.model).each


def _ids(scope: HeadScope, inputs: ModelInputs, text: int) -> list[int] | None:
    ids = inputs.source if scope.stack_name == "encoder" else inputs.ids
    return None if ids is None else ids.of(text).tolist()


Source = Literal["heads", "residuals", "patterns"]
Pool = Literal["mean", "first", "last"]
# Per layer, one row per item and head.
Features = dict[int, Float[Tensor, "k h d"]]

# The offsets of the keys whose weights are features of a pattern.
OFFSETS = tuple(range(-8, 9))


@dataclass(frozen=True, slots=True, eq=False)
class _Pooling:
    """Pools the tokens of a batch into its items."""

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
            every = {
                "mean": item.positions,
                "first": item.positions[:1],
                "last": item.positions[-1:],
            }
            kept = every[pool]
            tokens += [start[item.text] + place for place in kept]
            owners += [number] * len(kept)
            counts.append(float(len(kept)))
        return cls(torch.tensor(tokens), torch.tensor(owners), torch.tensor(counts))

    def __call__(self, values: Float[Tensor, "n h d"]) -> Float[Tensor, "k h d"]:
        chosen = values[self.tokens.to(values.device)].float().cpu()
        summed = chosen.new_zeros(len(self.counts), *chosen.shape[1:])
        return summed.index_add(0, self.owners, chosen) / self.counts[:, None, None]


class _FeatureWatcher:
    """A watcher that records the pooled features of the items only."""

    def __init__(
        self, scope: HeadScope, source: Source, pool: Callable[[Lengths], _Pooling]
    ) -> None:
        self.found: Features = {}
        self._part, self._source, self._pool = scope, source, pool
        self._query: Ragged | None = None
        self._sites = _sites(scope, source)

    def wants(self, site: Site) -> bool:
        return site in self._sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is requested"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        values = value.values
        lengths = value.lengths
        if site.tap is Tap.KEY:
            assert self._query is not None
            values, lengths = self._pattern_features(site, self._query, value), self._query.lengths
        elif values.dim() == 2:
            values = values.unsqueeze(1)
        self.found[self._sites[site]] = self._pool(lengths)(values)

    def _pattern_features(self, site: Site, query: Ragged, key: Ragged) -> Float[Tensor, "n h d"]:
        """Weights around the query and on the first key, and the entropy of the row."""
        nothing = torch.zeros(key.lengths.total, 0, device=key.device)
        wanted = RowSumSpec(offsets=OFFSETS, marks=nothing, ids=None)
        sums = sum_rows(tiled_scores(self._part.stack, site, query, key), wanted)
        more = torch.stack((sums.first, sums.entropy), dim=-1)
        return torch.cat((sums.offsets, more), dim=-1)


def gather_features(
    scope: HeadScope, items: Items, source: Source, pool: Pool, progress: bool
) -> Features:
    """One row per item in each layer; the embeddings are layer -1.

    Memory grows with the number of items, not with the square of the text length.
    """
    by_text: dict[int, list[int]] = {}
    for number, item in enumerate(items.each):
        by_text.setdefault(item.text, []).append(number)
    order: list[int] = []
    parts: dict[int, list[Tensor]] = {}
    labeled = sorted(by_text)
    sizes = items.inputs.sizes(scope.model)
    with (
        Progress("reading", total=len(labeled), unit="texts", enabled=progress) as bar,
        eval_mode(scope.model),
    ):
        for some in batch_by_length(
            [sizes[text] for text in labeled], default_batch_tokens(scope.model)
        ):
            texts = [labeled[index] for index in some]
            numbers = [number for text in texts for number in by_text[text]]
            mine = [items.each[number] for number in numbers]

            def pooling(
                lengths: Lengths, texts: list[int] = texts, mine: list[Item] = mine
            ) -> _Pooling:
                return _Pooling.of(lengths, texts, mine, pool)

            watcher = _FeatureWatcher(scope, source, pooling)
            with torch.inference_mode():
                scope.model.run_hidden(items.inputs.select(texts), watcher)
            for layer, values in watcher.found.items():
                parts.setdefault(layer, []).append(values)
            order += numbers
            bar.advance(len(texts))
    back = torch.tensor(order).argsort()
    return {layer: torch.cat(each)[back] for layer, each in parts.items()}


def residual_sites(scope: HeadScope) -> dict[Site, int]:
    """The sites of the residual stream before the first layer and after each."""
    found = {Site(-1, Tap.EMBEDDINGS, stack=scope.stack_name): -1}
    for index, layer in enumerate(scope.stack.config.layers):
        last = Sublayer.FEEDFORWARD
        if layer.feedforward is None:
            last = Sublayer.ATTENTION if layer.cross is None else Sublayer.CROSS
        found[Site(index, Tap.AFTER, last, scope.stack_name)] = index
    return found


def _sites(scope: HeadScope, source: Source) -> dict[Site, int]:
    if source == "residuals":
        return residual_sites(scope)
    taps = (Tap.HEAD_OUTPUT,) if source == "heads" else (Tap.QUERY, Tap.KEY)
    return {scope.site(layer, tap): layer for layer in scope.layers for tap in taps}


# Candidates for the inverse of the regularization.
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
MAX_STEPS = 1000
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
    """How well a linear classifier predicts labels from activations, on held-out texts.

    `labels` has one label per text, or a list per text with one label per token, or per word if
    texts are lists of words; None skips an item. `at` is what is probed:

    - "heads": each head's output, before the output projection; a result by head
    - "patterns": each head's weights on the keys around the query and on the first, and their
      entropy; a result by head
    - "residuals": the residual stream as it leaves each layer; a result by layer

    Words and texts of several tokens are pooled. A fraction `test` of the texts is held out;
    strength="chosen" is cross-validated on the rest. "accuracy" has a standard error over texts;
    "majority" is that of the most frequent label. "control" is the accuracy on a control task
    (arXiv 1909.03368): each type of token or word, or each text, has a random label. "selectivity"
    is accuracy minus control: what the probe finds rather than memorizes.

    Needs the package scikit-learn.
    """
    _sklearn("linear_model")
    if not 0 < test < 1:
        raise InputError(f"test must be in (0, 1), got {test}", "use 0 < test < 1")
    if strength != "chosen" and strength <= 0:
        raise InputError(f"strength must be positive, got {strength}", "use more than 0")
    if at not in ("heads", "residuals", "patterns"):
        raise InputError(f"at must be heads, residuals or patterns, got {at!r}", "use one of them")
    scope = head_scope(model, stack, sublayer)
    items = find_items(scope, texts, labels)
    split = _Split.of(items, test, seed)
    task = _Task.of(items, split, seed)
    features = gather_features(scope, items, at, pool, progress)
    scores = _score_all(features, task, strength, progress)
    metadata = {
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
            kind=f"probe of {at}", layers=layers, means=means, errors=errors, metadata=metadata
        )
    blocks = tuple(block for block in scope.blocks if block.layer in features)
    means, errors = _columns([scores[block.layer] for block in blocks])
    return ByHead(
        kind=f"probe of {at}", blocks=blocks, means=means, errors=errors, metadata=metadata
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Split:
    """Which items are held out, and the index of the text of each."""

    texts: tuple[int, ...]
    owners: Int[np.ndarray, " k"]
    tested: Bool[np.ndarray, " k"]
    folds: Int[np.ndarray, " k"]

    @classmethod
    def of(cls, items: Items, test: float, seed: int) -> "_Split":
        texts = tuple(sorted({item.text for item in items.each}))
        if len(texts) < 2:
            raise InputError(
                f"a probe needs at least 2 texts with labels, got {len(texts)}",
                "give one or more to train on and one or more to test on",
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
    """The labels of the task and of its control, as integers."""

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
                "the training texts have only one label", "give texts with two or more labels"
            )
        # Control labels have the distribution of the true ones.
        generator = np.random.default_rng([seed, 1])
        types: dict[Hashable, int] = {}
        for item in items.each:
            types.setdefault(item.type, int(labels[generator.integers(len(labels))]))
        control = np.array([types[item.type] for item in items.each])
        return cls(split, names, labels, control)

    @property
    def majority(self) -> Float[Tensor, " k"]:
        """Whether each held-out item has the most frequent training label."""
        tested = self.split.tested
        majority = Counter(self.labels[~tested].tolist()).most_common(1)[0][0]
        return torch.from_numpy((self.labels[tested] == majority).astype(np.float64))

    def mean(self, hits: Float[Tensor, " k"]) -> tuple[float, float]:
        """The mean over the held-out items, with a standard error over their texts."""
        owners = torch.from_numpy(self.split.owners[self.split.tested])
        counts = torch.bincount(owners).double()
        sums = torch.zeros_like(counts).index_add(0, owners, hits)
        mean, error = weighted_mean(sums / counts.clamp(min=1), counts)
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
    hits, control = (
        _hits(values, each, task.split, strength) for each in (task.labels, task.control)
    )
    return {
        "accuracy": task.mean(hits),
        "majority": majority,
        "control": task.mean(control),
        "selectivity": task.mean(hits - control),
    }


def _hits(
    values: Float[np.ndarray, "k d"],
    labels: Int[np.ndarray, " k"],
    split: _Split,
    strength: int | float | Literal["chosen"],
) -> Float[Tensor, " tested"]:
    trained, tested = ~split.tested, split.tested
    if strength == "chosen":
        strength = _choose(values[trained], labels[trained], split.folds[trained])
    predicted = _fit_predict(values[trained], labels[trained], values[tested], strength)
    return torch.from_numpy((predicted == labels[tested]).astype(np.float64))


def _choose(
    values: Float[np.ndarray, "k d"], labels: Int[np.ndarray, " k"], folds: Int[np.ndarray, " k"]
) -> float:
    """The strength with the best cross-validated accuracy; the smallest of equals."""
    hits = dict.fromkeys(STRENGTHS, 0)
    for fold in np.unique(folds):
        out = folds == fold
        if out.all():
            return 1.0
        for strength in STRENGTHS:
            predicted = _fit_predict(values[~out], labels[~out], values[out], strength)
            hits[strength] += int((predicted == labels[out]).sum())
    return max(STRENGTHS, key=lambda each: (hits[each], -each))


def _fit_predict(
    values: Float[np.ndarray, "k d"],
    labels: Int[np.ndarray, " k"],
    held_out: Float[np.ndarray, "m d"],
    strength: float,
) -> Int[np.ndarray, " m"]:
    """The predictions of a logistic regression on standardized features."""
    if len(np.unique(labels)) < 2:
        return np.full(len(held_out), labels[0])
    scale = _sklearn("preprocessing").StandardScaler().fit(values)
    learner = _sklearn("linear_model").LogisticRegression(C=strength, max_iter=MAX_STEPS)
    with warnings.catch_warnings():
        # A probe that does not converge is judged by what it predicts.
        warnings.simplefilter("ignore", _sklearn("exceptions").ConvergenceWarning)
        learner.fit(scale.transform(values), labels)
    predicted: Any = learner.predict(scale.transform(held_out))
    return predicted


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
        raise MissingPackageError("a probe", "scikit-learn") from None
