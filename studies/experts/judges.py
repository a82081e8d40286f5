"""The claims about experts, and the rules by which they are judged."""

import math
from collections.abc import Callable

from studies.experts.routing import agreement
from studies.study import Claim, Result, Verdict, compare, weakest

DENSE, WHOLE = "dense", "dense with all weights"
MAIN, UNBALANCED, STRICT = "experts", "experts without balance", "experts, ten times the balance"
DOUBLED, FOURFOLD, ONE = "twice the experts", "four times the experts", "wide experts, one each"
TIMES = "time of a step"
REPEATED = (DENSE, WHOLE, MAIN, UNBALANCED)
ROUTED = (MAIN, UNBALANCED, STRICT, DOUBLED, FOURFOLD, ONE)
# Differences below these are not counted: bits per byte, and shares.
LEAST_BITS, LEAST_SHARE = 0.002, 0.02
# So many choices are final after a hundredth of OLMoE's training.
SETTLED = 0.6

SWITCH = "Fedus and others 2021, arXiv 2101.03961"
MIXTRAL = "Jiang and others 2024, arXiv 2401.04088"
CLAIMS = {
    "gain": Claim(
        "At equal compute, experts learn more than a dense model: up to seven times faster than "
        "T5 (figure from memory).",
        SWITCH,
    ),
    "between": Claim(
        "Experts are worth less than their weights: their loss is between those of dense models "
        "with the active weights and with all of them.",
        "Clark and others 2022, arXiv 2202.01169",
    ),
    "number": Claim("More experts at the same compute lower the loss further.", SWITCH),
    "collapse": Claim(
        "Without balancing a router prefers few experts, and the others are left without tokens.",
        "Shazeer and others 2017, arXiv 1701.06538",
    ),
    "cost": Claim(
        "A balancing loss disturbs what is learned: with one the perplexity of a model of a "
        "billion weights is 9.56, with biases in its place 9.50 (figures from memory).",
        "Wang and others 2024, arXiv 2408.15664",
    ),
    "syntax": Claim("Experts specialise by syntax rather than by topic.", MIXTRAL),
    "repeated": Claim(
        "Consecutive tokens go to the same expert more often than by chance: 28 % of first choices "
        "in layer 15 of Mixtral, where chance gives 12.5 % (figures from memory).",
        MIXTRAL,
    ),
    "early": Claim(
        "Routing settles early: after a hundredth of the training about 60 % of the choices are "
        "the final ones, after 40 % about 80 % (figures from memory).",
        "Muennighoff and others 2024, OLMoE, arXiv 2409.02060",
    ),
}
Judged = tuple[Verdict, str]


def judge_gain(result: Result) -> Judged:
    times = ", ".join(
        f"{name} {result.text(TIMES, name, digits=2)}" for name in (DENSE, WHOLE, MAIN)
    )
    text = _bits(result, DENSE, MAIN, ONE) + f" Milliseconds of a step, alone: {times}."
    return _fewer_bits(result, MAIN, DENSE), text


def judge_between(result: Result) -> Judged:
    verdict = weakest(_fewer_bits(result, MAIN, DENSE), _fewer_bits(result, WHOLE, MAIN))
    whole, gain = (result.difference(DENSE, arm, "bits")[0] for arm in (WHOLE, MAIN))
    share = f" Experts have {gain / whole:.0%} of the gain." if whole > LEAST_BITS else ""
    return verdict, _bits(result, DENSE, MAIN, WHOLE) + share


def judge_number(result: Result) -> Judged:
    """Four times as many are better than the usual number."""
    return _fewer_bits(result, FOURFOLD, MAIN), _bits(result, MAIN, DOUBLED, FOURFOLD)


