"""Linear probes: what can be read off a head, a layer or a pattern, and what the probe learned."""

import warnings
from collections import Counter
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from manyheads.errors import InputError, MissingExtraError
from manyheads.lens.activations import Features, Pool, Source, gather_features
from manyheads.lens.by_layer import ByLayer
from manyheads.lens.items import Items, find_items
from manyheads.lens.metrics import weighed
from manyheads.lens.results import ByHead
from manyheads.lens.trunk import StackName, part_of
from manyheads.models.build import Model
from manyheads.progress import Progress
from manyheads.taps import Sublayer

__all__ = ["STRENGTHS", "probe"]

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
    with Progress("probing", total=total, unit="probes", shown=progress) as bar:
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
