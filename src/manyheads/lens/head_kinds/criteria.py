"""From measures to kinds: labels, thresholds, and the scores and evidence of each kind."""

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib.resources import files
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int

from manyheads.errors import InputError
from manyheads.formatting import percent, pluralise, without_nan
from manyheads.lens.head_kinds.image_attention import PatchAttention
from manyheads.lens.head_kinds.significance import benjamini_hochberg, chance_above, interval
from manyheads.lens.head_kinds.word_targets import WordTargetScores
from manyheads.lens.measure.measures import offset_name
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.tables import ByHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One kind of a head: its score, the threshold, and the evidence in a sentence.

    `error` is the standard error of the score, `interval` its 95% interval, and `samples` the
    number of words, texts or tokens (`unit`) behind it. On synthetic inputs `draws` says in how
    many independent draws the kind held, and out of how many.

    >>> label = Label(kind="positional", detail="-3", score=0.8, threshold=0.5, evidence="...",
    ...               error=0.01, interval=(0.78, 0.82), samples=64, unit="sequences", draws=(5, 5))
    >>> str(label), label.margin
    ('positional -3 0.80 ± 0.01 (5 of 5 draws)', 0.6)
    """

    kind: str
    score: float
    threshold: float
    evidence: str
    detail: str = ""
    error: float = math.nan
    interval: tuple[float, float] = (math.nan, math.nan)
    samples: int = 0
    unit: str = ""
    draws: tuple[int, int] | None = None

    @property
    def name(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def margin(self) -> float:
        """The score, rescaled from 0 at the threshold to 1 at a perfect score."""
        scale = 1 - self.threshold
        return round((self.score - self.threshold) / scale, 6) if scale > 0 else 0.0

    @property
    def sample(self) -> str:
        """What the score is based on: "5 of 5 draws" or "121 words"."""
        if self.draws is not None:
            return "{} of {} draws".format(*self.draws)
        return pluralise(self.samples, self.unit.removesuffix("s")) if self.unit else ""

    def record(self) -> dict[str, Any]:
        """All of it as JSON, with null for what is unknown."""
        return without_nan(
            {
                "name": self.name,
                "kind": self.kind,
                "score": round(self.score, 4),
                "threshold": round(self.threshold, 4),
                "interval": [round(end, 4) for end in self.interval],
                "samples": self.samples,
                "unit": self.unit,
                "sample": self.sample,
                "draws": self.draws,
                "evidence": self.evidence,
            }
        )

    def __str__(self) -> str:
        error = "" if math.isnan(self.error) else f" ± {self.error:.2f}"
        return f"{self.name} {self.score:.2f}{error}" + (f" ({self.sample})" if self.sample else "")


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

    def over_fixed_choice(self, baseline: Float[np.ndarray, " h"]) -> Float[np.ndarray, " h"]:
        """The threshold of each head, above the accuracy of the best fixed choice."""
        return np.fmax(self.above, baseline + self.over_baseline)

    def has_weight(self, measured: WordTargetScores) -> Bool[np.ndarray, " h"]:
        """Whether a head gives the right words enough weight: in all, and beside their rivals."""
        enough = np.fmax(self.weight, self.times_uniform * measured.uniform)
        return (measured.weight >= enough) & (
            measured.weight >= self.times_rivals * measured.rivals
        )


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
BoolsByHead = Bool[np.ndarray, " h"]
Thresholds = Mapping[str, Threshold]
# The words that a task needs to be scored, in each half of annotated text.
MIN_WORDS = 20


@dataclass(frozen=True, slots=True, eq=False, kw_only=True)
class KindScores:
    """One kind for all heads: scores (NaN where not measured), thresholds and evidence.

    `evidence` describes the head at an index; `details` distinguish the forms of a kind. `errors`
    are standard errors over `samples` of a `unit`; `fraction` says that a score is a fraction of
    them. A head does not get the kind, whatever its score, where one of the `refusals` holds, nor
    where it has it in no more than half of `draws`. `p_values` are those of annotated text.
    """

    kind: str
    scores: FloatsByHead
    thresholds: FloatsByHead
    evidence: Callable[[int], str]
    errors: FloatsByHead
    samples: FloatsByHead
    unit: str
    fraction: bool = False
    details: Sequence[str] | None = None
    refusals: Mapping[str, BoolsByHead] = field(default_factory=dict)
    draws: int = 0
    held: Int[np.ndarray, " h"] | None = None
    p_values: FloatsByHead | None = None
    column: str = ""

    @property
    def name(self) -> str:
        """The column of the scores in a result."""
        return self.column or self.kind

    @property
    def above(self) -> BoolsByHead:
        """Which heads exceed the threshold and are not refused."""
        refused = np.logical_or.reduce([*self.refusals.values(), np.isnan(self.scores)])
        return (np.nan_to_num(self.scores) > self.thresholds) & ~refused

    def refusal(self, index: int) -> str:
        """Why the head at an index does not get the kind, or an empty string."""
        if not self.scores[index] > self.thresholds[index]:
            return f"it needs {self.thresholds[index]:.2f}"
        why = next((name for name, holds in self.refusals.items() if holds[index]), "")
        if not why and self.held is not None and not 2 * self.held[index] > self.draws:
            return f"it holds in {self.held[index]} of {self.draws} draws"
        return why

    def share_of_threshold(self, index: int) -> float:
        """The score relative to the threshold, at most 1."""
        return min(1.0, float(self.scores[index]) / max(float(self.thresholds[index]), 1e-9))

    def score(self, index: int) -> Label:
        """The kind with its score at an index, whether or not the head gets it."""
        score, error = float(self.scores[index]), float(self.errors[index])
        samples = float(np.nan_to_num(self.samples[index]))
        detail = "" if self.details is None else self.details[index]
        return Label(
            kind=self.kind,
            score=score,
            threshold=float(self.thresholds[index]),
            evidence=self.evidence(index),
            detail=detail,
            error=error,
            interval=interval(score, error, samples if self.fraction else math.nan),
            samples=int(samples),
            unit=self.unit,
            draws=None if self.held is None else (int(self.held[index]), self.draws),
        )


def with_draws(scores: KindScores, draws: Sequence[KindScores | None]) -> KindScores:
    """Count in how many draws each head has the kind, in the same form; None did not measure it."""
    held = np.zeros(len(scores.scores), dtype=int)
    for each in draws:
        if each is None:
            continue
        same = np.ones(len(held), dtype=bool)
        if scores.details is not None and each.details is not None:
            same = np.array(scores.details) == np.array(each.details)
        held += each.above & same
    return replace(scores, draws=len(draws), held=held)


def correct_for_chance(scores: Sequence[KindScores]) -> tuple[list[KindScores], int]:
    """Refuse what chance explains, corrected for all tests on annotated text; and their number."""
    tested = [each.p_values for each in scores if each.p_values is not None]
    tests = sum(map(len, tested))
    if not tests:
        return list(scores), 0
    significant = iter(np.split(benjamini_hochberg(np.concatenate(tested)), len(tested)))
    why = f"chance explains it, after correction for {tests:,} tests"
    return [
        each
        if each.p_values is None
        else replace(each, refusals={**each.refusals, why: ~next(significant)})
        for each in scores
    ], tests


def label_heads(
    scores: Sequence[KindScores], addresses: Sequence[Address], silent: BoolsByHead
) -> tuple[dict[Address, tuple[Label, ...]], dict[Address, Label]]:
    """All labels of each head, the most specific first; and the nearest kind of those without.

    Kinds come in the order of `kinds.toml`, those of one kind by their margin. The nearest kind has
    the highest score relative to its threshold. A silent head has neither.
    """
    rank = {kind: place for place, kind in enumerate(_table())}
    labels: dict[Address, tuple[Label, ...]] = {}
    nearest: dict[Address, Label] = {}
    for index, address in enumerate(addresses):
        tried = [] if silent[index] else [each for each in scores if not _unknown(each, index)]
        own = [each.score(index) for each in tried if not each.refusal(index)]
        labels[address] = tuple(sorted(own, key=lambda each: (rank[each.kind], -each.margin)))
        if tried and not own:
            best = max(tried, key=lambda each: each.share_of_threshold(index))
            label = best.score(index)
            nearest[address] = replace(label, evidence=f"{label.evidence}; {best.refusal(index)}")
    return labels, nearest


def _unknown(scores: KindScores, index: int) -> bool:
    return bool(np.isnan(scores.scores[index]))


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The inputs of a measurement: how many, of what, and both in words."""

    count: int
    unit: str
    over: str