def judge_collapse(result: Result) -> Judged:
    """Without balance the load is less even; it holds if experts die, weakly if none does."""
    verdict = compare(*result.difference(UNBALANCED, MAIN, "violation"), least=LEAST_SHARE)
    if verdict is Verdict.HOLDS and not result.mean(UNBALANCED, "dead") > 0:
        verdict = Verdict.WEAKLY
    loads = _values(result, "violation", 2, MAIN, UNBALANCED)
    dead = ", ".join(
        f"{arm} {_percent(result.mean(arm, 'dead'))} (of one layer up to "
        f"{_percent(result.mean(arm, 'most_dead'))})"
        for arm in (MAIN, UNBALANCED)
    )
    return verdict, (
        f"load of the busiest expert above the mean, as a multiple of it: {loads}. Dead experts: "
        f"{dead}. {_bits(result, MAIN, UNBALANCED)}"
    )


def judge_cost(result: Result) -> Judged:
    """Ten times the balancing loss costs bits."""
    text = _bits(result, UNBALANCED, MAIN, STRICT)
    loads = _values(result, "violation", 2, UNBALANCED, MAIN, STRICT)
    return _fewer_bits(result, MAIN, STRICT), f"{text} Load above the mean: {loads}."


def judge_syntax(result: Result) -> Judged:
    """The first choice says more about the class of the byte than about the document."""
    gap, error = _margin(result, "class", "document")
    texts = [
        f"{name} {result.text(MAIN, 'choices', name)} (before training "
        f"{result.text(MAIN, 'untrained', name)})"
        for name in ("class", "byte", "document")
    ]
    routes = [run["routes"] for run in result.runs(MAIN)]
    alike = agreement(routes)
    seeds = "" if math.isnan(alike) else f" The choices of another seed determine {alike:.3f}."
    return compare(gap, error, least=LEAST_SHARE), (
        f"share of the entropy of the first choice that is determined by {', '.join(texts)}.{seeds}"
    )


def judge_repeated(result: Result) -> Judged:
    gap, error = _margin(result, "repeated", "by chance")
    values = [f"{name} {result.text(MAIN, 'choices', name)}" for name in ("repeated", "by chance")]
    text = f"share of bytes with the first choice of the byte before: {', '.join(values)}"
    for run in result.runs(MAIN)[:1]:
        text += "; by layer " + ", ".join(
            f"{value:.2f}" for value in run["choices"]["layers"]["repeated"]
        )
    return compare(gap, error, least=LEAST_SHARE), f"{text}."


def judge_early(result: Result) -> Judged:
    """Holds if 60 % are final after the first tenth, weakly if after 40 %."""
    early, late = (result.mean(MAIN, "settled", name) for name in ("tenth", "two fifths"))
    chance = result.settings["top_k"] / result.settings["count"]
    text = (
        f"share of choices that are final: {result.text(MAIN, 'settled', 'start')} before "
        f"training, {result.text(MAIN, 'settled', 'tenth')} after a tenth of it, "
        f"{result.text(MAIN, 'settled', 'two fifths')} after 40 %; chance gives {chance:.2f}."
    )
    if math.isnan(early):
        return Verdict.OPEN, text
    if early >= SETTLED:
        return Verdict.HOLDS, text
    if late >= SETTLED:
        return Verdict.WEAKLY, text
    return (Verdict.NOT_HERE if late > chance else Verdict.CONTRADICTED), text


JUDGES: dict[str, Callable[[Result], Judged]] = {
    "gain": judge_gain,
    "between": judge_between,
    "number": judge_number,
    "collapse": judge_collapse,
    "cost": judge_cost,
    "syntax": judge_syntax,
    "repeated": judge_repeated,
    "early": judge_early,
}


def _fewer_bits(result: Result, better: str, worse: str) -> Verdict:
    return compare(*result.difference(worse, better, "bits"), least=LEAST_BITS)


def _margin(result: Result, high: str, low: str) -> tuple[float, float]:
    """One share of the main arm minus another, and its error over seeds."""
    means = [result.mean(MAIN, "choices", name) for name in (high, low)]
    return means[0] - means[1], math.hypot(
        *(result.error(MAIN, "choices", name) for name in (high, low))
    )


def _bits(result: Result, *names: str) -> str:
    return f"Bits per byte: {_values(result, 'bits', 4, *names)}."


def _values(result: Result, measure: str, digits: int, *names: str) -> str:
    return ", ".join(f"{name} {result.text(name, measure, digits=digits)}" for name in names)


def _percent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{share:.0%}"
