"""The bump: induction heads form, and what was read before begins to help."""

import math
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from manyheads.pictures import canvas
from studies.induction_bump.formation import (
    first_above,
    log_spaced,
    observe_model,
    share_in_window,
)
from studies.induction_bump.smeared_keys import attention_only
from studies.induction_bump.words import WordTexts, repeated_blocks
from studies.small_models import count_parameters
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

# A head that has so much of its weight after earlier copies does induction.
FORMED = 0.2
# The best head of one layer must stay below, that of two reach above.
NEVER, STRONG = 0.1, 0.4
# The share of the change of the in-context score that falls into the time when heads form.
MOST, MUCH = 0.5, 0.3
# Smeared keys are earlier if heads form in so many times fewer steps.
EARLIER = 1.25
LEAST_NATS = 0.05

ONE_LAYER = Claim(
    "Models of one layer never form induction heads; those of two and more do", "arXiv 2209.11895"
)
BUMP = Claim(
    "In-context learning (the loss at token 500 minus that at 50) improves in the same window as "
    "induction heads form, from -0.15 to -0.4 nats",
    "arXiv 2209.11895",
)
DEPTH = Claim(
    "Models of two and three layers learn much more in context than those of one",
    "arXiv 2209.11895",
)
SMEARED_ONE = Claim(
    "With keys mixed with the key before them, one layer does what needs two without",
    "arXiv 2209.11895, the test of cause",
)
SMEARED_TWO = Claim(
    "With such keys, models of two layers form induction heads earlier", "arXiv 2209.11895"
)


def arm_name(layers: int, smeared: bool) -> str:
    name = "1 layer" if layers == 1 else f"{layers} layers"
    return f"{name}, smeared keys" if smeared else name


