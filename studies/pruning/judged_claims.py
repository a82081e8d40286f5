"""What was published about pruning heads, and what becomes of it by our numbers."""

import math
from collections.abc import Callable

from studies.pruning.head_orders import ERRORS
from studies.pruning.tasks import TASKS
from studies.study import Claim, Result, Verdict, compare, mean_and_error, weakest

# The smallest of the published free shares, of translation.
FREE_SHARE = 0.2
# Differences of free shares below this are not visible: one head of 32.
LEAST_SHARE = 1 / 32
# Heads that matter alone: 8 of 96 are published.
FEW, HALF = 0.25, 0.5
# A loss that rises by less than this share is about the same, and nearly so.
SAME, NEARLY = 0.01, 0.03
LEAST_BITS = 0.005

FREE = Claim(
    "A share of the heads is free on every task: about 20 % in translation, 40 % on MNLI, 60 % "
    "on SST-2, removed together by gradient order",
    "arXiv 1905.10650",
)
BY_TASK = Claim(
    "The free share depends on the task: a classifier of sentiment (60 %) can lose more than a "
    "model that produces text (20 %)",
    "arXiv 1905.10650",
)
ALONE = Claim(
    "Few heads matter alone: without 8 of 96 the score changes clearly", "arXiv 1905.10650"
)
HARMFUL = Claim(
    "Half of the heads that matter do harm: without 4 of these 8 the score rises",
    "arXiv 1905.10650",
)
GRADIENT = Claim("Gradients tell which heads can go: better than chance", "arXiv 1905.10650")
SHAPLEY = Claim(
    "Shapley values, which count how heads work together, tell better than gradients which heads "
    "can go",
    "arXiv 2210.05709; a comparison of orders is ours",
)
GATES = Claim(
    "Gates trained with an L0 penalty, and training afterwards, remove 38 of 48 heads for 0.15 "
    "BLEU, half a percent",
    "arXiv 1905.09418",
)
SMALL = Claim(
    "A model that was pruned is better than one of the same shape trained from the start",
    "arXiv 1905.09418",
)


# What is measured of a language model that loses a share of its heads.
CUTS = {
    "full": "whole, trained as long",
    "pruned": "pruned",
    "recovered": "pruned and trained on",
    "small": "same shape from the start",
}
Judged = tuple[Verdict, str]


def free_by(order: str = "gradient") -> tuple[str, ...]:
    """Where the free share of an order is."""
    return "orders", order, "free"


def judge_free(result: Result) -> Judged:
    """A fifth on every task holds, on most weakly; a model that learned nothing has no share."""
    text = f"Free by gradient order: {_shares(result, 'gradient')}."
    shares = [
        share for task in TASKS for share in [result.mean(task, *free_by())] if share == share
    ]
    if not _complete(result):
        return Verdict.OPEN, text
    enough = sum(share >= FREE_SHARE for share in shares)
    if enough == len(shares):
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if enough > len(shares) / 2 else Verdict.NOT_HERE), text


def judge_task(result: Result) -> Judged:
    difference = result.difference("classification", "language", *free_by())
    text = f"Free by gradient order: {_shares(result, 'gradient')}."
    return compare(*difference, least=LEAST_SHARE), text


def judge_alone(result: Result) -> Judged:
    """At most a quarter of the heads on the mean of the tasks holds, at most a half weakly."""
    shares = [result.mean(task, "matter") for task in TASKS]
    texts = [f"{task} {result.text(task, 'matter', digits=2)}" for task in TASKS]
    text = (
        f"Share of heads whose removal alone changes the score by {ERRORS} standard errors: "
        f"{', '.join(texts)}."
    )
    if not _complete(result):
        return Verdict.OPEN, text
    mean = sum(shares) / len(shares)
    if mean <= FEW:
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if mean <= HALF else Verdict.NOT_HERE), text


