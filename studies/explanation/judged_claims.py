"""What was published about attention as explanation, and what becomes of it by our numbers."""

import math
from collections.abc import Callable

from studies.explanation.classifiers import Kind
from studies.explanation.four_tests import KEEPS
from studies.explanation.weight_tests import MAX_DIVERGENCE
from studies.study import Claim, Result, Verdict, compare, mean_and_error, weakest

TESTED: tuple[Kind, ...] = ("LSTM", "transformer")
# Rankings agree well from this Kendall's tau on.
AGREE = 0.5
# A drop of accuracy, or a median move of answers, that is small and that is still moderate.
SMALL_DROP, SOME_DROP = 0.01, 0.03
SMALL_MOVE, SOME_MOVE = 0.1, 0.2
# Where the weights of a model without context come from.
GUIDES = ("uniform", "its own", "model", "adversary")
# Differences that are not visible: of accuracy, of Kendall's tau and of divergences.
LEAST_ACCURACY, LEAST_TAU, LEAST_NATS = 0.005, 0.02, 0.02

CORRELATION = Claim(
    "Attention weights agree weakly with gradients and with leaving words out, and less than these "
    "two agree with each other",
    "arXiv 1902.10186",
)
PERMUTED = Claim(
    "Weights that change places at random often leave the answer as it is", "arXiv 1902.10186"
)
ADVERSARIES = Claim(
    "For most texts there are very different weights, up to the largest divergence of 0.69, that "
    "move the answer by less than 0.01",
    "arXiv 1902.10186",
)
UNIFORM = Claim(
    "Test 1: a model trained with uniform weights is about as good on short reviews, so that "
    "attention is hardly needed there",
    "arXiv 1908.04626",
)
SEEDS = Claim(
    "Test 2: weights of another seed are close to the model's own; adversaries are farther",
    "arXiv 1908.04626",
)
GUIDE = Claim(
    "Test 3: frozen weights of the model guide a model without context better than uniform "
    "weights and than its own: they say something about the words",
    "arXiv 1908.04626",
)
TRAINED = Claim(
    "Test 4: a model trained to answer alike with distant weights can be had, but its weights "
    "guide a model without context worse",
    "arXiv 1908.04626",
)


def _within(value: float, small: float, moderate: float) -> Verdict:
    """At most `small` holds, at most `moderate` weakly."""
    if math.isnan(value):
        return Verdict.OPEN
    if value <= small:
        return Verdict.HOLDS
    return Verdict.WEAKLY if value <= moderate else Verdict.NOT_HERE


def _paired(
    result: Result, kind: str, more: tuple[str, ...], less: tuple[str, ...]
) -> tuple[float, float]:
    """The mean over seeds of the difference of two values of a run, and its standard error."""
    pairs = zip(result.each(kind, *more), result.each(kind, *less), strict=True)
    return mean_and_error([one - two for one, two in pairs])


def judge_correlation(result: Result, kind: str) -> Verdict:
    """Both below 0.5, and below the agreement of gradients with leaving out."""
    verdicts = []
    for name in ("gradient", "left out"):
        below = AGREE - result.mean(kind, "tau", name), result.error(kind, "tau", name)
        less = _paired(result, kind, ("tau", "each other"), ("tau", name))
        verdicts += [compare(*below, least=LEAST_TAU), compare(*less, least=LEAST_TAU)]
    return weakest(*verdicts)


def judge_permuted(result: Result, kind: str) -> Verdict:
    return _within(result.mean(kind, "permuted"), SMALL_MOVE, SOME_MOVE)


def judge_adversaries(result: Result, kind: str) -> Verdict:
    """More than half of the texts holds, a quarter weakly."""
    return _within(1 - result.mean(kind, "searched", "far"), 0.5, 0.75)


def judge_uniform(result: Result, kind: str) -> Verdict:
    return _within(result.mean(kind, "drop"), SMALL_DROP, SOME_DROP)


def judge_seeds(result: Result, kind: str) -> Verdict:
    """Searched and trained adversaries are both farther than another seed."""
    verdicts = [
        compare(*_paired(result, kind, path, ("seeds",)), least=LEAST_NATS)
        for path in (("searched", "divergence"), ("adversary", "divergence"))
    ]
    return weakest(*verdicts)


def judge_guide(result: Result, kind: str) -> Verdict:
    return weakest(*(_leads(result, kind, name) for name in ("uniform", "its own")))


def judge_trained(result: Result, kind: str) -> Verdict:
    """Answers are kept with weights beyond half of the largest divergence, which guide worse."""
    far = _within(-result.mean(kind, "adversary", "divergence"), -MAX_DIVERGENCE / 2, -0.2)
    kept = _within(result.mean(kind, "adversary", "moved"), KEEPS, 2 * KEEPS)
    return weakest(far, kept, _leads(result, kind, "adversary"))


def _leads(result: Result, kind: str, name: str) -> Verdict:
    lead, error = result.mean(kind, "lead", name), result.error(kind, "lead", name)
    return compare(lead, error, least=LEAST_ACCURACY)


def _texts(names: dict[str, tuple[str, ...]]) -> Callable[[Result, str], str]:
    """What describes values by name."""
    return lambda result, kind: ", ".join(
        f"{name} {result.text(kind, *path)}" for name, path in names.items()
    )


JUDGES: dict[Claim, tuple[Callable[[Result, str], Verdict], Callable[[Result, str], str]]] = {
    CORRELATION: (
        judge_correlation,
        _texts(
            {
                "tau with gradients": ("tau", "gradient"),
                "with leaving out": ("tau", "left out"),
                "of these two": ("tau", "each other"),
            }
        ),
    ),
    PERMUTED: (judge_permuted, _texts({"median move of the answer": ("permuted",)})),
    ADVERSARIES: (
        judge_adversaries,
        _texts(
            {
                "mean divergence": ("searched", "divergence"),
                "share of texts beyond half of the largest": ("searched", "far"),
            }
        ),
    ),
    UNIFORM: (
        judge_uniform,
        _texts({"accuracy with attention": ("accuracy",), "with uniform weights": ("uniform",)}),
    ),
    SEEDS: (
        judge_seeds,
        _texts(
            {
                "divergence of another seed": ("seeds",),
                "of searched adversaries": ("searched", "divergence"),
                "of a trained one": ("adversary", "divergence"),
            }
        ),
    ),
    GUIDE: (
        judge_guide,
        _texts({f"accuracy with weights {name}": ("guides", name) for name in GUIDES[:3]}),
    ),
    TRAINED: (
        judge_trained,
        _texts(
            {
                "divergence": ("adversary", "divergence"),
                "answers moved": ("adversary", "moved"),
                "accuracy guided by its weights": ("guides", "adversary"),
                "by the model's": ("guides", "model"),
            }
        ),
    ),
}