class InductionBump(Study):
    """One to three layers of attention alone, with plain and with smeared keys."""

    name = "induction_bump"
    title = "The bump in which induction heads form"
    question = (
        "Models of one to three layers of attention alone learn words; the best induction head, "
        "how much less the second copy of a random block costs than the first, and how much better "
        "late tokens of a text are predicted than early ones are followed through training. With "
        "smeared keys, each key is mixed with the one before it, so that a single head can find "
        "what followed an earlier copy."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 30_000_000,
        "vocabulary": 4096,
        "width": 256,
        "heads": 8,
        "layers": [1, 2, 3],
        "length": 512,
        "batch": 32,
        "steps": 4000,
        "lr": 3e-3,
        "moments": 20,
        "early": 50,
        "late": 500,
        "around": 10,
        "passages": 512,
        "blocks": 32,
        "block": 64,
        "seeds": 2,
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "vocabulary": 1024,
        "width": 64,
        "heads": 4,
        "length": 128,
        "batch": 8,
        "steps": 400,
        "lr": 5e-3,
        "moments": 10,
        "early": 20,
        "late": 110,
        "passages": 64,
        "blocks": 8,
        "block": 32,
        "seeds": 1,
    }
    test: ClassVar[Settings] = {
        "text": "topics",
        "limit": 50_000,
        "vocabulary": 300,
        "width": 16,
        "heads": 2,
        "layers": [1, 2],
        "length": 32,
        "batch": 2,
        "steps": 5,
        "moments": 3,
        "early": 8,
        "late": 24,
        "around": 4,
        "passages": 2,
        "blocks": 2,
        "block": 8,
        "seeds": 1,
    }
    limits = (
        "Attention alone, up to three layers of width 256 and 66 million tokens; the published "
        "models are larger, see more tokens, and form their heads after 2.5 to 5 billion.",
        "Tokens are the 3,840 most frequent words, and bytes otherwise.",
        "Loss at 500 and at 50 are means over 20 tokens around them, since there are fewer "
        "passages than published.",
        "The rule for smeared keys was changed after this run was made, without its numbers being "
        "known: it compares what a second copy costs less than the first, where it had compared "
        "the loss on the second copy alone. Both rules give the same verdict.",
        "The quick study has texts of 128 tokens, compares those around 110 with those around 20, "
        "and is too short for heads to form.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [
            Arm(arm_name(layers, smeared), seed, {"layers": layers, "smeared": smeared})
            for seed in range(settings["seeds"])
            for smeared in (False, True)
            for layers in settings["layers"]
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        model = attention_only(
            **{key: settings[key] for key in ("width", "heads", "vocabulary")},
            **arm.options,
            seed=arm.seed,
        ).to(device)
        texts = WordTexts(
            settings["text"], device, settings["limit"], vocabulary=settings["vocabulary"]
        )
        passages = texts.held_out(settings["passages"], settings["length"])
        # As many words as the text has; a short one may have fewer than the vocabulary.
        blocks = repeated_blocks(settings["blocks"], settings["block"], len(texts.table))
        look = partial(observe_model, passages, blocks.to(device), settings)
        steps = log_spaced(settings["steps"], settings["moments"])
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"])
        batches = texts.batches(settings["batch"], settings["length"], seed=arm.seed)
        log = Trainer(model, recipe).run(batches, arm.key, dict.fromkeys(steps, look))
        moments = [log.watched[step] for step in steps]
        curves = {name: [moment[name] for moment in moments] for name in moments[0]}
        formed = first_above(steps, curves["induction"], FORMED)
        return {
            "parameters": count_parameters(model),
            "curves": {"step": steps, **curves},
            "end": moments[-1],
            "window": share_in_window(curves["induction"], curves["in context"]),
            **({} if formed is None else {"formed": formed}),
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        one, two = arm_name(1, False), arm_name(2, False)
        smeared_one, smeared_two = arm_name(1, True), arm_name(2, True)

        def best(arm: str) -> str:
            return result.text(arm, "end", "induction", digits=2)

        def late(arm: str) -> str:
            return result.text(arm, "end", "in context", digits=2)

        def gain(arm: str) -> str:
            return result.text(arm, "end", "gain", digits=2)

        deeper = [arm_name(layers, False) for layers in result.settings["layers"]]
        gap, error = result.difference(one, two, "end", "in context")
        closed = _closed(result, smeared_one, one, two)
        speed = result.mean(two, "formed") / result.mean(smeared_two, "formed")
        window = result.mean(two, "window")
        return [
            Finding(
                ONE_LAYER,
                _one_never(
                    result.mean(one, "end", "induction"), result.mean(two, "end", "induction")
                ),
                "The best head at the end has of its weight after earlier copies: "
                + ", ".join(f"{arm} {best(arm)}" for arm in deeper)
                + ".",
            ),
            Finding(
                BUMP,
                _in_window(window, result.mean(two, "end", "induction")),
                f"With two layers the score goes from {_start(result, two)} to {late(two)} nats; "
                + (
                    f"{_percent(window)} of that change falls into the time in which the best head "
                    "goes from a tenth to nine tenths of its final induction score."
                    if result.mean(two, "end", "induction") >= FORMED
                    else "no induction head forms."
                ),
            ),
            Finding(
                DEPTH,
                compare(gap, error, least=LEAST_NATS),
                "Loss late minus early in a text: "
                + ", ".join(f"{arm} {late(arm)}" for arm in deeper)
                + " nats; the second copy of a random block costs less than the first by "
                + ", ".join(f"{arm} {gain(arm)}" for arm in deeper)
                + ".",
            ),
            Finding(
                SMEARED_ONE,
                _does_the_same(closed, result.mean(smeared_one, "end", "induction")),
                f"The best head of one layer with smeared keys has {best(smeared_one)} "
                f"({best(one)} without); the second copy of a random block costs "
                f"{gain(smeared_one)} nats less than the first ({one} {gain(one)}, {two} "
                f"{gain(two)}"
                + (
                    ")."
                    if math.isnan(closed)
                    else f"), so {_percent(closed)} of the way from one layer to two."
                ),
            ),
            Finding(
                SMEARED_TWO,
                _earlier(speed, result.runs(two), result.runs(smeared_two)),
                f"The best head of two layers passes {FORMED}: with plain keys "
                f"{_formed(result, two)}, with smeared ones {_formed(result, smeared_two)}.",
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        title = "Induction heads, and what they are good for, through training"
        subtitle = "attention alone; dashed: each key mixed with the one before it"
        panels = {
            "weight of the best head after earlier copies": "induction",
            "nats that a second copy costs less": "gain",
            "loss late minus early in a text, nats": "in context",
        }
        with canvas.themed_figure(path, "light", (15.0, 4.2), title, subtitle) as (figure, palette):
            for axes, (name, measure) in zip(figure.subplots(1, 3), panels.items(), strict=True):
                for index, layers in enumerate(result.settings["layers"]):
                    for smeared, line in ((False, "-"), (True, "--")):
                        runs = result.runs(arm_name(layers, smeared))
                        for place, values in enumerate(runs):
                            # A logarithmic axis has no step 0.
                            axes.plot(
                                values["curves"]["step"][1:],
                                values["curves"][measure][1:],
                                line,
                                color=palette.series[index],
                                linewidth=2 if place == 0 else 1,
                                alpha=1 if place == 0 else 0.45,
                                label=arm_name(layers, smeared) if place == 0 else None,
                            )
                canvas.style_axes(axes, palette)
                axes.set_xscale("log")
                axes.xaxis.set_major_formatter("{x:g}")
                axes.minorticks_off()
                axes.set_title(name, loc="left", size=12, weight="bold")
                axes.set_xlabel("training steps")
                if measure == "induction":
                    axes.legend(frameon=False, fontsize=9)

    def table(self, result: Result) -> str:
        rows = []
        for smeared in (False, True):
            for layers in result.settings["layers"]:
                arm = arm_name(layers, smeared)
                measures = ("induction", "previous token", "second copy", "first copy", "gain")
                rows.append(
                    [
                        arm,
                        *(result.text(arm, "end", name, digits=2) for name in measures),
                        result.text(arm, "end", "in context"),
                        result.text(arm, "end", "loss"),
                        _formed(result, arm),
                    ]
                )
        header = ["model", "best induction head", "best previous-token head", "second copy"]
        header += ["first copy", "gain", "late minus early", "loss", f"passes {FORMED}"]
        return markdown_table(header, rows)


def _start(result: Result, arm: str) -> str:
    starts = [values["curves"]["in context"][0] for values in result.runs(arm)]
    return f"{sum(starts) / len(starts):.2f}" if starts else "not measured"


def _formed(result: Result, arm: str) -> str:
    """When the best head has formed, and in how many of the runs."""
    runs, formed = result.runs(arm), result.each(arm, "formed")
    if not runs:
        return "not measured"
    step = f"at step {result.text(arm, 'formed', digits=0)}"
    if len(formed) == len(runs):
        return step
    return f"{step} in {len(formed)} of {len(runs)} runs" if formed else "never"


def _percent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{share:.0%}"


def _closed(result: Result, arm: str, low: str, high: str) -> float:
    """How far the gain on the second copy has come from that of one arm to that of another.

    If the other one is hardly higher, there is no way to go.
    """
    gain, start, goal = (result.mean(name, "end", "gain") for name in (arm, low, high))
    return (gain - start) / (goal - start) if goal - start > LEAST_NATS else math.nan


def _one_never(one: float, two: float) -> Verdict:
    if math.isnan(one) or math.isnan(two):
        return Verdict.OPEN
    if one >= FORMED:
        return Verdict.CONTRADICTED
    if two < FORMED:
        return Verdict.NOT_HERE
    return Verdict.HOLDS if one < NEVER and two >= STRONG else Verdict.WEAKLY


def _in_window(share: float, induction: float) -> Verdict:
    if math.isnan(induction):
        return Verdict.OPEN
    if not (induction >= FORMED and share >= 0):
        return Verdict.NOT_HERE
    return Verdict.HOLDS if share >= MOST else Verdict.WEAKLY if share >= MUCH else Verdict.NOT_HERE


def _does_the_same(closed: float, induction: float) -> Verdict:
    """Whether smeared keys give one layer an induction head, and half of what two layers gain."""
    if math.isnan(induction):
        return Verdict.OPEN
    if induction >= FORMED:
        return Verdict.HOLDS if closed >= MOST else Verdict.WEAKLY
    return Verdict.NOT_HERE


def _earlier(speed: float, plain: Sequence[Any], smeared: Sequence[Any]) -> Verdict:
    if not plain or not smeared:
        return Verdict.OPEN
    if not all("formed" in values for values in smeared):
        return Verdict.NOT_HERE
    if not all("formed" in values for values in plain):
        # With plain keys not all of them have formed at all.
        return Verdict.HOLDS
    if speed >= EARLIER:
        return Verdict.HOLDS
    return (
        Verdict.WEAKLY
        if speed > 1
        else Verdict.CONTRADICTED
        if speed < 1 / EARLIER
        else Verdict.NOT_HERE
    )


STUDY = InductionBump()
