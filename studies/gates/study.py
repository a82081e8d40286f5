"""Gates in attention: where they help, what they do to sinks, and which property does it."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

from manyheads.models import Decoder
from manyheads.parts import Gate, RMSNorm
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.gates.published import CLAIMS, FIRST_TOKEN, loss_reduction
from studies.sink_measures import mean_stable_rank, measure_sinks
from studies.small_models import count_parameters, language_model
from studies.study import (
    Arm,
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


def gate(at: str, per: str = "channel", **settings: Any) -> dict[str, Any]:
    return {"gates": (Gate(at=at, per=per, **settings),)}  # type: ignore[arg-type]


# What changes of the attention, by arm.
ATTENTION: dict[str, dict[str, Any]] = {
    "plain": {},
    "G1 channel": gate("output"),
    "G2 channel": gate("value"),
    "G3 channel": gate("key"),
    "G4 channel": gate("query"),
    "G5 channel": gate("final"),
    "G1 head": gate("output", "head"),
    "G2 head": gate("value", "head"),
    "G1 shared": gate("output", heads="shared"),
    "G2 shared": gate("value", heads="shared"),
    "G1 added SiLU": gate("output", operation="add", activation="silu"),
    "G1 times SiLU": gate("output", activation="silu"),
    "RMSNorm of heads": {"output_norm": RMSNorm()},
    "SiLU of heads": gate("output", reads="itself"),
    "reads nothing": gate("output", reads="nothing"),
    "not sparse": gate("output", activation="raised_sigmoid"),
}
WIDER = ("wider feed-forward", "one more head")
# Gates whose mean says how open they are.
SIGMOIDS = tuple(name for name in ATTENTION if name[:2] in ("G1", "G2") and "SiLU" not in name)
REPEATED = ("plain", "G1 channel", "reads nothing")
# Below this share of heads with a sink, there is none to be removed.
LEAST_SINKS = 0.02


def make_model(name: str, settings: Settings, seed: int) -> Decoder:
    """The model of an arm; wider ones have as many weights as a gate per channel adds."""
    width, heads = settings["width"], settings["heads"]
    attention, hidden = ATTENTION.get(name, {}), width * 8 // 3 // 8 * 8
    if name == "one more head":
        attention = {"heads": heads + 1, "head_size": width // heads}
    elif name == "wider feed-forward":
        hidden += round(width / 3)
    return language_model(
        width=width,
        layers=settings["layers"],
        heads=heads,
        hidden=hidden,
        attention=attention,
        seed=seed,
    )


class Gates(Study):
    name = "gates"
    title = "Gates in attention"
    question = (
        "Small decoders of bytes that differ only in a gate of their attention: after the heads "
        "(G1), on values (G2), keys (G3), queries (G4) or after the output projection (G5), with "
        "controls that take one property of a gate away."
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
        "warm_up": 100,
        "held_out": 256,
        "measured_texts": 32,
        "seeds": [0, 1, 2],
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "heads": 4,
        "length": 64,
        "batch": 8,
        "steps": 120,
        "lr": 3e-3,
        "warm_up": 20,
        "held_out": 32,
        "measured_texts": 8,
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
        "steps": 3,
        "held_out": 2,
        "measured_texts": 2,
        "seeds": [0],
    }
    limits = (
        "The published models are mixtures of 128 experts with 15 billion weights, trained on 400 "
        "billion tokens; ours have about five million weights and read 41 million bytes. Losses "
        "are compared as shares of the plain model's.",
        "Every passage starts with a byte that occurs nowhere else, so that sinks have a token to "
        "form on. The study `sinks` measures what it changes.",
        "The dots of the two wider models are the middle of the published range, 5.95 to 5.98.",
        "Arms of one seed take their error from the spread of those that have three.",
        "An identity that is added (5.882) is not measured, nor other learning rates: all arms "
        "train at one rate, though gated ones may bear a higher.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        first, *others = settings["seeds"]
        return [
            *(Arm(name, first) for name in (*ATTENTION, *WIDER)),
            *(Arm(name, seed) for seed in others for name in REPEATED),
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        texts = ByteTexts(settings["text"], device, settings["limit"], start=True)
        model = make_model(arm.name, settings, arm.seed).to(device)
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"], warm_up=settings["warm_up"])
        batches = texts.batches(settings["batch"], settings["length"], arm.seed)
        log = Trainer(model, recipe).run(batches, arm.key)
        held_out = texts.held_out(settings["held_out"], settings["length"])
        return {
            "bits": bits_per_byte(model, held_out),
            **measure_sinks(model, held_out[: settings["measured_texts"], :-1]),
            "stable_rank": mean_stable_rank(model),
            "parameters": count_parameters(model),
            "losses": [round(loss, 4) for loss in smooth(log.losses, 50)],
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        return [Finding(claim, *JUDGES[key](result)) for key, claim in CLAIMS.items()]

    def table(self, result: Result) -> str:
        measures = {
            "bits per byte": ("bits", 4),
            "first token": ("first_token", 3),
            "sink share": ("sink_share", 3),
            "largest activation, mean over layers": ("mean_largest", 1),
            "overall": ("largest", 1),
            "gate": ("gate", 3),
            "stable rank of W_V W_O": ("stable_rank", 2),
            "weights": ("parameters", 0),
        }
        return arms_table(result, (*ATTENTION, *WIDER), measures)

    def draw(self, result: Result, path: Path) -> None:
        names = [name for name in (*ATTENTION, *WIDER) if result.runs(name)]
        plain = result.mean("plain", "bits")
        reductions = [100 * (1 - result.mean(name, "bits") / plain) for name in names]
        shares = [100 * result.mean(name, "first_token") for name in names]
        errors = (
            [100 * _error(result, name, "bits") / plain for name in names],
            [100 * _error(result, name, "first_token") for name in names],
        )
        published = (
            [loss_reduction(name) for name in names],
            [100 * FIRST_TOKEN[name] if name in FIRST_TOKEN else None for name in names],
        )
        subtitle = (
            "bars: measured here, with errors over seeds; dots: published for 15 billion weights"
        )
        size = (12.0, 0.34 * len(names) + 0.9)
        with canvas.themed_figure(path, "light", size, self.title, subtitle) as (figure, palette):
            panels = figure.subplots(1, 2, sharey=True)
            labels = ("loss below plain, %", "attention on the first token, %")
            for axes, values, error, dots, label in zip(
                panels, (reductions, shares), errors, published, labels, strict=True
            ):
                ticks = {"ecolor": palette.muted, "elinewidth": 1.5}
                color = palette.series[0]
                axes.barh(names, values, xerr=error, color=color, height=0.7, error_kw=ticks)
                reported = [(dot, name) for dot, name in zip(dots, names, strict=True) if dot]
                axes.plot(*zip(*reported, strict=True), "o", color=palette.series[1], markersize=7)
                axes.set_xlabel(label, size=11)
                canvas.style_axes(axes, palette, grid="x")
            panels[0].invert_yaxis()


Judged = tuple[Verdict, str]


def judge_gain(result: Result) -> Judged:
    return _fewer_bits(result, "G1 channel", "plain"), _bits(result, "plain", "G1 channel")


def judge_place(result: Result) -> Judged:
    """The worse of G1 and G2 is still better than the best of G3, G4 and G5."""
    names = [f"G{number} channel" for number in range(1, 6)]
    verdict = _fewer_bits(result, _pick(result, names[:2], max), _pick(result, names[2:], min))
    return verdict, _bits(result, "plain", *names)


def judge_weights(result: Result) -> Judged:
    best = _pick(result, WIDER, min)
    return _fewer_bits(result, "G1 channel", best), _bits(result, "plain", *WIDER, "G1 channel")


def judge_head(result: Result) -> Judged:
    """A gate per head has at least half of the gain of a gate per channel."""
    whole, _ = result.difference("plain", "G1 channel", "bits")
    gain, error = result.difference("plain", "G1 head", "bits")
    gains = judge_gain(result)[0]
    share = f" {gain / whole:.0%} of the gain." if gains is Verdict.HOLDS else ""
    return weakest(gains, compare(gain - whole / 2, error)), _bits(
        result, "plain", "G1 head", "G1 channel"
    ) + share


def judge_shared(result: Result) -> Judged:
    pairs = [(f"{at} channel", f"{at} shared") for at in ("G1", "G2")]
    verdicts = [_fewer_bits(result, own, shared) for own, shared in pairs]
    return weakest(*verdicts), _bits(result, *(name for pair in pairs for name in pair))


def judge_multiply(result: Result) -> Judged:
    others = ("G1 added SiLU", "G1 times SiLU")
    verdict = _fewer_bits(result, "G1 channel", _pick(result, others, min))
    return verdict, _bits(result, "G1 channel", *others)


def judge_nonlinear(result: Result) -> Judged:
    """A norm of the heads helps, and more than SiLU of them."""
    norm, silu = "RMSNorm of heads", "SiLU of heads"
    verdicts = [_fewer_bits(result, norm, worse) for worse in ("plain", silu)]
    return weakest(*verdicts), _bits(result, "plain", silu, norm, "G1 channel")


def judge_sinks(result: Result) -> Judged:
    if (sinks := _sinks(result)) is not Verdict.HOLDS:
        return sinks, _few_sinks(result)
    text = _values(result, "first_token", 3, "plain", "G1 channel")
    return _halved(result, "first_token"), f"share of attention on the first token: {text}."


def judge_activations(result: Result) -> Judged:
    text = _values(result, "mean_largest", 1, "plain", "G1 channel")
    overall = _values(result, "largest", 1, "plain", "G1 channel")
    text = f"mean over layers of the largest activation: {text}; the largest of all: {overall}."
    return _halved(result, "mean_largest"), text


def judge_controls(result: Result) -> Judged:
    """Both controls leave more attention on the first token than the gate does."""
    controls = ("reads nothing", "not sparse")
    if (sinks := _sinks(result)) is not Verdict.HOLDS:
        return sinks, _few_sinks(result)
    verdicts = [compare(*result.difference(name, "G1 channel", "first_token")) for name in controls]
    text = _values(result, "first_token", 3, "plain", *controls, "G1 channel")
    return weakest(*verdicts), f"share of attention on the first token: {text}."


def judge_sparse(result: Result) -> Judged:
    """Below a half of where gates begin, 0.5, holds; below that start at all, weakly."""
    value = result.mean("G1 channel", "gate")
    text = f"mean of the gate: {_values(result, 'gate', 3, *SIGMOIDS)}."
    if not result.runs("G1 channel"):
        return Verdict.OPEN, text
    if value < 0.25:
        return Verdict.HOLDS, text
    return (Verdict.WEAKLY if value < 0.45 else Verdict.NOT_HERE), text


JUDGES: dict[str, Callable[[Result], Judged]] = {
    "gain": judge_gain,
    "place": judge_place,
    "weights": judge_weights,
    "head": judge_head,
    "shared": judge_shared,
    "multiply": judge_multiply,
    "nonlinear": judge_nonlinear,
    "sinks": judge_sinks,
    "activations": judge_activations,
    "controls": judge_controls,
    "sparse": judge_sparse,
}


def _fewer_bits(result: Result, better: str, worse: str) -> Verdict:
    return compare(*result.difference(worse, better, "bits"))


def _pick(result: Result, names: Sequence[str], choose: Callable[..., str]) -> str:
    """The arm with the least or the most bits; one that was not measured comes first."""
    missing = [name for name in names if not result.runs(name)]
    return missing[0] if missing else choose(names, key=lambda name: result.mean(name, "bits"))


def _halved(result: Result, measure: str) -> Verdict:
    """Less than a half with the gate holds; clearly less, weakly."""
    verdict = compare(*result.difference("plain", "G1 channel", measure))
    halved = result.mean("G1 channel", measure) < result.mean("plain", measure) / 2
    return Verdict.WEAKLY if verdict is Verdict.HOLDS and not halved else verdict


def _sinks(result: Result) -> Verdict:
    """Whether the plain model has sinks that a gate could remove."""
    if not result.runs("plain"):
        return Verdict.OPEN
    enough = result.mean("plain", "sink_share") >= LEAST_SINKS
    return Verdict.HOLDS if enough else Verdict.NOT_HERE


def _few_sinks(result: Result) -> str:
    shares = _values(result, "first_token", 3, "plain", "G1 channel")
    return (
        f"the plain model has next to no sinks ({result.text('plain', 'sink_share')} of its heads, "
        f"below {LEAST_SINKS}); share of attention on the first token: {shares}."
    )


def _error(result: Result, name: str, measure: str) -> float:
    """The standard error; of a single seed the spread of the arms that have several."""
    error = result.error(name, measure)
    error = result.spread(measure) if math.isnan(error) else error
    return 0.0 if math.isnan(error) else error


def _bits(result: Result, *names: str) -> str:
    return f"bits per byte: {_values(result, 'bits', 4, *names)}."


def _values(result: Result, measure: str, digits: int, *names: str) -> str:
    return ", ".join(f"{name} {result.text(name, measure, digits=digits)}" for name in names)


STUDY = Gates()
