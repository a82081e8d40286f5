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
from manyheads.lens.measure.statistics import Statistics
from manyheads.lens.results.addresses import Address
from manyheads.lens.results.tables import ByHead


@dataclass(frozen=True, slots=True, kw_only=True)
class Label:
    """One kind of a head: its score, the threshold, and the evidence in a sentence.

    `error` is the standard error of the score, `interval` its 95% interval, and `samples` the
    number of words, texts or tokens (`unit`) behind it. On synthetic inputs `draws` says in how
    many independent draws the kind held, and out of how many. `lacks` says why a head that comes
    near the kind does not have it.

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
    lacks: str = ""

    @property
    def name(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()

    @property
    def margin(self) -> float:
        """The score, rescaled from 0 at the threshold to 1 at a perfect score."""
        scale = 1 - self.threshold
        return round((self.score - self.threshold) / scale, 6) if scale > 0 else 0.0

    @property
    def near_threshold(self) -> bool:
        """Whether the score is within two standard errors of the threshold."""
        return abs(self.score - self.threshold) <= 2 * self.error

    @property
    def sample(self) -> str:
        """What the score is based on: "5 of 5 draws" or "121 words"; and if it could tip over."""
        parts = []
        if self.draws is not None:
            parts.append("{} of {} draws".format(*self.draws))
        elif self.unit:
            parts.append(pluralise(self.samples, self.unit.removesuffix("s")))
        if self.near_threshold:
            parts.append(f"near the threshold {self.threshold:.2f}")
        return ", ".join(parts)

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
                "near_threshold": self.near_threshold,
                "lacks": self.lacks,
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
    # Every head comes near a kind that says what a head does not do.
    can_be_nearest: bool = True

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

    def score(self, index: int) -> Label:
        """The kind with its score at an index, whether or not the head gets it."""
        score, error = float(self.scores[index]), float(self.errors[index])
        samples = float(np.nan_to_num(self.samples[index]))
        return Label(
            kind=self.kind,
            score=score,
            threshold=float(self.thresholds[index]),
            evidence=self.evidence(index),
            detail="" if self.details is None else self.details[index],
            error=error,
            interval=interval(score, error, samples if self.fraction else math.nan),
            samples=int(samples),
            unit=self.unit,
            draws=None if self.held is None else (int(self.held[index]), self.draws),
        )


def with_draws(scores: KindScores, draws: Sequence[KindScores | None]) -> KindScores:
    """Count in how many draws each head has the kind, in the same form; None did not measure it."""
    held = np.zeros(len(scores.scores), dtype=int)
    for draw in draws:
        if draw is not None:
            # Both are None where a kind has a single form.
            held += draw.above & (np.array(scores.details) == np.array(draw.details))
    return replace(scores, draws=len(draws), held=held)


def correct_for_chance(scores: Sequence[KindScores]) -> tuple[list[KindScores], int]:
    """Refuse what chance explains, corrected for all tests on annotated text; and their number."""
    tested = [kind.p_values for kind in scores if kind.p_values is not None]
    tests = sum(map(len, tested))
    if not tests:
        return list(scores), 0
    significant = iter(np.split(benjamini_hochberg(np.concatenate(tested)), len(tested)))
    why = f"chance explains it, after correction for {tests:,} tests"
    return [
        kind
        if kind.p_values is None
        else replace(kind, refusals={**kind.refusals, why: ~next(significant)})
        for kind in scores
    ], tests


def label_heads(
    scores: Sequence[KindScores], addresses: Sequence[Address], silent: BoolsByHead
) -> tuple[dict[Address, tuple[Label, ...]], dict[Address, Label]]:
    """All labels of each head, the most specific first; and the nearest kind of those without.

    Kinds come in the order of `kinds.toml`, those of one kind by their margin. The nearest kind has
    the highest score relative to its threshold. A silent head has neither.
    """
    order = list(_table())
    labels: dict[Address, tuple[Label, ...]] = {}
    nearest: dict[Address, Label] = {}
    for index, address in enumerate(addresses):
        tried = [kind for kind in scores if not (silent[index] or np.isnan(kind.scores[index]))]
        own = [kind.score(index) for kind in tried if not kind.refusal(index)]
        own.sort(key=lambda label: (order.index(label.kind), -label.margin))
        labels[address] = tuple(own)
        close = [kind for kind in tried if kind.can_be_nearest]
        if close and not own:
            shares = [kind.scores[index] / max(kind.thresholds[index], 1e-9) for kind in close]
            best = close[int(np.argmax(np.fmin(shares, 1.0)))]
            label, lacks = best.score(index), best.refusal(index)
            evidence = f"{label.evidence}; {lacks}"
            nearest[address] = replace(label, evidence=evidence, lacks=lacks)
    return labels, nearest


@dataclass(frozen=True, slots=True)
class SampleSize:
    """The inputs of a measurement: how many, of what, and both in words."""

    count: int
    unit: str
    over: str


@dataclass(frozen=True, slots=True, eq=False)
class WeightKinds:
    """Kinds decided by mean weights: those of all heads, and those of uniform attention."""

    measured: Statistics | PatchAttention
    uniform: Mapping[str, FloatsByHead]
    thresholds: Thresholds
    sample: SampleSize

    def positions(self) -> Iterator[KindScores]:
        """Previous-token, next-token, self and positional heads, sinks and broad heads."""
        yield from self._if_measured("previous-token", "previous_token", "the previous token")
        yield from self._if_measured("next-token", "next_token", "the next token")
        yield from self._if_measured("self", "self", "the token itself")
        yield from self._other_offsets()
        yield self._sink()
        yield self.broad()

    def repeats(self) -> Iterator[KindScores]:
        """Duplicate-token and induction heads, on repeated random tokens."""
        copies = "earlier copies of the token"
        yield from self._if_measured("duplicate-token", "duplicate_token", copies)
        yield from self._if_measured("induction", "induction", "the token after an earlier copy")

    def patches(self) -> Iterator[KindScores]:
        """Heads of a vision model, by where they attend on the grid of patches."""
        yield self._on("self", "self", "the patch itself")
        yield self._on("local", "local", "the eight patches around")
        yield self._on("row", "row", "other patches of its row")
        yield self._on("column", "column", "other patches of its column")
        yield self._on("class-token", "class-token", "the class token")

    def punctuation(self) -> Iterator[KindScores]:
        """Heads that attend to punctuation, where the texts have any."""
        if fraction := self._fraction("punctuation"):
            where = f"punctuation, which is {percent(fraction)} of the tokens,"
            yield self._on("punctuation", "on_punctuation", where, fraction)

    def broad(self) -> KindScores:
        """Heads that attend evenly to all keys."""
        entropy = self.measured.means["normalized_entropy"]

        def evidence(index: int) -> str:
            value = percent(float(entropy[index]))
            return f"spreads its weight: normalized entropy is {value} over {self.sample.over}"

        uniform = self._on("broad", "normalized_entropy", "", 0.0)
        return replace(uniform, evidence=evidence)

    def _sink(self) -> KindScores:
        """By the first token, or by special tokens where the texts have some."""
        fraction = self._fraction("special")
        if "on_special" not in self.measured.means or not fraction:
            return self._on("sink", "first_token", "the first token")
        first = self.uniform.get("first_token", np.zeros(1))
        return self._on("sink", "on_special", "special tokens", np.fmax(first, fraction))

    def _other_offsets(self) -> Iterator[KindScores]:
        names = [name for name in self.measured.means if name.startswith("offset")]
        if not names:
            return
        values = np.stack([self.measured.means[name] for name in names])
        best = np.where(np.isnan(values), -1.0, values).argmax(0)
        heads, unknown = np.arange(len(best)), np.full(len(best), np.nan)
        columns = [
            np.stack([table.get(name, unknown) for name in names])[best, heads]
            for table in (self.measured.means, self.measured.errors, self.uniform)
        ]
        chosen = [int(names[index].removeprefix("offset")) for index in best]

        def evidence(index: int) -> str:
            side = "before" if chosen[index] < 0 else "after"
            return self._evidence(
                float(columns[0][index]), f"the token {abs(chosen[index])} {side}"
            )

        scores, errors, uniform = columns
        details = [f"{offset:+d}" for offset in chosen]
        by_uniform = self._on("positional", names[0], "", uniform)
        yield replace(by_uniform, scores=scores, errors=errors, evidence=evidence, details=details)

    def _if_measured(self, kind: str, measure: str, where: str) -> Iterator[KindScores]:
        if measure in self.measured.means:
            yield self._on(kind, measure, where)

    def _on(
        self, kind: str, measure: str, where: str, uniform: FloatsByHead | float | None = None
    ) -> KindScores:
        """A kind by the weight on some keys, more than that of uniform attention."""
        scores = self.measured.means[measure]
        unknown = np.full_like(scores, np.nan)
        if uniform is None:
            uniform = self.uniform.get(measure, unknown)
        return KindScores(
            kind=kind,
            scores=scores,
            thresholds=self.thresholds[kind].over_uniform(np.zeros_like(scores) + uniform),
            evidence=lambda index: self._evidence(float(scores[index]), where),
            errors=self.measured.errors.get(measure, unknown),
            samples=np.full_like(scores, self.sample.count),
            unit=self.sample.unit,
        )

    def _evidence(self, weight: float, where: str) -> str:
        return f"puts {percent(float(weight))} of its weight on {where} over {self.sample.over}"

    def _fraction(self, token_class: str) -> float:
        assert isinstance(self.measured, Statistics), "patches have no classes of tokens"
        return float(self.measured.class_fractions.get(token_class, 0.0))


def copying_scores(measured: ByHead, table: Thresholds) -> KindScores:
    """Copying heads, from the weights alone; the eigenvalues must agree."""
    tokens, top_k = measured.metadata["tokens"], measured.metadata["top_k"]
    uniform = top_k / max(1, measured.metadata["vocabulary"])
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
        thresholds=table["copying"].over_uniform(np.full_like(scores, uniform)),
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
    threshold, weight = table[kind], measured.weight
    enough = weight >= np.fmax(threshold.weight, threshold.times_uniform * measured.uniform)
    beside = f"the right word gets less than {threshold.times_rivals:g} times its rivals' weight"

    def evidence(index: int) -> str:
        columns = measured.accuracy, measured.baseline, measured.weight, measured.rivals
        accuracy, baseline, weight, rivals = (percent(float(column[index])) for column in columns)
        rivalry = f", all its rivals {rivals}" if threshold.times_rivals else ""
        words = pluralise(int(measured.counts[index]), "word")
        return (
            f"picks the matching word {accuracy} of the time over {words} ({measured.task}), "
            f"{baseline} by {measured.baseline_names[index]}, and gives it {weight} of its weight"
            f"{rivalry}"
        )

    return KindScores(
        kind=kind,
        scores=np.where(measured.counts >= min_words, measured.accuracy, np.nan),
        thresholds=np.fmax(threshold.above, measured.baseline + threshold.over_baseline),
        evidence=evidence,
        errors=measured.errors,
        samples=measured.counts,
        unit="words",
        fraction=True,
        refusals={
            "the right word gets too little weight": ~enough,
            beside: ~(weight >= threshold.times_rivals * measured.rivals),
        },
        details=[detail] * len(measured.counts) if detail else None,
        column=f"{kind} {detail}".rstrip(),
    )


def drawn_word_scores(
    kind: str, measured: WordTargetScores, table: Thresholds, detail: str
) -> KindScores:
    """A kind on synthetic texts, whose groups are independent draws."""
    whole = word_target_scores(kind, measured, table, detail)
    draws = [
        word_target_scores(kind, group, table, detail, min_words=1) for group in measured.groups
    ]
    return with_draws(whole, draws)


def confirmed_word_scores(
    kind: str, measured: WordTargetScores, table: Thresholds, detail: str = ""
) -> KindScores:
    """A kind chosen on one half of annotated text, scored and tested on the other half."""
    chosen, scored = (word_target_scores(kind, half, table, detail) for half in measured.groups)
    tested = measured.groups[1]
    bounds = np.full(len(tested.counts), table[kind].above)
    excess = tested.accuracy - tested.baseline
    margin = np.full_like(bounds, table[kind].over_baseline)
    return replace(
        scored,
        refusals={**scored.refusals, "the other half of the text does not have it": ~chosen.above},
        # Both must hold, so that the larger p-value is that of the two together.
        p_values=np.fmax(
            chance_above(scored.scores, bounds, tested.errors, tested.texts),
            chance_above(excess, margin, tested.excess_errors, tested.texts),
        ),
    )


def coreference_scores(measured: Sequence[WordTargetScores], table: Thresholds) -> KindScores:
    """Heads that find the mention of a pronoun in both parts of counterbalanced text.

    The score is that of the worse part. A single part cannot tell coreference from gender.
    """
    if len(measured) == 1:
        half = word_target_scores("coreference", measured[0], table)
        alone = np.ones(len(half.scores), dtype=bool)
        return replace(half, refusals={"only one half of counterbalanced text is given": alone})
    parts = [confirmed_word_scores("coreference", part, table) for part in measured]
    worse = (np.nan_to_num(parts[1].scores) < np.nan_to_num(parts[0].scores)).astype(int)
    worst = {
        name: np.stack([getattr(part, name) for part in parts])[worse, np.arange(len(worse))]
        for name in ("scores", "thresholds", "errors", "samples")
    }

    def evidence(index: int) -> str:
        first, second = (percent(float(part.scores[index])) for part in parts)
        return f"{parts[worse[index]].evidence(index)}; {first} and {second} in the two halves"

    return KindScores(
        kind="coreference",
        **worst,
        evidence=evidence,
        unit="words",
        fraction=True,
        refusals={"it does not hold in both halves": ~(parts[0].above & parts[1].above)},
        p_values=np.fmax.reduce([part.p_values for part in parts if part.p_values is not None]),
    )


def bias_gap_scores(
    first: WordTargetScores, second: WordTargetScores, table: Thresholds
) -> KindScores:
    """Heads that find the mention of a pronoun more often in one part of counterbalanced text.

    A random half of the texts says in which part, the other half confirms and scores it.
    """
    threshold = table["bias-gap"]
    chosen, gap = (
        first_group.accuracy - second_group.accuracy
        for first_group, second_group in zip(first.groups, second.groups, strict=True)
    )
    tested = first.groups[1], second.groups[1]
    counts, texts = (
        np.fmin(*(getattr(part, name) for part in tested)) for name in ("counts", "texts")
    )
    enough = first.weight + second.weight >= threshold.times_uniform * (
        first.uniform + second.uniform
    )
    scores = np.where(counts >= MIN_WORDS, np.fmax(np.sign(chosen) * gap, 0.0), np.nan)
    errors = np.hypot(*(part.errors for part in tested))
    bounds = np.full_like(scores, threshold.above)

    def evidence(index: int) -> str:
        shares = (percent(float(part.accuracy[index])) for part in tested)
        return (
            "picks the mention of {} of the pronouns in the first part and {} in the second".format(
                *shares
            )
        )

    return KindScores(
        kind="bias-gap",
        scores=scores,
        thresholds=bounds,
        evidence=evidence,
        errors=errors,
        samples=counts,
        unit="words",
        refusals={
            "mentions get too little weight": ~enough,
            "the other half of the text does not have it": ~(np.abs(chosen) > threshold.above),
        },
        p_values=chance_above(scores, bounds, errors, texts),
        can_be_nearest=False,
    )
