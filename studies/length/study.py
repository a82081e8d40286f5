"""Texts longer than those a model was trained on: positions, their repairs, and gates."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import mean, stdev
from typing import Any, ClassVar

from manyheads.models import Decoder
from manyheads.parts import (
    Alibi,
    Gate,
    LinearScaling,
    NoPosition,
    NoScaling,
    NTKScaling,
    RMSNorm,
    Rotary,
    YarnScaling,
)
from manyheads.pictures import canvas
from studies.length.needles import NeedleTexts, bits_at_end, loss_with_needles, needle_accuracy
from studies.mixers.tasks import VOCABULARY
from studies.small_models import count_parameters, language_model
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
)
from studies.training import Recipe, Trainer

ARMS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "rotary, gated": {"gates": (Gate(at="output", per="channel"),)},
    "ALiBi": {"position": Alibi()},
    "no positions": {"position": NoPosition()},
}
UNCHANGED, LINEAR, RAISED, YARN = "unchanged", "linear", "base raised", "YaRN"
# A model that finds fewer needles where it was trained says nothing about longer texts.
LEARNED = 0.5
# A repair holds if it costs at most so many bits per byte more than the trained length.
HELD_BITS = 0.2
# Differences of bits per byte and of shares that count.
LEAST_BITS, LEAST_SHARE = 0.05, 0.05

FAILS = Claim(
    "A rotary model fails on texts longer than those it was trained on",
    "arXiv 2108.12409; the reason for YaRN, arXiv 2309.00071",
)
ALIBI = Claim(
    "With ALiBi, texts much longer than in training cost no perplexity", "arXiv 2108.12409"
)
INTERPOLATION = Claim(
    "YaRN holds where linear interpolation fails: at 32 times the length, perplexity 2.37 against "
    "more than 10,000",
    "arXiv 2309.00071",
)
BASE = Claim(
    "Without further training, a raised base beats linear interpolation, and YaRN both",
    "arXiv 2309.00071",
)
GATES = Claim(
    "A gate after attention keeps more of long texts: with YaRN, RULER at 128k tokens is 58.82 "
    "with it and 31.65 without",
    "arXiv 2505.06708",
)
NOTHING = Claim(
    "Without position encoding a decoder extends to longer texts better than with rotary positions",
    "arXiv 2305.19466",
)


class Length(Study):
    """Rotary positions with and without gates, ALiBi and no positions, at 1 to 16 times."""

    name = "length"
    title = "Texts longer than in training"
    question = (
        "Models learn bytes and needles (a key and its value, asked for at the end) at one length, "
        "and are then tested on texts up to 16 times as long. Rotary positions are tested as they "
        "are, divided by the factor (linear), with a raised base, and with YaRN, without further "
        "training."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 6,
        "heads": 4,
        "length": 256,
        "batch": 64,
        "steps": 4000,
        "lr": 2e-3,
        "factors": [1, 2, 4, 8, 16],
        "passages": 128,
        "seeds": {"rotary": 2, "rotary, gated": 2},
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 3,
        "heads": 2,
        "length": 64,
        "batch": 16,
        "steps": 300,
        "passages": 16,
        "seeds": {},
    }
    test: ClassVar[Settings] = {
        "text": "topics",
        "limit": 50_000,
        "width": 32,
        "layers": 1,
        "heads": 2,
        "length": 32,
        "batch": 4,
        "steps": 6,
        "factors": [1, 4],
        "passages": 2,
        "seeds": {},
    }
    limits = (
        "Byte models of five million weights, trained on texts of 256 bytes; the published ones "
        "have billions of weights and read thousands of tokens. YaRN's figures are after further "
        "training; here nothing is trained after positions are changed.",
        "Needles are four marked pairs of a key and a value among bytes, not the tasks of RULER.",
        "Perplexity is that of the same last bytes of each passage, in bits per byte, with a "
        "context of 1 to 16 times the trained length before their end.",
        "ALiBi and no positions have one seed each.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        seeds = settings["seeds"]
        return [Arm(name, seed) for name in ARMS for seed in range(seeds.get(name, 1))]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        length = settings["length"]
        model = language_model(
            **{key: settings[key] for key in ("width", "layers", "heads")},
            vocabulary=VOCABULARY,
            attention={"query_norm": RMSNorm(), "key_norm": RMSNorm(), **ARMS[arm.name]},
            seed=arm.seed,
        ).to(device)
        texts = NeedleTexts(settings["text"], device, settings["limit"])
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"])
        batches = texts.batches(settings["batch"], length, seed=arm.seed)
        Trainer(model, recipe, loss_with_needles).run(batches, arm.key)
        values: Values = {"parameters": count_parameters(model), "bits": {}, "needles": {}}
        # All factors end with the same bytes.
        passages = texts.held_out(settings["passages"], max(settings["factors"]) * length)
        for factor in settings["factors"]:
            needles = texts.needles(settings["passages"], factor * length)
            for variant in scale_positions(model, float(factor), length):
                bits = bits_at_end(model, passages[:, -factor * length - 1 :], length)
                values["bits"].setdefault(variant, {})[str(factor)] = bits
                share = needle_accuracy(model, needles)
                values["needles"].setdefault(variant, {})[str(factor)] = share
        return values

    def findings(self, result: Result) -> Sequence[Finding]:
        first, *_, last = map(str, result.settings["factors"])
        middle = str(result.settings["factors"][len(result.settings["factors"]) // 2])

        def bits(arm: str, variant: str, factor: str) -> str:
            return result.text(arm, "bits", variant, factor, digits=2)

        def rise(arm: str, variant: str, factor: str) -> tuple[float, float]:
            """The bits per byte that this length costs more than the trained one."""
            costs = [
                long - short
                for long, short in zip(
                    result.each(arm, "bits", variant, factor),
                    result.each(arm, "bits", variant, first),
                    strict=False,
                )
            ]
            return _mean(costs), _error(costs)

        by_variant = {
            variant: result.mean("rotary", "bits", variant, last)
            for variant in (LINEAR, RAISED, YARN)
        }
        unchanged = rise("rotary", UNCHANGED, middle)
        alibi, _ = rise("ALiBi", UNCHANGED, last)
        nothing, _ = rise("no positions", UNCHANGED, middle)
        listed = ", ".join(f"{name} {bits('rotary', name, last)}" for name in by_variant)
        return [
            Finding(
                FAILS,
                compare(*unchanged, least=LEAST_BITS),
                f"Bits per byte of the same bytes: {bits('rotary', UNCHANGED, first)} at the "
                f"trained length, {bits('rotary', UNCHANGED, middle)} at {middle} and "
                f"{bits('rotary', UNCHANGED, last)} at {last} times.",
            ),
            Finding(
                ALIBI,
                # Up to half of what counts as a difference, it is as good as at the trained length.
                compare(LEAST_BITS - alibi, math.nan, least=LEAST_BITS / 2),
                f"{bits('ALiBi', UNCHANGED, first)} at the trained length, "
                f"{bits('ALiBi', UNCHANGED, last)} at {last} times; it finds "
                f"{_share(result, 'ALiBi', UNCHANGED, first)} of the needles at the trained length "
                f"and {_share(result, 'ALiBi', UNCHANGED, last)} at {last} times.",
            ),
            Finding(
                INTERPOLATION,
                _repaired(by_variant, result.mean("rotary", "bits", YARN, first)),
                f"Bits per byte at {last} times the length, without further training: {listed}; "
                f"{bits('rotary', YARN, first)} at the trained length.",
            ),
            Finding(
                BASE,
                _order(by_variant),
                f"Bits per byte at {last} times the length: {listed}; needles: "
                + ", ".join(f"{name} {_share(result, 'rotary', name, last)}" for name in by_variant)
                + ".",
            ),
            self._gates(result),
            Finding(
                NOTHING,
                compare(unchanged[0] - nothing, unchanged[1], least=LEAST_BITS),
                f"At {middle} times the length bits per byte rise by {nothing:.2f} without "
                f"positions (to {bits('no positions', UNCHANGED, middle)}) and by "
                f"{unchanged[0]:.2f} with unchanged rotary ones; of the needles at {last} times "
                f"{_share(result, 'no positions', UNCHANGED, last)} and "
                f"{_share(result, 'rotary', UNCHANGED, last)} are found.",
            ),
        ]

    def _gates(self, result: Result) -> Finding:
        """Needles under YaRN at all lengths beyond the trained one."""
        first, *longer = map(str, result.settings["factors"])

        def shares(arm: str) -> list[float]:
            runs = [values["needles"][YARN] for values in result.runs(arm)]
            return [sum(run[factor] for factor in longer) / len(longer) for run in runs]

        plain, gated = shares("rotary"), shares("rotary, gated")
        learned = [result.mean(arm, "needles", YARN, first) for arm in ("rotary", "rotary, gated")]
        difference = _mean(gated) - _mean(plain)
        error = math.hypot(_error(plain), _error(gated))
        verdict = compare(difference, error, least=LEAST_SHARE)
        if not math.isnan(difference) and min(learned) < LEARNED:
            verdict = Verdict.NOT_HERE
        last = longer[-1]
        return Finding(
            GATES,
            verdict,
            f"With YaRN the gated model finds {_percent(_mean(gated))} of the needles beyond the "
            f"trained length on average, the plain one {_percent(_mean(plain))}; at {last} times "
            f"{_share(result, 'rotary, gated', YARN, last)} and "
            f"{_share(result, 'rotary', YARN, last)}; at the trained length "
            f"{_share(result, 'rotary, gated', YARN, first)} and "
            f"{_share(result, 'rotary', YARN, first)}.",
        )

    def draw(self, result: Result, path: Path) -> None:
        title = "Texts of 1 to 16 times the trained length"
        factors = list(map(str, result.settings["factors"]))
        subtitle = f"trained on {result.settings['length']} bytes; dashed: with a gate"
        with canvas.themed_figure(path, "light", (12.5, 4.6), title, subtitle) as (figure, colors):
            left, right = figure.subplots(1, 2)
            names = {UNCHANGED: 1, LINEAR: 3, RAISED: 4, YARN: 0}
            curves = [("rotary", variant, names[variant], "-") for variant in names]
            curves += [("rotary, gated", variant, names[variant], "--") for variant in names]
            curves += [("ALiBi", UNCHANGED, 2, "-"), ("no positions", UNCHANGED, 6, "-")]
            for arm, variant, color, line in curves:
                label = f"rotary, {variant}" if arm == "rotary" else arm
                for axes, measure in ((left, "bits"), (right, "needles")):
                    values = [result.mean(arm, measure, variant, factor) for factor in factors]
                    axes.plot(
                        factors,
                        values,
                        line,
                        marker="o",
                        markersize=4,
                        linewidth=2,
                        color=colors.series[color],
                        label=None if line == "--" else label,
                    )
            for axes, name in ((left, "bits per byte"), (right, "needles found")):
                canvas.style_axes(axes, colors)
                axes.set_title(name, loc="left", size=12, weight="bold")
                axes.set_xlabel("length of the text, times that of training")
            right.set_ylim(-0.02, 1.02)
            right.yaxis.set_major_formatter("{x:.0%}")
            figure.legend(
                *left.get_legend_handles_labels(), loc="outside right center", frameon=False
            )

    def table(self, result: Result) -> str:
        factors = list(map(str, result.settings["factors"]))

        def rows() -> Iterator[list[str]]:
            for arm in ARMS:
                for variant in (UNCHANGED, LINEAR, RAISED, YARN):
                    if result.each(arm, "bits", variant, factors[0]):
                        bits = [result.text(arm, "bits", variant, each) for each in factors]
                        needles = [_share(result, arm, variant, each) for each in factors]
                        yield [arm, variant, *bits, *needles]

        header = [f"bits, {each}x" for each in factors] + [f"needles, {each}x" for each in factors]
        return markdown_table(["model", "positions at test", *header], rows())


def scale_positions(model: Decoder, factor: float, length: int) -> Iterator[str]:
    """Give the model the positions of one variant after another, and name it."""
    layers: Any = list(model.stack.layers)
    trained = layers[0].attention.config.position
    if not isinstance(trained, Rotary):
        yield UNCHANGED
        return
    scalings = {
        UNCHANGED: NoScaling(),
        LINEAR: LinearScaling(factor=factor),
        RAISED: NTKScaling(factor=factor),
        YARN: YarnScaling(factor=factor, original_length=length),
    }
    for name, scaling in scalings.items():
        for layer in layers:
            position = replace(trained, scaling=scaling)
            layer.attention.config = replace(layer.attention.config, position=position)
        yield name
    for layer in layers:
        layer.attention.config = replace(layer.attention.config, position=trained)


def _repaired(bits: dict[str, float], trained: float) -> Verdict:
    """YaRN below linear; weakly if it is itself far above the trained length."""
    verdict = compare(bits[LINEAR] - bits[YARN], math.nan, least=LEAST_BITS)
    held = bits[YARN] - trained <= HELD_BITS
    return verdict if held or verdict is not Verdict.HOLDS else Verdict.WEAKLY


def _order(bits: dict[str, float]) -> Verdict:
    """YaRN below the raised base below linear: both steps count, or one of them."""
    if any(map(math.isnan, bits.values())):
        return Verdict.OPEN
    steps = [bits[LINEAR] - bits[RAISED], bits[RAISED] - bits[YARN]]
    if min(steps) > 0 and max(steps) > LEAST_BITS:
        return Verdict.HOLDS
    if max(steps) > LEAST_BITS:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if min(steps) < -LEAST_BITS else Verdict.NOT_HERE


def _share(result: Result, arm: str, variant: str, factor: str) -> str:
    return _percent(result.mean(arm, "needles", variant, factor))


def _percent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{share:.0%}"


def _mean(values: Sequence[float]) -> float:
    return mean(values) if values else math.nan


def _error(values: Sequence[float]) -> float:
    """The standard error; that of a single value is unknown."""
    return stdev(values) / math.sqrt(len(values)) if len(values) > 1 else math.nan


STUDY = Length()
