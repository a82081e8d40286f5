"""Retrieval heads (arXiv 2404.15574): heads that read what a model copies from a long text.

A head is scored by where it looks while the model copies a needle, and checked by ablation: without
retrieval heads the model does not find needles, and is as fluent as before.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from manyheads.bridge.automatic import wrapping_models
from manyheads.encoding.text_reader import check_continues, require_text_model
from manyheads.errors import InputError
from manyheads.formatting import percent
from manyheads.lens.causal.ablation import HeadAblation
from manyheads.lens.causal.replacements import Replacement
from manyheads.lens.head_kinds import criteria, scores_by_text
from manyheads.lens.inputs import cached_run, metrics, synthetic
from manyheads.lens.inputs.texts import read_inputs
from manyheads.lens.task_heads.task_heads import (
    HeldOutEffect,
    InductionScores,
    TaskHeads,
    random_sets,
)
from manyheads.models import build
from manyheads.ragged import Ragged
from manyheads.taps import Head

NEEDLES = 16
# The words of an article on either side of a needle: more than `lens.kinds` has.
HAYSTACK_WORDS = (20, 60)
# The tokens of each article that fluency is measured on.
ARTICLE_TOKENS = 96
MEASURE = "fraction copied, or loss"


@dataclass(frozen=True, slots=True, eq=False, kw_only=True, repr=False)
class RetrievalHeads(TaskHeads):
    """The retrieval score of each head ("retrieval"), and the heads above the threshold."""

    @property
    def copied(self) -> float:
        """The fraction of the needles' tokens that the model copies."""
        return float(self.metadata["copied"])


@wrapping_models
def find_retrieval_heads(
    model: build.Model,
    needles: Sequence[synthetic.Needle] | None = None,
    *,
    replace_with: Replacement = "mean",
    seed: int = 0,
    batch_tokens: int | None = None,
    progress: bool = True,
) -> RetrievalHeads:
    """The heads that read the words which a model copies from a needle in a text.

    The retrieval score of a head is the fraction of a needle's tokens that the model copies while
    the head attends most to that token of the needle. The retrieval heads score at least 0.1, as in
    the publication, and three times what chance gives. `needles` are those of
    `lens.retrieval_needles` by default.

    The needles are then divided into two halves. The heads chosen by one half are ablated on the
    other, and on short articles for fluency: all of them, the induction heads among them, the
    others, and as many random heads instead; `replace_with` is what replaces them.

    >>> from manyheads import load
    >>> find_retrieval_heads(load("house-gpt"), progress=False)  # doctest: +SKIP
    """
    check_continues(model)
    needles = retrieval_needles(model, seed=seed) if needles is None else list(needles)
    if len(needles) < 2:
        raise InputError(
            f"two halves need 2 needles or more, got {len(needles)}", "pass more needles"
        )
    scope = cached_run.head_scope(model)
    with build.eval_mode(model):
        measured, _ = scores_by_text.measure_needles(
            model, needles, [len(needles)], progress=progress
        )
        least = criteria.threshold_table()["retrieval"].over_uniform(np.array([measured.chance]))
        search = _Ablations(scope, needles, measured, float(least[0]), batch_tokens, progress)
        chosen = search.choose(np.arange(len(needles)))
        induction = InductionScores.of(model, seed, progress)
        held_out = search.hold_out(induction, replace_with, seed) if chosen else {}
    scores, errors = metrics.weighted_mean(
        torch.from_numpy(measured.values), torch.ones(len(needles))
    )
    copied = measured.facts["copied"]
    return RetrievalHeads(
        kind="retrieval heads",
        blocks=scope.blocks,
        means={"retrieval": scores.numpy(), "induction": induction.scores},
        errors={"retrieval": errors.numpy()},
        heads=tuple(search.heads(chosen)),
        induction_heads=tuple(search.heads(np.flatnonzero(induction.passes).tolist())),
        held_out=held_out,
        metadata={
            "measure": MEASURE,
            "layers": len(scope.stack.layers),
            "copied": copied,
            "needles": len(needles),
            "tokens": float(np.mean([len(needle.ids) for needle in needles])),
            "threshold": float(least[0]),
            "replace_with": replace_with,
            "problem": "" if chosen else f"the model copies {percent(copied)} of the needles",
        },
    )