def position_scores(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, sample: SampleSize
) -> Iterator[KindScores]:
    """Previous-token, next-token, self and positional heads, sinks and broad heads."""
    measures = {
        "previous-token": ("previous_token", "the previous token"),
        "next-token": ("next_token", "the next token"),
        "self": ("self", "the token itself"),
    }
    for kind, (measure, where) in measures.items():
        if measure in measured:
            yield _weight_scores(kind, measured, measure, uniform, table, where, sample)
    yield from _other_offsets(measured, uniform, table, sample)
    yield _sink_scores(measured, uniform, table, sample)
    yield broad_scores(measured, table, sample)


def _sink_scores(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, sample: SampleSize
) -> KindScores:
    """By the first token, or by special tokens where the texts have some."""
    fraction = measured.class_fractions.get("special", 0.0)
    if "on_special" not in measured or not fraction:
        return _weight_scores(
            "sink", measured, "first_token", uniform, table, "the first token", sample
        )
    first = uniform.get("first_token", np.zeros(len(measured.addresses)))
    return _weight_scores(
        "sink",
        measured,
        "on_special",
        {"on_special": np.fmax(first, fraction)},
        table,
        "special tokens",
        sample,
    )


def broad_scores(measured: Statistics, table: Thresholds, sample: SampleSize) -> KindScores:
    """Heads that attend evenly to all keys."""
    entropy = measured["normalized_entropy"]

    def evidence(index: int) -> str:
        value = percent(float(entropy.means[index]))
        return f"spreads its weight: normalized entropy is {value} over {sample.over}"

    return KindScores(
        kind="broad",
        scores=entropy.means,
        thresholds=np.full_like(entropy.means, table["broad"].above),
        evidence=evidence,
        errors=entropy.errors,
        samples=np.full_like(entropy.means, sample.count),
        unit=sample.unit,
    )


