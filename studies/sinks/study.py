"""Attention sinks: when they appear in training, and what makes more or fewer of them."""

import math
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from manyheads.parts import Gate
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.sink_measures import measure_sinks
from studies.sinks.sigmoid_attention import measure_sigmoid_sinks, without_softmax
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
    arms_table,
    compare,
    weakest,
)
from studies.training import Recipe, Trainer, bits_per_byte, smooth

GATE = Gate(at="output", per="channel")
# What each arm changes: the rate is multiplied, the rest replaced.
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "rate / 4": {"rate": 0.25},
    "rate x 4": {"rate": 4.0},
    "decay 0": {"decay": 0.0},
    "decay 0.5": {"decay": 0.5},
    "decay 2": {"decay": 2.0},
    "gated": {"attention": {"gates": (GATE,)}},
    "learned sink": {"attention": {"sink": "learned"}},
    "sigmoid": {"softmax": False},
    "no start byte": {"start": False},
}
GU, QIU = "Gu and others 2025, arXiv 2410.10781", "Qiu and others 2025, arXiv 2505.06708"
# Below this share of heads there are no sinks to speak of.
LEAST_SINKS = 0.02
Judged = tuple[Verdict, str]


class Sinks(Study):
    name = "sinks"
    title = "Attention sinks"
    question = (
        "Sinks are heads that give more than 0.3 of their attention to the first token, in texts "
        "of 64 tokens. They are counted while small decoders of bytes train, at other rates and "
        "weight decays, with gates, with learned sinks and with sigmoids in place of the softmax."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 6,
        "heads": 4,
        "length": 512,
        "batch": 32,
        "steps": 2500,
        "lr": 1e-3,
        "weight_decay": 0.1,
        "warm_up": 100,
        "held_out": 256,
        "measured_texts": 32,
        "sink_length": 64,
        "watched": [0, 16, 32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048],
        "seeds": [0, 1, 2],
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "length": 64,
        "batch": 8,
        "steps": 160,
        "lr": 3e-3,
        "warm_up": 20,
        "held_out": 32,
        "measured_texts": 8,
        "watched": [0, 16, 32, 64, 128],
        "seeds": [0, 1],
    }
    test: ClassVar[Settings] = {
        **quick,
        "limit": 20_000,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "length": 16,
        "batch": 2,
        "steps": 2,
        "held_out": 2,
        "measured_texts": 2,
        "sink_length": 8,
        "watched": [0],
        "seeds": [0],
    }
    limits = (
        "The published models have 60 million weights and read billions of tokens; ours have five "
        "million and read 41 million bytes, 16 thousand per step.",
        "Every passage starts with a byte that occurs nowhere else, but for one arm. How the "
        "published models start their texts was not checked, nor the wording of the claims that "
        "have no figure.",
        "A learned sink is one more score in each head's softmax; the published variants have a "
        "key of their own, which is compared with the query.",
        "Weights of sigmoids are divided by their sum before they are counted.",
        "One seed for all arms but the plain one, whose spread is taken for all.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        first, *others = settings["seeds"]
        return [Arm(name, first) for name in CHANGES] + [Arm("plain", seed) for seed in others]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        changes = CHANGES[arm.name]
        start, softmax = changes.get("start", True), changes.get("softmax", True)
        texts = ByteTexts(settings["text"], device, settings["limit"], start=start)
        model = language_model(
            width=settings["width"],
            layers=settings["layers"],
            heads=settings["heads"],
            attention=changes.get("attention"),
            seed=arm.seed,
        )
        model = (model if softmax else without_softmax(model)).to(device)
        recipe = Recipe(
            steps=settings["steps"],
            lr=settings["lr"] * changes.get("rate", 1.0),
            warm_up=settings["warm_up"],
            weight_decay=changes.get("decay", settings["weight_decay"]),
        )
        held_out = texts.held_out(settings["held_out"], settings["length"])
        look = partial(
            measure_sinks if softmax else measure_sigmoid_sinks,
            passages=held_out[: settings["measured_texts"], :-1],
            sink_length=settings["sink_length"],
        )
        batches = texts.batches(settings["batch"], settings["length"], arm.seed)
        watch = dict.fromkeys([*settings["watched"], settings["steps"]], look)
        log = Trainer(model, recipe).run(batches, arm.key, watch)
        by_step = {
            name: {str(step): values[name] for step, values in log.watched.items()}
            for name in ("sink_share", "first_token", "mean_largest")
        }
        return {
            "bits": bits_per_byte(model, held_out),
            **log.watched[settings["steps"]],
            "by_step": by_step,
            "losses": [round(loss, 4) for loss in smooth(log.losses, 50)],
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        return [Finding(claim, *judge(result)) for claim, judge in JUDGES]

    def table(self, result: Result) -> str:
        measures = {
            "bits per byte": ("bits", 4),
            "sink share": ("sink_share", 3),
            "first token": ("first_token", 3),
            "largest activation, mean over layers": ("mean_largest", 1),
            "gate": ("gate", 3),
            "on the learned sink": ("on_no_key", 3),
        }
        return arms_table(result, CHANGES, measures)

    def draw(self, result: Result, path: Path) -> None:
        names = [name for name in CHANGES if result.runs(name)]
        subtitle = "heads that give the first token more than 0.3 of their attention, at 64 tokens"
        with canvas.themed_figure(path, "light", (12.0, 4.8), self.title, subtitle) as opened:
            figure, palette = opened
            left, right = figure.subplots(1, 2, width_ratios=(3, 2))
            followed = ("plain", "no start byte", "rate x 4", "rate / 4", "gated", "learned sink")
            for name, color in zip(followed, palette.series, strict=False):
                if curve := sinks_by_step(result, name):
                    percents = [100 * share for share in curve.values()]
                    # A logarithmic axis has no step 0.
                    steps = [max(step, 8) for step in curve]
                    left.plot(steps, percents, "o-", color=color, label=name, linewidth=2)
            left.set_xscale("log", base=2)
            left.xaxis.set_major_formatter("{x:g}")
            left.set_xlabel("step (the first point is before training)", size=11)
            left.set_ylabel("% of heads", size=11)
            left.legend(frameon=False, fontsize=10)
            shares = [100 * result.mean(name, "sink_share") for name in names]
            right.barh(names, shares, color=palette.series[0], height=0.7)
            right.invert_yaxis()
            right.set_xlabel("% of heads after training", size=11)
            canvas.style_axes(left, palette)
            canvas.style_axes(right, palette, grid="x")


def sinks_by_step(result: Result, name: str) -> dict[int, float]:
    """The share of heads with a sink by step, mean over seeds."""
    curves = [values["by_step"]["sink_share"] for values in result.runs(name)]
    return (
        {int(step): mean(curve[step] for curve in curves) for step in curves[0]} if curves else {}
    )


def judge_onset(result: Result) -> Judged:
    """From absent to half of what they become: within the published steps holds, else weakly."""
    curve = sinks_by_step(result, "plain")
    if not curve:
        return Verdict.OPEN, _shares(result, "plain")
    first, *_, last = curve.values()
    if last < LEAST_SINKS:
        return Verdict.NOT_HERE, _shares(result, "plain")
    onset = next(step for step, share in curve.items() if share >= last / 2)
    text = (
        f"{first:.1%} of heads before training, {last:.1%} after it; half of that is reached "
        f"between the steps {max((step for step in curve if step < onset), default=0):,} and "
        f"{onset:,}."
    )
    if first >= last / 2:
        return Verdict.CONTRADICTED, text
    return (Verdict.HOLDS if 1000 <= onset <= 2048 else Verdict.WEAKLY), text


def judge_rate(result: Result) -> Judged:
    return _more_and_more(result, "rate / 4", "plain", "rate x 4")


def judge_decay(result: Result) -> Judged:
    verdict, _ = _more_and_more(result, "decay 0", "decay 0.5")
    return verdict, _shares(result, "decay 0", "plain", "decay 0.5", "decay 2")


def judge_data(result: Result) -> Judged:
    """Of the arm that is most like the published ones: at most a tenth holds."""
    share = result.mean("no start byte", "sink_share")
    text = _shares(result, "no start byte", "plain")
    if math.isnan(share):
        return Verdict.OPEN, text
    if share <= 0.1:
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if share <= 0.182 else Verdict.CONTRADICTED), text


def judge_place(result: Result) -> Judged:
    """Without a start byte at least half as many heads have a sink; some at all: weakly."""
    text = _shares(result, "plain", "no start byte")
    if not (result.runs("plain") and result.runs("no start byte")):
        return Verdict.OPEN, text
    plain, without = (result.mean(name, "sink_share") for name in ("plain", "no start byte"))
    if max(plain, without) < LEAST_SINKS:
        return Verdict.NOT_HERE, text
    if without >= plain / 2:
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if without >= LEAST_SINKS else Verdict.CONTRADICTED), text


