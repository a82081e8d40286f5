"""From measures to kinds: labels, thresholds, and the scores and evidence of each kind."""

import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files

import numpy as np
from jaxtyping import Bool, Float

from manyheads.errors import InputError
from manyheads.formatting import percent
from manyheads.lens.head_kinds.patch_attention import PatchAttention
from manyheads.lens.head_kinds.word_targets import WordTargetScores
from manyheads.lens.measure.measures import offset_name
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.tables import ByHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One kind of a head: its score, the threshold, and the evidence in a sentence.

    >>> label = Label(kind="positional", detail="-3", score=0.8, threshold=0.5, evidence="...")
    >>> str(label), label.margin
    ('positional -3 (0.80)', 0.6)
    """

    kind: str
    score: float
    threshold: float
    evidence: str
    detail: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def margin(self) -> float:
        """The score, rescaled from 0 at the threshold to 1 at a perfect score."""
        scale = 1 - self.threshold
        return round((self.score - self.threshold) / scale, 6) if scale > 0 else 0.0

    def __str__(self) -> str:
        return f"{self.name} ({self.score:.2f})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Threshold:
    """The score that a kind requires: the largest of `above` and the other bounds.

    `times_uniform` multiplies the score of uniform attention, and `over_baseline` is added to that
    of the best fixed choice. The target must also get `weight` of the head's weight, and
    `times_rivals` times the weight of all its rivals. `source` says where the numbers come from.
    """

    above: float
    times_uniform: float = 0.0
    over_baseline: float = 0.0
    weight: float = 0.0
    times_rivals: float = 0.0
    source: str = ""

    def over_uniform(self, uniform: Float[np.ndarray, " h"]) -> Float[np.ndarray, " h"]:
        """The threshold of each head, by the score of uniform attention in its place."""
        return np.fmax(self.above, self.times_uniform * uniform)

    def over_fixed_choice(
        self, baseline: Float[np.ndarray, " h"], errors: Float[np.ndarray, " h"]
    ) -> Float[np.ndarray, " h"]:
        """The threshold of each head, at least three standard errors above the baseline."""
        return np.fmax(self.above, baseline + np.fmax(self.over_baseline, 3 * errors))

    def has_weight(
        self, weight: Float[np.ndarray, " h"], rivals: Float[np.ndarray, " h"]
    ) -> Bool[np.ndarray, " h"]:
        """Whether each head gives the target enough weight, also relative to its rivals."""
        return (weight >= self.weight) & (weight >= self.times_rivals * rivals)


@cache
def _table() -> dict[str, Threshold]:
    entries = tomllib.loads(files(__package__).joinpath("kinds.toml").read_text("utf-8"))
    return {
        kind: Threshold(source=numbers.pop("from"), **numbers) for kind, numbers in entries.items()
    }


def threshold_table(changes: Mapping[str, int | float] | None = None) -> dict[str, Threshold]:
    """The thresholds by kind, some of them changed.

    >>> threshold_table()["previous-token"].above, threshold_table({"sink": 0.5})["sink"].above
    (0.5, 0.5)
    """
    table = dict(_table())
    for kind, above in (changes or {}).items():
        if kind not in table:
            raise InputError(f"there is no kind {kind!r}", f"use {', '.join(table)}")
        if not 0 <= above <= 1:
            raise InputError(f"the threshold of {kind} is {above}", "use a number from 0 to 1")
        table[kind] = replace(table[kind], above=above, source="set by the user")
    return table


FloatsByHead = Float[np.ndarray, " h"]
Thresholds = Mapping[str, Threshold]
# The words that a task needs to be scored.
MIN_WORDS = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KindScores:
    """One kind for all heads: scores (NaN where not measured), thresholds and evidence.

    `evidence` describes the head at an index; `details` distinguish the forms of a kind. A head
    that is not `eligible` does not get the kind, whatever its score.
    """

    kind: str
    scores: FloatsByHead
    thresholds: FloatsByHead
    evidence: Callable[[int], str]
    details: Sequence[str] | None = None
    eligible: Bool[np.ndarray, " h"] | None = None
    column: str = ""

    @property
    def name(self) -> str:
        """The column of the scores in a result."""
        return self.column or self.kind

    def label(self, index: int) -> Label | None:
        """The label of the head at an index, if it exceeds the threshold."""
        score, threshold = float(self.scores[index]), float(self.thresholds[index])
        if not score > threshold or (self.eligible is not None and not self.eligible[index]):
            return None
        detail = "" if self.details is None else self.details[index]
        return Label(
            kind=self.kind,
            score=score,
            threshold=threshold,
            evidence=self.evidence(index),
            detail=detail,
        )


def label_heads(
    scores: Sequence[KindScores], addresses: Sequence[Address], silent: Bool[np.ndarray, " h"]
) -> dict[Address, tuple[Label, ...]]:
    """All labels of each head, best first; a silent head has none."""
    by_head = {}
    for index, address in enumerate(addresses):
        tried = [] if silent[index] else [each.label(index) for each in scores]
        labels = [label for label in tried if label is not None]
        by_head[address] = tuple(sorted(labels, key=lambda label: -label.margin))
    return by_head


def position_scores(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, over: str
) -> Iterator[KindScores]:
    """Previous-token, next-token, self and positional heads, and sinks."""
    measures = {
        "previous-token": ("previous_token", "the previous token"),
        "next-token": ("next_token", "the next token"),
        "self": ("self", "the token itself"),
    }
    for kind, (measure, where) in measures.items():
        if measure in measured:
            yield _weight_scores(
                kind, measured.means[measure], uniform.get(measure), table, where, over
            )
    yield from _other_offsets(measured, uniform, table, over)
    sink, where = measured.means["first_token"], "the first token"
    if "on_special" in measured and measured.class_fractions["special"] > 0:
        sink, where = measured.means["on_special"], "special tokens"
    yield _weight_scores("sink", sink, uniform.get("first_token"), table, where, over)


def broad_scores(measured: Statistics, table: Thresholds, over: str) -> KindScores:
    """Heads that attend evenly to all keys."""
    entropy = measured.means["normalized_entropy"]

    def evidence(index: int) -> str:
        value = percent(float(entropy[index]))
        return f"spreads its weight: normalized entropy is {value} over {over}"

    thresholds = np.full_like(entropy, table["broad"].above)
    return KindScores(kind="broad", scores=entropy, thresholds=thresholds, evidence=evidence)


def _other_offsets(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, over: str
) -> Iterator[KindScores]:
    offsets = [int(name.removeprefix("offset")) for name in measured.names if name[:6] == "offset"]
    if not offsets:
        return
    values = np.stack([measured.means[offset_name(offset)] for offset in offsets])
    best = np.where(np.isnan(values), -1.0, values).argmax(0)
    heads = np.arange(values.shape[1])
    unknown = np.full(values.shape[1], np.nan)
    uniform_values = np.stack([uniform.get(offset_name(offset), unknown) for offset in offsets])
    scores, best_offsets = values[best, heads], [offsets[index] for index in best]

    def evidence(index: int) -> str:
        side = "before" if best_offsets[index] < 0 else "after"
        where = f"the token {abs(best_offsets[index])} {side}"
        return f"puts {percent(float(scores[index]))} of its weight on {where} over {over}"

    yield KindScores(
        kind="positional",
        scores=scores,
        thresholds=table["positional"].over_uniform(uniform_values[best, heads]),
        evidence=evidence,
        details=[f"{offset:+d}" for offset in best_offsets],
    )


def repeat_scores(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, over: str
) -> Iterator[KindScores]:
    """Duplicate-token and induction heads, on repeated random tokens."""
    measures = {
        "duplicate-token": ("duplicate_token", "earlier copies of the token"),
        "induction": ("induction", "the token after an earlier copy"),
    }
    for kind, (measure, where) in measures.items():
        if measure in measured:
            yield _weight_scores(
                kind, measured.means[measure], uniform.get(measure), table, where, over
            )


def punctuation_scores(measured: Statistics, table: Thresholds, over: str) -> KindScores:
    fraction = measured.class_fractions["punctuation"]
    scores = measured.means["on_punctuation"]
    where = f"punctuation, which is {percent(float(fraction))} of the tokens,"
    return _weight_scores("punctuation", scores, np.full_like(scores, fraction), table, where, over)


def copying_scores(measured: ByHead, table: Thresholds) -> KindScores:
    """Copying heads, from the weights alone; the eigenvalues must agree."""
    tokens, top_k = measured.metadata["tokens"], measured.metadata["top_k"]
    uniform = np.full_like(
        measured.means["copying"], top_k / max(1, measured.metadata["vocabulary"])
    )
    eigenvalues = measured.means["copying_eigenvalues"]
    scores = np.where(eigenvalues > 0, measured.means["copying"], 0.0)
    scores = np.where(np.isnan(eigenvalues), np.nan, scores)

    def evidence(index: int) -> str:
        return (
            f"raises the attended token into its {top_k} largest logits for "
            f"{percent(float(scores[index]))} of {tokens:,} tokens, eigenvalue score "
            f"{eigenvalues[index]:.2f}"
        )

    thresholds = table["copying"].over_uniform(uniform)
    return KindScores(kind="copying", scores=scores, thresholds=thresholds, evidence=evidence)


def word_target_scores(
    kind: str, measured: WordTargetScores, table: Thresholds, detail: str = ""
) -> KindScores:
    """A kind by the fraction of words that attend most to the right word."""
    scores = np.where(measured.counts >= MIN_WORDS, measured.accuracy, np.nan)
    threshold = table[kind]

    def evidence(index: int) -> str:
        columns = measured.accuracy, measured.baseline, measured.weight, measured.rivals
        accuracy, baseline, weight, rivals = (percent(float(each[index])) for each in columns)
        beside = f", all its rivals {rivals}" if threshold.times_rivals else ""
        return (
            f"attends most to the right word for {accuracy} of {measured.counts[index]:,.0f} words "
            f"({measured.task}), {baseline} by {measured.baseline_names[index]}, and gives it "
            f"{weight} of its weight{beside}"
        )

    return KindScores(
        kind=kind,
        scores=scores,
        thresholds=threshold.over_fixed_choice(measured.baseline, measured.errors),
        evidence=evidence,
        eligible=threshold.has_weight(measured.weight, measured.rivals),
        details=[detail] * len(scores) if detail else None,
        column=f"{kind} {detail}".rstrip(),
    )


def patch_scores(measured: PatchAttention, table: Thresholds) -> Iterator[KindScores]:
    """Heads of a vision model, by where they attend on the grid of patches."""
    targets = {
        "self": "the patch itself",
        "local": "the eight patches around",
        "row": "other patches of its row",
        "column": "other patches of its column",
        "class-token": "the class token",
    }
    for kind, where in targets.items():
        over = f"{measured.images:,} images"
        yield _weight_scores(
            kind, measured.scores[kind], measured.uniform[kind], table, where, over
        )


def _weight_scores(
    kind: str,
    scores: FloatsByHead,
    uniform: FloatsByHead | None,
    table: Thresholds,
    where: str,
    over: str,
) -> KindScores:
    def evidence(index: int) -> str:
        return f"puts {percent(float(scores[index]))} of its weight on {where} over {over}"

    uniform = np.full_like(scores, np.nan) if uniform is None else uniform
    thresholds = table[kind].over_uniform(uniform)
    return KindScores(kind=kind, scores=scores, thresholds=thresholds, evidence=evidence)
