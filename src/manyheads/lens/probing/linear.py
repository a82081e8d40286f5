"""Linear probes: which labels a linear classifier predicts from heads, layers or patterns."""

import warnings
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import batch_by_length, require_text_model, resolve_max_length
from manyheads.errors import InputError, MissingPackageError
from manyheads.lens.causal.replacements import written_lengths
from manyheads.lens.inputs import annotated, cached_run, metrics
from manyheads.lens.inputs.texts import Inputs, default_batch_tokens, read_inputs
from manyheads.lens.measure import row_sums, score_tiles
from manyheads.lens.results.tables import ByHead, ByLayer
from manyheads.models import build, model_interface
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

    inputs: model_interface.ModelInputs
    level: Level
    each: tuple[Item, ...]


def find_items(scope: cached_run.HeadScope, texts: Any, labels: Sequence[Any]) -> Items:
    """Labels per text, per token, or per word if texts are lists of words; None skips an item."""
    labels = [own.tolist() if hasattr(own, "tolist") else own for own in labels]
    level: Level = "token"
    if _are_words(texts) and not scope.model.reads_pairs:
        level = "word"
        inputs, positions = split_words(scope.model, texts)
    else:
        inputs = read_inputs(scope.model, texts)
        if all(own is None or isinstance(own, str | int) for own in labels):
            level = "text"
    if len(labels) != len(inputs):
        raise InputError(f"got {len(labels)} labels for {len(inputs)} texts", "give one per text")
    by_text = inputs.source if scope.stack_name == "encoder" else inputs.ids
    items: list[Item] = []
    for text, (length, own) in enumerate(
        zip(written_lengths(scope, inputs).each, labels, strict=True)
    ):
        ids = None if by_text is None else by_text.of(text).tolist()
        if level == "text":
            kind = text if ids is None else tuple(ids)
            candidates = [(tuple(range(length)), kind, own)]
        elif level == "word":
            _check_count(text, "words", len(texts[text]), own)
            candidates = list(zip(positions[text], texts[text], own, strict=True))
        else:
            _check_count(text, "tokens", length, own)
            kinds = [(text, place) for place in range(length)] if ids is None else ids
            candidates = [((place,), kinds[place], label) for place, label in enumerate(own)]
        items += [
            Item(text, places, kind, label)
            for places, kind, label in candidates
            if label is not None and (places or level == "text")
        ]
    return Items(inputs, level, tuple(items))


def split_words(
    model: build.Model, sentences: Sequence[Sequence[str]]
) -> tuple[model_interface.ModelInputs, list[tuple[tuple[int, ...], ...]]]:
    """Sentences as token ids, and for each the token positions of its words.

    Words are joined with spaces. A word without a token of its own has no positions.
    """
    reader = require_text_model(model)
    if reader.tokenizer is None:
        raise InputError(
            "this model has no tokenizer to read words with", "set model.tokenizer, or give ids"
        )
    max_length = resolve_max_length(reader, None)
    tokenizer = plain_copy(reader.tokenizer)
    rows, positions = [], []
    for number, words in enumerate(sentences):
        written = annotated.AnnotatedText.from_words(words, ())
        with surrogates_refused([written.text], first=number):
            encoded = tokenizer.encode(written.text)
        if max_length is not None and len(encoded.ids) > max_length:
            raise InputError(
                f"sentence {number} has {len(encoded.ids)} tokens, more than {max_length}",
                "leave it out or split it",
            )
        rows.append(encoded.ids)
        positions.append(annotated.align_words(encoded, written.text, written.words))
    return read_inputs(model, rows), positions


def _are_words(texts: Any) -> bool:
    packed = isinstance(texts, str | Ragged | model_interface.ModelInputs)
    if packed or not isinstance(texts, Sequence) or not texts:
        return False
    first = texts[0]
    return isinstance(first, list | tuple) and bool(first) and isinstance(first[0], str)