def _other_offsets(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, sample: SampleSize
) -> Iterator[KindScores]:
    offsets = [int(name.removeprefix("offset")) for name in measured.names if name[:6] == "offset"]
    if not offsets:
        return
    columns = [measured[offset_name(offset)] for offset in offsets]
    values = np.stack([column.means for column in columns])
    best = np.where(np.isnan(values), -1.0, values).argmax(0)
    heads = np.arange(values.shape[1])
    unknown = np.full(values.shape[1], np.nan)
    uniform_values = np.stack([uniform.get(offset_name(offset), unknown) for offset in offsets])
    scores, best_offsets = values[best, heads], [offsets[index] for index in best]

    def evidence(index: int) -> str:
        side = "before" if best_offsets[index] < 0 else "after"
        where = f"the token {abs(best_offsets[index])} {side}"
        return f"puts {percent(float(scores[index]))} of its weight on {where} over {sample.over}"

    yield KindScores(
        kind="positional",
        scores=scores,
        thresholds=table["positional"].over_uniform(uniform_values[best, heads]),
        evidence=evidence,
        errors=np.stack([column.errors for column in columns])[best, heads],
        samples=np.full_like(scores, sample.count),
        unit=sample.unit,
        details=[f"{offset:+d}" for offset in best_offsets],
    )


def repeat_scores(
    measured: Statistics, uniform: Mapping[str, FloatsByHead], table: Thresholds, sample: SampleSize
) -> Iterator[KindScores]:
    """Duplicate-token and induction heads, on repeated random tokens."""
    measures = {
        "duplicate-token": ("duplicate_token", "earlier copies of the token"),
        "induction": ("induction", "the token after an earlier copy"),
    }
    for kind, (measure, where) in measures.items():
        if measure in measured:
            yield _weight_scores(kind, measured, measure, uniform, table, where, sample)


def punctuation_scores(measured: Statistics, table: Thresholds, sample: SampleSize) -> KindScores:
    fraction = measured.class_fractions["punctuation"]
    where = f"punctuation, which is {percent(float(fraction))} of the tokens,"
    even = {"on_punctuation": np.full(len(measured.addresses), fraction)}
    return _weight_scores("punctuation", measured, "on_punctuation", even, table, where, sample)


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
            f"{eigenvalues[index]:.2f}, by weights alone"
        )

    return KindScores(
        kind="copying",
        scores=scores,
        thresholds=table["copying"].over_uniform(uniform),
        evidence=evidence,
        errors=np.sqrt(scores * (1 - scores) / max(1, tokens)),
        samples=np.full_like(scores, tokens),
        unit="tokens",
        fraction=True,
    )


