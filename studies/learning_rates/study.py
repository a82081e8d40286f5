"""Learning rates up to divergence: plain attention, norms on both sides, gated attention."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from manyheads.parts import Gate, RMSNorm, SandwichNorm
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.small_models import language_model
from studies.study import (
    Arm,
    Claim,
    Finding,
    Result,
    Settings,
    Study,
    Values,
    Verdict,
    compare,
    markdown_table,
    weakest,
)
from studies.training import Recipe, Trainer, bits_per_byte, smooth

VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norms on both sides": {"norm": SandwichNorm(RMSNorm())},
    "gated": {"attention": {"gates": (Gate(at="output", per="channel"),)}},
}
SOURCE = "Qiu and others 2025, arXiv 2505.06708"
HIGHER = Claim(
    "A gate after attention bears higher rates: at 8e-3 plain attention falls back from 7.421 to "
    "9.195 in perplexity, and in a longer run diverges; gated attention reaches 7.325 and 7.078.",
    SOURCE,
)
BEST = Claim(
    "The higher rate pays: the best of gated attention (7.325) is below the best of plain "
    "attention (7.421).",
    SOURCE,
)
NORMS = Claim(
    "Norms on both sides bear the higher rate too (7.407), and gated attention is better (7.325).",
    SOURCE,
)
SPIKES = Claim("With a gate the loss hardly spikes.", SOURCE)

# A rate is borne if the loss ends within so many bits per byte of the variant's best.
BORNE_WITHIN = 0.1
# Bits per byte from which two single runs differ.
VISIBLE = 0.01
Judged = tuple[Verdict, str]


def arm_name(variant: str, rate: float) -> str:
    """
    >>> arm_name("plain", 0.002)
    'plain at 0.002'
    """
    return f"{variant} at {rate:g}"


class LearningRates(Study):
    name = "learning_rates"
    title = "How high a learning rate attention bears"
    question = (
        "Plain attention, norms before and after each branch, and a gate after attention, trained "
        "at rates that double from run to run, without clipping of gradients."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 6,
        "heads": 4,
        "length": 512,
        "batch": 32,
        "steps": 1500,
        "warm_up": 100,
        "rates": [1e-3, 2e-3, 4e-3, 8e-3, 16e-3, 32e-3, 64e-3],
        "spike_above": 0.5,
        "held_out": 256,
        "seed": 0,
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "length": 64,
        "batch": 8,
        "steps": 150,
        "warm_up": 20,
        "rates": [4e-3, 16e-3, 64e-3, 256e-3],
        "held_out": 32,
    }
    test: ClassVar[Settings] = {
        **quick,
        "limit": 20_000,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "length": 16,
        "batch": 2,
        "steps": 4,
        "rates": [4e-3, 64e-3],
        "held_out": 2,
    }
    limits = (
        "The published models have 48 layers and 1.7 billion weights; ours have 6 layers and five "
        "million, for which higher rates are ordinary: what counts is how many doublings a variant "
        "bears beyond another.",
        "Gradients are not clipped, so that spikes show. Whether the published runs clip is not "
        "known to us. Adam bounds each step by the rate anyway.",
        "The wording of the claim about spikes, which has no figure, was not checked.",
        "One seed per rate. Two runs count as different from 0.01 bits on, a bound that was set "
        "before the runs; seeds of the study `gates` differ by more, so a verdict on less than "
        "their spread (the best losses, plain against norms) may turn with another seed.",
        "All runs have the same number of steps; the published longer run is not repeated.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [
            Arm(arm_name(variant, rate), settings["seed"], {"variant": variant, "rate": rate})
            for rate in settings["rates"]
            for variant in VARIANTS
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        texts = ByteTexts(settings["text"], device, settings["limit"])
        shape = {key: settings[key] for key in ("width", "layers", "heads")}
        model = language_model(**shape, **VARIANTS[arm.options["variant"]], seed=arm.seed)
        recipe = Recipe(
            steps=settings["steps"],
            lr=arm.options["rate"],
            warm_up=settings["warm_up"],
            clip=None,
        )
        batches = texts.batches(settings["batch"], settings["length"], arm.seed)
        log = Trainer(model.to(device), recipe).run(batches, arm.key)
        bits = bits_per_byte(model, texts.held_out(settings["held_out"], settings["length"]))
        return {
            "bits": bits,
            "diverged": log.diverged,
            "spikes": log.spikes(settings["spike_above"]),
            "largest_gradient_norm": max(log.gradient_norms),
            "losses": smooth(log.losses, 50),
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        judges: dict[Claim, Callable[[Result], Judged]] = {
            HIGHER: judge_higher,
            BEST: judge_best,
            NORMS: judge_norms,
            SPIKES: judge_spikes,
        }
        complete = all(result.has(arm) for arm in self.arms(result.settings))
        return [
            Finding(claim, *(judge(result) if complete else (Verdict.OPEN, "not all arms ended.")))
            for claim, judge in judges.items()
        ]

    def table(self, result: Result) -> str:
        rates = result.settings["rates"]
        rows = [
            [f"{rate:g}", *(_cell(result, variant, rate) for variant in VARIANTS)] for rate in rates
        ]
        return (
            "Bits per byte of held-out text, and spikes of the training loss of more than "
            f"{result.settings['spike_above']} nats:\n\n"
            + markdown_table(["rate", *VARIANTS], rows)
        )

    def draw(self, result: Result, path: Path) -> None:
        rates = result.settings["rates"]
        subtitle = "one run per point; a cross at the top: the loss became infinite or rose"
        with canvas.themed_figure(path, "light", (12.0, 4.6), self.title, subtitle) as opened:
            figure, palette = opened
            spiked = any(run["spikes"] for name in result.arms for run in result.runs(name))
            panels = list(figure.subplots(1, 1 + spiked, squeeze=False)[0])
            left, right = panels[0], panels[-1]
            ends = {variant: bits_by_rate(result, variant) for variant in VARIANTS}
            highest = max((value for bits in ends.values() for value in bits.values()), default=1.0)
            for index, (variant, bits) in enumerate(ends.items()):
                color = palette.series[index]
                left.plot(
                    list(bits), list(bits.values()), "o-", color=color, label=variant, linewidth=2
                )
                lost = [rate for rate in rates if rate not in bits]
                shifted = [rate * 1.06 ** (index - 1) for rate in lost]
                left.plot(shifted, [1.02 * highest] * len(lost), "x", color=color, markersize=8)
                spikes = [result.mean(arm_name(variant, rate), "spikes") for rate in rates]
                places = [at + 0.27 * (index - 1) for at in range(len(rates))]
                if spiked:
                    right.bar(places, spikes, width=0.25, color=color)
            left.set_xscale("log", base=2)
            left.set_xticks(rates, [f"{rate:g}" for rate in rates])
            left.minorticks_off()
            left.set_ylabel("bits per byte, held out", size=11)
            if spiked:
                right.set_xticks(range(len(rates)), [f"{rate:g}" for rate in rates])
                right.set_ylabel("spikes of the loss", size=11)
            for axes in panels:
                axes.set_xlabel("learning rate", size=11)
                canvas.style_axes(axes, palette)
            left.legend(frameon=False, fontsize=11)


def bits_by_rate(result: Result, variant: str) -> dict[float, float]:
    """What runs ended with that did not diverge."""
    ends = {}
    for rate in result.settings["rates"]:
        name = arm_name(variant, rate)
        bits = result.mean(name, "bits")
        if not math.isnan(bits) and not result.runs(name)[0]["diverged"]:
            ends[rate] = bits
    return ends


def borne(result: Result, variant: str) -> int:
    """How many rates, from the lowest on, end within `BORNE_WITHIN` of the variant's best.

    Rates below the best, which only learn more slowly, are borne too.
    """
    bits = bits_by_rate(result, variant)
    if not bits:
        return 0
    best = min(bits, key=lambda rate: bits[rate])
    count = 0
    for rate in result.settings["rates"]:
        limit = bits[best] + BORNE_WITHIN if rate > best else math.inf
        if not (rate in bits and bits[rate] <= limit):
            break
        count += 1
    return count


def judge_higher(result: Result) -> Judged:
    """A higher rate holds; the same, but a lower loss at the next one, weakly."""
    plain, gated = borne(result, "plain"), borne(result, "gated")
    rates = result.settings["rates"]
    text = "; ".join(
        f"{variant} bears rates up to {rates[count - 1]:g}" if count else f"{variant} bears none"
        for variant, count in (("plain", plain), ("gated", gated))
    )
    text += f" (within {BORNE_WITHIN} bits of its best)."
    if gated != plain:
        return (Verdict.HOLDS if gated > plain else Verdict.CONTRADICTED), text
    if plain == len(rates):
        return Verdict.NOT_HERE, text
    lead, compared = _lead(result, "plain", "gated", rates[plain])
    at_limit = compare(lead, math.nan, least=VISIBLE)
    verdict = Verdict.WEAKLY if at_limit is Verdict.HOLDS else Verdict.NOT_HERE
    return verdict, f"{text} At the next rate: {compared}"


def judge_best(result: Result) -> Judged:
    bests = {variant: _best(result, variant) for variant in ("plain", "gated")}
    text = "; ".join(
        f"{variant} diverged at all rates"
        if math.isnan(rate)
        else f"{variant} {bits:.3f} at {rate:g}"
        for variant, (rate, bits) in bests.items()
    )
    plain, gated = bests["plain"][1], bests["gated"][1]
    lead = 0.0 if plain == gated else plain - gated
    return compare(lead, math.nan, least=VISIBLE), f"best bits per byte: {text}."


def judge_norms(result: Result) -> Judged:
    """At the first rate that plain attention does not bear, norms are better, gates even more."""
    rates, count = result.settings["rates"], borne(result, "plain")
    if count == len(rates):
        return Verdict.NOT_HERE, f"plain attention bears every rate up to {rates[-1]:g}."
    norms, gated = "norms on both sides", "gated"
    first, compared = _lead(result, "plain", norms, rates[count])
    second, also = _lead(result, norms, gated, rates[count])
    verdicts = [compare(lead, math.nan, least=VISIBLE) for lead in (first, second)]
    return weakest(*verdicts), f"at {rates[count]:g}, which plain does not bear: {compared} {also}"


def judge_spikes(result: Result) -> Judged:
    """At most half as many holds, fewer weakly."""
    totals = {
        variant: sum(
            result.mean(arm_name(variant, rate), "spikes") for rate in result.settings["rates"]
        )
        for variant in VARIANTS
    }
    text = ", ".join(f"{variant} {count:.0f}" for variant, count in totals.items())
    text = f"spikes over all rates: {text}."
    plain, gated = totals["plain"], totals["gated"]
    if plain == gated:
        return Verdict.NOT_HERE, text
    if gated > plain:
        return Verdict.CONTRADICTED, text
    return (Verdict.HOLDS if gated <= plain / 2 else Verdict.WEAKLY), text


def _lead(result: Result, worse: str, better: str, rate: float) -> tuple[float, str]:
    """By how much the second is below the first at a rate; infinite if only the first diverged."""
    ends = [bits_by_rate(result, variant).get(rate) for variant in (worse, better)]
    first, second = (math.inf if end is None else end for end in ends)
    lead = 0.0 if first == second else first - second
    texts = [
        f"{variant} {'diverged' if end is None else f'{end:.3f}'}"
        for variant, end in zip((worse, better), ends, strict=True)
    ]
    return lead, f"{', '.join(texts)}."


def _best(result: Result, variant: str) -> tuple[float, float]:
    bits = bits_by_rate(result, variant)
    return min(bits.items(), key=lambda item: item[1]) if bits else (math.nan, math.inf)


def _cell(result: Result, variant: str, rate: float) -> str:
    name = arm_name(variant, rate)
    if not result.runs(name):
        return "not measured"
    values = result.runs(name)[0]
    bits = "diverged" if values["diverged"] else result.text(name, "bits")
    return f"{bits}, {values['spikes']} spikes" if values["spikes"] else bits


STUDY = LearningRates()