def judge_harm(result: Result) -> Judged:
    """A head that does harm on both halves of the texts on most tasks holds, on any weakly."""
    parts = [
        f"{task} {result.text(task, 'harmful', digits=1)}, of which "
        f"{result.text(task, 'harmful_on_both', digits=1)} on the other texts too (score there "
        f"without them {result.mean(task, 'gain'):+.4f})"
        for task in TASKS
        if result.runs(task)
    ]
    text = f"Heads without which the loss falls by {ERRORS} standard errors: {'; '.join(parts)}."
    if not _complete(result):
        return Verdict.OPEN, text
    counts = [result.mean(task, "harmful_on_both") for task in TASKS]
    if sum(count >= 1 for count in counts) > len(counts) / 2:
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if any(counts) else Verdict.NOT_HERE), text


def judge_gradient(result: Result) -> Judged:
    text = (
        f"Free share by gradient: {_shares(result, 'gradient')}; at random: "
        f"{_shares(result, 'random')}."
    )
    return _more_free(result, "gradient", "random"), text


def judge_shapley(result: Result) -> Judged:
    names = {
        "Shapley": "Shapley values",
        "gradient": "gradient",
        "L0 gates": "L0 gates",
        "alone": "the loss without each head alone",
    }
    texts = [f"by {name}: {_shares(result, order)}" for order, name in names.items()]
    return _more_free(result, "Shapley", "gradient"), f"Free share {'; '.join(texts)}."


def judge_gates(result: Result) -> Judged:
    """Of the largest cut, once trained on: at most a percent of the loss holds, three weakly."""
    most = str(result.settings["cuts"][-1])
    rise = result.mean("language", "cuts", most, "rise")
    if math.isnan(rise):
        return Verdict.OPEN, _cut_text(result)
    text = f"With {float(most):.0%} removed and trained on, the loss rises by {rise:.1%}. "
    verdict = Verdict.HOLDS if rise <= SAME else Verdict.WEAKLY
    return (verdict if rise <= NEARLY else Verdict.NOT_HERE), text + _cut_text(result)


def judge_small(result: Result) -> Judged:
    """After every cut."""
    verdicts = []
    for cut in map(str, result.settings["cuts"]):
        path = "language", "cuts", cut, "lead"
        verdicts.append(compare(result.mean(*path), result.error(*path), least=LEAST_BITS))
    return weakest(*verdicts), _cut_text(result)


JUDGES: dict[Claim, Callable[[Result], Judged]] = {
    FREE: judge_free,
    BY_TASK: judge_task,
    ALONE: judge_alone,
    HARMFUL: judge_harm,
    GRADIENT: judge_gradient,
    SHAPLEY: judge_shapley,
    GATES: judge_gates,
    SMALL: judge_small,
}


def _complete(result: Result) -> bool:
    return all(result.runs(task) for task in TASKS)


def _shares(result: Result, order: str) -> str:
    texts = [f"{task} {result.text(task, *free_by(order), digits=2)}" for task in TASKS]
    return ", ".join(texts)


def _more_free(result: Result, better: str, worse: str) -> Verdict:
    """By the difference of free shares over all tasks and seeds, and its standard error."""
    differences: list[float] = []
    for task in TASKS:
        pairs = [result.each(task, *free_by(order)) for order in (better, worse)]
        differences += [more - less for more, less in zip(*pairs, strict=True)]
    if not _complete(result) or len(differences) < 2:
        return Verdict.OPEN
    return compare(*mean_and_error(differences), least=LEAST_SHARE)


def _cut_text(result: Result) -> str:
    texts = []
    for cut in map(str, result.settings["cuts"]):
        parts = [
            f"{text} {result.text('language', 'cuts', cut, name)}" for name, text in CUTS.items()
        ]
        texts.append(f"without {float(cut):.0%} of the heads: {', '.join(parts)}")
    return f"Bits per byte {'; '.join(texts)}."