@wrapping_models
def retrieval_needles(
    model: build.Model,
    needles: int = NEEDLES,
    *,
    words: tuple[int, int] = HAYSTACK_WORDS,
    seed: int = 0,
) -> list[synthetic.Needle]:
    """Random words hidden between `words` words of articles on either side, and asked for."""
    reader = require_text_model(model)
    if reader.tokenizer is None:
        raise InputError(
            "this model has no tokenizer", "load it from a folder with one, or set model.tokenizer"
        )
    low, high = words
    if needles < 1 or not 1 <= low <= high:
        raise InputError(
            f"got {needles} needles between {words} words: there is nothing to hide",
            "use 1 or more needles and words=(20, 60) or so",
        )
    plain = synthetic.plain_words(reader.tokenizer, seed=seed)
    result = synthetic.needle_texts(model, plain, needles, seed, words)
    if len(result) < needles:
        raise InputError(
            f"only {len(result)} of {needles} needles fit into the context of this model",
            "use fewer words on either side",
        )
    return result


@dataclass(frozen=True, slots=True, eq=False)
class _Ablations:
    """Needles and articles, with some heads and without."""

    scope: cached_run.HeadScope
    needles: Sequence[synthetic.Needle]
    measured: scores_by_text.ScoresByText
    threshold: float
    batch_tokens: int | None
    progress: bool

    def heads(self, indices: Sequence[int]) -> list[Head]:
        return [self.scope.heads[index] for index in indices]

    def choose(self, rows: np.ndarray) -> list[int]:
        """The heads above the threshold on some needles, strongest first."""
        scores = np.nan_to_num(self.measured.values[rows].mean(0))
        order = np.argsort(-scores, kind="stable")
        return [int(index) for index in order if scores[index] >= self.threshold]

    def hold_out(
        self, induction: InductionScores, replace_with: Replacement, seed: int
    ) -> dict[str, HeldOutEffect]:
        """The effects of heads that the other half of the needles has chosen."""
        every = np.arange(len(self.needles))
        values: dict[str, np.ndarray] = {}
        texts = read_inputs(self.scope.model, synthetic.passages(), ARTICLE_TOKENS)
        fluency: dict[str, list[np.ndarray]] = {}
        for half in (0, 1):
            rows = every[half::2]
            chosen = self.choose(every[1 - half :: 2])
            if not chosen:
                return {}
            sets = {
                "these heads": [chosen],
                "the induction heads among them": [
                    [index for index in chosen if induction.passes[index]]
                ],
                "the others among them": [
                    [index for index in chosen if not induction.passes[index]]
                ],
                "as many random heads": random_sets(
                    len(self.scope.heads), len(chosen), chosen, seed
                ),
            }
            own = {
                name: [tuple(self.heads(members)) for members in group if members]
                for name, group in sets.items()
            }
            for name, by_text in _named(self._copied(rows, replace_with), own, "needles"):
                values.setdefault(name, np.full(len(every), np.nan))[rows] = by_text
            articles = HeadAblation.of(
                self.scope.model,
                texts,
                replace_with=replace_with,
                batch_tokens=self.batch_tokens,
                progress=self.progress,
            )
            for name, by_text in _named(articles, own, "loss on articles"):
                fluency.setdefault(name, []).append(by_text)
        joined = values | {name: np.mean(halves, axis=0) for name, halves in fluency.items()}
        # A half may have chosen no induction head, or nothing else.
        return {
            name: HeldOutEffect.of(by_text[~np.isnan(by_text)]) for name, by_text in joined.items()
        }

    def _copied(self, rows: np.ndarray, replace_with: Replacement) -> HeadAblation:
        """The fraction of each needle's tokens that are copied."""
        needles, model = [self.needles[row] for row in rows], self.scope.model

        def copied(states: Ragged, texts: Sequence[int]) -> Tensor:
            fractions = [
                synthetic.copied_tokens(model, states.of(place), needles[text]).float().mean()
                for place, text in enumerate(texts)
            ]
            return torch.stack(fractions)

        special = synthetic.SpecialTokens.of(model)
        inputs = synthetic.inputs_from_ids(model, special, [needle.ids for needle in needles])
        return HeadAblation.of(
            model,
            inputs,
            replace_with=replace_with,
            metric=metrics.StateMetric(copied),
            batch_tokens=self.batch_tokens,
            progress=self.progress,
        )


def _named(
    ablation: HeadAblation, sets: Mapping[str, Sequence[tuple[Head, ...]]], name: str
) -> Iterator[tuple[str, np.ndarray]]:
    """The metric with all heads, and without the heads of each name, averaged over its sets."""
    effects = ablation.measure([heads for group in sets.values() for heads in group])
    without = iter(effects.values.T.numpy())
    yield name, effects.baseline.numpy()
    for kind, group in sets.items():
        if group:
            yield f"{name}, without {kind}", np.mean([next(without) for _ in group], axis=0)