def _check_count(text: int, what: str, count: int, labels: Any) -> None:
    got = 1 if isinstance(labels, str | int) or labels is None else len(labels)
    if isinstance(labels, str | int) or labels is None or got != count:
        raise InputError(
            f"text {text} has {count} {what} and {got} labels", "give one label each, None to skip"
        )


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
            part = {"mean": slice(None), "first": slice(1), "last": slice(-1, None)}[pool]
            positions = item.positions[part]
            tokens += [start[item.text] + position for position in positions]
            owners += [number] * len(positions)
            counts.append(float(len(positions)))
        return cls(torch.tensor(tokens), torch.tensor(owners), torch.tensor(counts))

    def __call__(self, values: Float[Tensor, "n h d"]) -> Float[Tensor, "k h d"]:
        chosen = values[self.tokens.to(values.device)].float().cpu()
        summed = chosen.new_zeros(len(self.counts), *chosen.shape[1:])
        return summed.index_add(0, self.owners, chosen) / self.counts[:, None, None]


class _FeatureWatcher:
    """A watcher that records the pooled features of the items only."""

    def __init__(
        self, scope: cached_run.HeadScope, source: Source, pool: Callable[[Lengths], _Pooling]
    ) -> None:
        self.features: Features = {}
        self._scope, self._pool = scope, pool
        self._query: Ragged | None = None
        taps = (Tap.HEAD_OUTPUT,) if source == "heads" else (Tap.QUERY, Tap.KEY)
        self._sites = {scope.site(layer, tap): layer for layer in scope.layers for tap in taps}
        if source == "residuals":
            stack = scope.stack
            self._sites = {Site(-1, Tap.EMBEDDINGS, stack=scope.stack_name): -1} | {
                cached_run.layer_output_site(stack, layer): layer
                for layer in range(len(stack.config.layers))
            }

    def wants(self, site: Site) -> bool:
        return site in self._sites

    def see(self, site: Site, value: Ragged | Patterns) -> None:
        assert isinstance(value, Ragged), "no pattern is requested"
        if site.tap is Tap.QUERY:
            self._query = value
            return
        values, lengths = value.values, value.lengths
        if site.tap is Tap.KEY:
            assert self._query is not None
            values, lengths = self._pattern_features(site, self._query, value), self._query.lengths
        elif values.dim() == 2:
            values = values.unsqueeze(1)
        self.features[self._sites[site]] = self._pool(lengths)(values)

    def _pattern_features(self, site: Site, query: Ragged, key: Ragged) -> Float[Tensor, "n h d"]:
        """Weights around the query and on the first key, and the entropy of the row."""
        nothing = torch.zeros(key.lengths.total, 0, device=key.device)
        spec = row_sums.RowSumSpec(offsets=OFFSETS, marks=nothing, ids=None)
        sums = row_sums.sum_rows(
            score_tiles.tiled_scores(self._scope.stack, site, query, key), spec
        )
        more = torch.stack((sums.first, sums.entropy), dim=-1)
        return torch.cat((sums.offsets, more), dim=-1)


def gather_features(
    scope: cached_run.HeadScope, items: Items, source: Source, pool: Pool, progress: bool
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
        build.eval_mode(scope.model),
    ):
        sizes = [sizes[text] for text in labeled]
        for batch in batch_by_length(sizes, default_batch_tokens(scope.model)):
            texts = [labeled[index] for index in batch]
            numbers = [number for text in texts for number in by_text[text]]
            own = [items.each[number] for number in numbers]
            pooling = partial(_Pooling.of, texts=texts, items=own, pool=pool)
            watcher = _FeatureWatcher(scope, source, pooling)
            with torch.inference_mode():
                scope.model.run_hidden(items.inputs.select(texts), watcher)
            for layer, values in watcher.features.items():
                parts.setdefault(layer, []).append(values)
            order += numbers
            bar.advance(len(texts))
    back = torch.tensor(order).argsort()
    return {layer: torch.cat(values)[back] for layer, values in parts.items()}


# Candidates for the inverse of the regularization.
STRENGTHS = (0.01, 0.1, 1.0, 10.0)
Strength = int | float | Literal["chosen"]
MAX_STEPS = 1000
FOLDS = 3