def word_target_scores(
    kind: str,
    measured: WordTargetScores,
    table: Thresholds,
    detail: str = "",
    *,
    min_words: int = MIN_WORDS,
) -> KindScores:
    """A kind by the fraction of words that attend most to the right word."""
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
        scores=np.where(measured.counts >= min_words, measured.accuracy, np.nan),
        thresholds=threshold.over_fixed_choice(measured.baseline),
        evidence=evidence,
        errors=measured.errors,
        samples=measured.counts,
        unit="words",
        fraction=True,
        refusals={"the right word gets too little weight": ~threshold.has_weight(measured)},
        details=[detail] * len(measured.counts) if detail else None,
        column=f"{kind} {detail}".rstrip(),
    )


def drawn_word_scores(
    kind: str, measured: WordTargetScores, table: Thresholds, detail: str
) -> KindScores:
    """A kind on synthetic texts, whose groups are independent draws."""
    whole = word_target_scores(kind, measured, table, detail)
    draws = [word_target_scores(kind, each, table, detail, min_words=1) for each in measured.groups]
    return with_draws(whole, draws)


def confirmed_word_scores(
    kind: str, measured: WordTargetScores, table: Thresholds, detail: str = ""
) -> KindScores:
    """A kind chosen on one half of annotated text, scored and tested on the other half."""
    one, other = measured.groups
    chosen, scored = (word_target_scores(kind, each, table, detail) for each in (one, other))
    bounds = np.full(len(other.counts), table[kind].above)
    excess = other.accuracy - other.baseline
    margin = np.full_like(bounds, table[kind].over_baseline)
    return replace(
        scored,
        refusals={**scored.refusals, "the other half of the text does not have it": ~chosen.above},
        # Both must hold, so that the larger p-value is that of the two together.
        p_values=np.fmax(
            chance_above(scored.scores, bounds, other.errors, other.texts),
            chance_above(excess, margin, other.excess_errors, other.texts),
        ),
    )


def coreference_scores(measured: Sequence[WordTargetScores], table: Thresholds) -> KindScores:
    """Heads that find the mention of a pronoun in both parts of counterbalanced text.

    The score is that of the worse part. A single part cannot tell coreference from gender.
    """
    if len(measured) == 1:
        (only,) = (word_target_scores("coreference", each, table) for each in measured)
        alone = np.ones(len(only.scores), dtype=bool)
        return replace(only, refusals={"only one half of counterbalanced text is given": alone})
    parts = [confirmed_word_scores("coreference", each, table) for each in measured]
    worse = (np.nan_to_num(parts[1].scores) < np.nan_to_num(parts[0].scores)).astype(int)
    heads = np.arange(len(worse))

    def worst(columns: Sequence[np.ndarray]) -> np.ndarray:
        return np.stack(columns)[worse, heads]

    def evidence(index: int) -> str:
        one, two = (percent(float(part.scores[index])) for part in parts)
        return f"{parts[worse[index]].evidence(index)}; {one} and {two} in the two halves"

    return KindScores(
        kind="coreference",
        scores=worst([part.scores for part in parts]),
        thresholds=worst([part.thresholds for part in parts]),
        evidence=evidence,
        errors=worst([part.errors for part in parts]),
        samples=worst([part.samples for part in parts]),
        unit="words",
        fraction=True,
        refusals={"it does not hold in both halves": ~(parts[0].above & parts[1].above)},
        p_values=np.fmax.reduce([part.p_values for part in parts if part.p_values is not None]),
    )


def patch_scores(
    measured: PatchAttention, table: Thresholds, sample: SampleSize
) -> Iterator[KindScores]:
    """Heads of a vision model, by where they attend on the grid of patches."""
    targets = {
        "self": "the patch itself",
        "local": "the eight patches around",
        "row": "other patches of its row",
        "column": "other patches of its column",
        "class-token": "the class token",
    }
    for kind, where in targets.items():
        yield _weight_scores(kind, measured, kind, measured.uniform, table, where, sample)


def _weight_scores(
    kind: str,
    measured: Statistics | PatchAttention,
    measure: str,
    uniform: Mapping[str, FloatsByHead],
    table: Thresholds,
    where: str,
    sample: SampleSize,
) -> KindScores:
    scores = measured.means[measure]
    unknown = np.full_like(scores, np.nan)

    def evidence(index: int) -> str:
        return f"puts {percent(float(scores[index]))} of its weight on {where} over {sample.over}"

    return KindScores(
        kind=kind,
        scores=scores,
        thresholds=table[kind].over_uniform(uniform.get(measure, unknown)),
        evidence=evidence,
        errors=measured.errors.get(measure, unknown),
        samples=np.full_like(scores, sample.count),
        unit=sample.unit,
    )