def judge_removed(result: Result, name: str) -> Judged:
    """At most half as many heads with a sink holds, clearly fewer weakly."""
    text = _shares(result, "plain", name)
    if result.each(name, "on_no_key"):
        text += f" The learned sinks take {result.text(name, 'on_no_key')} of the attention."
    if result.runs("plain") and result.mean("plain", "sink_share") < LEAST_SINKS:
        return Verdict.NOT_HERE, text
    verdict = compare(*result.difference("plain", name, "sink_share"))
    halved = result.mean(name, "sink_share") <= result.mean("plain", "sink_share") / 2
    return (Verdict.WEAKLY if verdict is Verdict.HOLDS and not halved else verdict), text


def _more_and_more(result: Result, *names: str) -> Judged:
    """From each arm to the next more heads have a sink."""
    text = _shares(result, *names)
    if not all(map(result.runs, names)):
        return Verdict.OPEN, text
    if max(result.mean(name, "sink_share") for name in names) < LEAST_SINKS:
        return Verdict.NOT_HERE, text
    pairs = zip(names[1:], names, strict=False)
    verdicts = [compare(*result.difference(more, fewer, "sink_share")) for more, fewer in pairs]
    return weakest(*verdicts), text


def _shares(result: Result, *names: str) -> str:
    texts = (
        f"{name} {result.text(name, 'sink_share')} (first token {result.text(name, 'first_token')})"
        for name in names
    )
    return f"share of heads with a sink: {', '.join(texts)}."