@wrapping_models
def probe(
    model: build.Model,
    texts: Inputs,
    labels: Sequence[Any],
    at: Source = "heads",
    *,
    pool: Pool = "mean",
    strength: Strength = 1.0,
    test: float = 0.25,
    stack: cached_run.StackName | None = None,
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
    scope = cached_run.head_scope(model, stack, sublayer)
    items = find_items(scope, texts, labels)
    task = _Task.of(items, test, seed)
    features = gather_features(scope, items, at, pool, progress)
    scores = _score_all(features, task, strength, progress)
    metadata = {
        "at": at,
        "level": items.level,
        "classes": [str(name) for name in task.names],
        "items": len(items.each),
        "tested": int(task.tested.sum()),
        "texts": len(task.texts),
        "strength": strength,
    }
    names = scores[0]
    columns: dict[str, Any] = {
        "kind": f"probe of {at}",
        "means": {name: np.array([score[name][0] for score in scores]) for name in names},
        "errors": {name: np.array([score[name][1] for score in scores]) for name in names},
        "metadata": metadata,
    }
    if at == "residuals":
        return ByLayer(layers=tuple(sorted(features)), **columns)
    return ByHead(
        blocks=tuple(block for block in scope.blocks if block.layer in features), **columns
    )


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class _Task:
    """Which items are held out, the index of the text of each, and all labels as integers.

    The labels of the `control` have the distribution of the true ones.
    """

    texts: tuple[int, ...]
    owners: Int[np.ndarray, " k"]
    tested: Bool[np.ndarray, " k"]
    folds: Int[np.ndarray, " k"]
    names: tuple[Hashable, ...]
    labels: Int[np.ndarray, " k"]
    control: Int[np.ndarray, " k"]

    @classmethod
    def of(cls, items: Items, test: float, seed: int) -> "_Task":
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
        tested = rank[owners] < count
        names = tuple(sorted({item.label for item in items.each}, key=str))
        number = {name: place for place, name in enumerate(names)}
        labels = np.array([number[item.label] for item in items.each])
        if len(np.unique(labels[~tested])) < 2:
            raise InputError(
                "the training texts have only one label", "give texts with two or more labels"
            )
        generator = np.random.default_rng([seed, 1])
        types: dict[Hashable, int] = {}
        for item in items.each:
            types.setdefault(item.type, int(labels[generator.integers(len(labels))]))
        return cls(
            texts=texts,
            owners=owners,
            tested=tested,
            folds=rank[owners] % FOLDS,
            names=names,
            labels=labels,
            control=np.array([types[item.type] for item in items.each]),
        )

    @property
    def majority(self) -> Float[Tensor, " k"]:
        """Whether each held-out item has the most frequent training label."""
        [(majority, _)] = Counter(self.labels[~self.tested].tolist()).most_common(1)
        return torch.from_numpy((self.labels[self.tested] == majority).astype(np.float64))

    def mean(self, hits: Float[Tensor, " k"]) -> tuple[float, float]:
        """The mean over the held-out items, with a standard error over their texts."""
        owners = torch.from_numpy(self.owners[self.tested])
        counts = torch.bincount(owners).double()
        sums = torch.zeros_like(counts).index_add(0, owners, hits)
        mean, error = metrics.weighted_mean(sums / counts.clamp(min=1), counts)
        return float(mean), float(error)

    def hits(
        self, values: Float[np.ndarray, "k d"], labels: Int[np.ndarray, " k"], strength: Strength
    ) -> Float[Tensor, " tested"]:
        """Whether a probe that is trained on the rest predicts each held-out label."""
        trained, tested = ~self.tested, self.tested
        if strength == "chosen":
            strength = _choose(values[trained], labels[trained], self.folds[trained])
        predicted = _fit_predict(values[trained], labels[trained], values[tested], strength)
        return torch.from_numpy((predicted == labels[tested]).astype(np.float64))


Score = dict[str, tuple[float, float]]


def _score_all(features: Features, task: _Task, strength: Strength, progress: bool) -> list[Score]:
    """The scores of a probe for each layer or head, layer by layer."""
    majority = task.mean(task.majority)
    by_head = [head for _, values in sorted(features.items()) for head in values.unbind(1)]
    scores: list[Score] = []
    with Progress("probing", total=len(by_head), unit="probes", enabled=progress) as bar:
        for head in by_head:
            values = head.double().numpy()
            hits, control = (
                task.hits(values, labels, strength) for labels in (task.labels, task.control)
            )
            scores.append(
                {
                    "accuracy": task.mean(hits),
                    "majority": majority,
                    "control": task.mean(control),
                    "selectivity": task.mean(hits - control),
                }
            )
            bar.advance()
    return scores


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
    return max(STRENGTHS, key=lambda strength: (hits[strength], -strength))


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


def _sklearn(name: str) -> Any:
    try:
        return import_module(f"sklearn.{name}")
    except ImportError:
        raise MissingPackageError("a probe", "scikit-learn") from None