JUDGES: tuple[tuple[Claim, Callable[[Result], Judged]], ...] = (
    (
        Claim("Sinks appear in training, after 1,000 to 2,000 steps.", GU),
        judge_onset,
    ),
    (
        Claim(
            "Little text makes few sinks: about 4 % of heads with 500 million tokens, against "
            "18.2 % with all of it.",
            GU,
        ),
        judge_data,
    ),
    (
        Claim("A higher rate makes more sinks: 6.3 % of heads at 1e-4, 32.2 % at 8e-4.", GU),
        judge_rate,
    ),
    (
        Claim("Weight decay makes more sinks: 15.2 % of heads without, 41.1 % with 0.5.", GU),
        judge_decay,
    ),
    (
        Claim("The first token is a sink for its place: no start token is needed.", GU),
        judge_place,
    ),
    (
        Claim("Sigmoids in place of the softmax make no sinks: 0.44 % of heads.", GU),
        partial(judge_removed, name="sigmoid"),
    ),
    (
        Claim("A learned sink takes the place of the first token.", GU),
        partial(judge_removed, name="learned sink"),
    ),
    (
        Claim(
            "A gate after attention removes sinks: the first token's share falls from 0.467 to "
            "0.048.",
            QIU,
        ),
        partial(judge_removed, name="gated"),
    ),
)

STUDY = Sinks()
