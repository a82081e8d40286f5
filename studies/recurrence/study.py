"""LSTM against attention: what far tokens are worth, how they are reached, and at what speed."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from manyheads.mixers import Lstm
from manyheads.models import Decoder
from manyheads.pictures import canvas
from studies.decoding_times import cached_ms, growth_exponent
from studies.recurrence.patterns import (
    LETTERS,
    PatternTexts,
    gradient_by_distance,
    loss_with_patterns,
    recalled,
)
from studies.small_models import count_parameters, language_model, matched_model
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
from studies.training import Recipe, Trainer, bits_per_byte, loss_by_position, smooth

ATTENTION, LSTM, TIMES = "attention", "LSTM", "time"
MODELS = (ATTENTION, LSTM)
# What is timed: on CUDA attention with recorded steps too.
RECORDED = "attention, recorded"
# Differences that count: bits per byte, shares, and powers of ten of gradients.
LEAST_BITS, LEAST_SHARE, LEAST_POWERS = 0.01, 0.05, 0.1
# Up to so many bits per byte apart, models are as good early in a text.
AS_GOOD = 0.05
# A model that recalls less of near patterns has not learned to.
LEARNED = 0.5
# So many times as fast is faster, or hardly; exponents of growth that differ, or hardly.
FASTER, HARDLY = 1.5, 1.1
CLEAR_GROWTH, HARDLY_GROWTH = 0.3, 0.1
POINTS = 32
# For steps whose time is all that counts.
LOW_RATE = 1e-4

LATER = Claim(
    "An LSTM is as good as attention for tokens early in the context, and worse for later ones",
    "Kaplan and others 2020, arXiv 2001.08361, figure 7; from memory",
)
CONTEXT = Claim(
    "An LSTM uses about 200 tokens of context, and the order only of the nearest 50; attention "
    "gains from more",
    "Khandelwal and others 2018, arXiv 1805.04623; Kaplan and others 2020; from memory",
)
PATH = Claim(
    "Any two tokens are one step apart in attention, and n steps in a recurrent layer: gradients "
    "of far tokens pass more easily",
    "Vaswani and others 2017, arXiv 1706.03762, table 1",
)
RECALL = Claim(
    "What was read far back is recalled by attention at any distance, and lost in a state of "
    "fixed size",
    "arXiv 1706.03762, section 4; arXiv 1805.04623; no figure for patterns of bytes",
)
PARALLEL = Claim(
    "A layer of attention takes one sequential step and a recurrent one n, so that attention "
    "trains faster",
    "arXiv 1706.03762, table 1",
)
STEADY = Claim(
    "A token costs a recurrent layer the same after any text, and attention more after a long one",
    "arXiv 1706.03762, table 1 (n d^2 against n^2 d for n tokens)",
)


class Recurrence(Study):
    """The same decoder with attention or with an LSTM in its layers."""

    name = "recurrence"
    title = "LSTM against attention"
    question = (
        "Decoders of equal width, depth and weights whose layers mix tokens by attention or by an "
        "LSTM, trained on the same bytes, half of them with a pattern of letters that comes twice. "
        "Loss by position and by length of context, recall of the pattern by distance, the "
        "gradient that reaches far tokens, and the time of training and generation."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 4,
        "heads": 4,
        "seeds": 3,
        "length": 512,
        "batch": 64,
        "steps": 2000,
        "rates": {ATTENTION: [5e-4, 1e-3, 2e-3], LSTM: [2e-3, 4e-3]},
        "warm_up": 100,
        "passages": 512,
        "contexts": [16, 32, 64, 128, 256, 448],
        "judged": 64,
        "near": 128,
        "distances": [16, 32, 64, 128, 256, 448],
        "texts": 64,
        "timed_steps": 40,
        "generated": {"width": 1024, "layers": 4, "heads": 8, "batch": 16},
        "lengths": [512, 1024, 2048, 4096, 8192],
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "heads": 2,
        "seeds": 2,
        "length": 128,
        "batch": 8,
        "steps": 250,
        "rates": {ATTENTION: [4e-3], LSTM: [4e-3]},
        "warm_up": 20,
        "passages": 32,
        "contexts": [8, 16, 32, 64, 112],
        "judged": 16,
        "near": 32,
        "distances": [16, 32, 64, 112],
        "texts": 16,
        "timed_steps": 12,
        "generated": {"width": 128, "layers": 2, "heads": 4, "batch": 4},
        "lengths": [128, 256, 512, 1024],
    }
    test: ClassVar[Settings] = {
        **quick,
        "limit": 20_000,
        "width": 16,
        "layers": 1,
        "seeds": 1,
        "length": 32,
        "batch": 2,
        "steps": 3,
        "passages": 2,
        "contexts": [4, 8, 24],
        "judged": 8,
        "near": 8,
        "distances": [12, 20],
        "texts": 2,
        "timed_steps": 2,
        "generated": {"width": 16, "layers": 1, "heads": 2, "batch": 1},
        "lengths": [8, 16],
    }
    limits = (
        "Byte models of three million weights after 2,000 steps. The published LSTMs read words or "
        "word pieces, 200 of which are about a thousand bytes: more than our passages have, so "
        "that only the order of the two models can be compared. Shuffled context is not measured.",
        "The LSTM stands where attention stood, between norms and feed-forwards that attention "
        "models have; its feed-forwards are narrower by what it has more. It computes in float32, "
        "attention in bfloat16 on a GPU. Each is judged at the best of its rates in the table, "
        "chosen by the same held-out text: the bits of both are a little too good.",
        "Half of the training passages have a pattern, whose letters together weigh as much as all "
        "text; held-out text has none.",
        "On a GPU the LSTM trains and generates without recorded steps; attention is timed with "
        "and without. The claim on training compares both without; that on more tokens takes "
        "attention with, since launching kernels hides how its work grows.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        arms = [
            Arm(f"{name} at {rate:g}", seed, {"kind": name, "lr": rate})
            for name, rates in settings["rates"].items()
            for rate in rates
            for seed in range(settings["seeds"])
        ]
        return [*arms, Arm(TIMES, alone=True)]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        if arm.name == TIMES:
            return measure_times(settings, device)
        length, count = settings["length"], settings["passages"]
        model = make_model(arm.options["kind"], settings, arm.seed).to(device)
        texts = PatternTexts(settings["text"], device, settings["limit"])
        recipe = Recipe(
            steps=settings["steps"],
            lr=arm.options["lr"],
            warm_up=settings["warm_up"],
            recorded=arm.options["kind"] == ATTENTION,
        )
        _train(model, texts, settings, recipe, arm)
        passages = texts.held_out(count, length)
        curve = [loss / math.log(2) for loss in loss_by_position(model, passages)]
        by_context = bits_by_context(model, passages, settings)
        return {
            "parameters": count_parameters(model),
            "bits": bits_per_byte(model, passages),
            "by position": smooth(curve, max(1, length // POINTS)),
            # The context that `near` leaves is as long as the first bytes of a text have.
            "early": _mean(curve[: settings["near"] // 4]),
            "late": _mean(curve[length // 2 :]),
            "by context": by_context,
            "far gain": by_context[str(settings["near"])] - list(by_context.values())[-1],
            "recall": {
                str(distance): recalled(model, texts.patterns_at(distance, count, length))
                for distance in settings["distances"]
            },
            **gradient_measures(gradient_by_distance(model, passages[: settings["texts"]])),
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        result = at_best_rates(result)
        far, near = (str(result.settings["distances"][index]) for index in (-1, 0))

        def both(*path: str, digits: int = 3) -> str:
            return ", ".join(f"{name} {result.text(name, *path, digits=digits)}" for name in MODELS)

        gain = result.difference(ATTENTION, LSTM, "far gain")
        gradient = result.difference(ATTENTION, LSTM, "far gradient")
        contexts: list[int] = result.settings["contexts"]
        return [
            Finding(
                LATER,
                _falls_behind(
                    result.difference(LSTM, ATTENTION, "early"),
                    result.difference(LSTM, ATTENTION, "late"),
                ),
                f"Bits per byte of the first {result.settings['near'] // 4} bytes: "
                f"{both('early')}; of the second half of {result.settings['length']}: "
                f"{both('late')}.",
            ),
            Finding(
                CONTEXT,
                compare(*gain, least=LEAST_BITS),
                f"Bits per byte gained by a context of {contexts[-1]} instead of "
                f"{result.settings['near']} bytes: {both('far gain')}.",
            ),
            Finding(
                PATH,
                compare(*gradient, least=LEAST_POWERS),
                "Gradient of a prediction by bytes of the farther half over that by the nearest "
                f"eight, as a power of ten: {both('far gradient', digits=2)}.",
            ),
            Finding(
                RECALL,
                _recalls(
                    result.mean(ATTENTION, "recall", near),
                    result.difference(ATTENTION, LSTM, "recall", far),
                ),
                f"Letters of a pattern of {LETTERS} that are recalled {far} bytes later: "
                f"{both('recall', far)}; {near} bytes later: {both('recall', near)}.",
            ),
            self._speed(result),
            self._steady(result),
        ]

    def _speed(self, result: Result) -> Finding:
        rates = {name: result.mean(TIMES, name, "trained per s") for name in (*MODELS, RECORDED)}
        listed = ", ".join(
            f"{name} {rate:,.0f}" for name, rate in rates.items() if not math.isnan(rate)
        )
        ratio = rates[ATTENTION] / rates[LSTM]
        return Finding(
            PARALLEL,
            _above(ratio, FASTER, HARDLY, 1 / HARDLY),
            f"Tokens per second of training: {listed or 'not measured'}; without recorded steps "
            f"attention is {ratio:.1f} times as fast.",
        )

    def _steady(self, result: Result) -> Finding:
        short, *_, long = map(str, result.settings["lengths"])
        # Without recorded steps, the time of launching kernels hides what attention computes.
        timed = RECORDED if RECORDED in next(iter(result.runs(TIMES)), {}) else ATTENTION
        growth = [result.mean(TIMES, name, "exponent") for name in (timed, LSTM)]
        texts = []
        for name in (*MODELS, RECORDED):
            times = [result.mean(TIMES, name, "token ms", length) for length in (short, long)]
            if not any(map(math.isnan, times)):
                rate = result.settings["generated"]["batch"] / times[1] * 1000
                texts.append(
                    f"{name} {times[0]:.2f} and {times[1]:.2f} ms, exponent "
                    f"{result.text(TIMES, name, 'exponent', digits=2)}, {rate:,.0f} tokens per "
                    "second at the end"
                )
        return Finding(
            STEADY,
            _above(growth[0] - growth[1], CLEAR_GROWTH, HARDLY_GROWTH, -HARDLY_GROWTH),
            f"Time of one more token of {result.settings['generated']['batch']} texts after "
            f"{short} and {long} others: {'; '.join(texts) or 'not measured'}. The exponents of "
            f"{timed} and the LSTM differ by {growth[0] - growth[1]:.2f}.",
        )

    def draw(self, result: Result, path: Path) -> None:
        result = at_best_rates(result)
        title, subtitle = "LSTM against attention", "equal width, depth and weights"
        with canvas.themed_figure(path, "light", (12.5, 8.0), title, subtitle) as (figure, colors):
            grid = figure.subplots(2, 2)
            (loss, recall), (gradient, speed) = grid
            length = result.settings["length"]
            for name, color in zip((*MODELS, RECORDED), colors.series, strict=False):
                style: dict[str, Any] = {"color": color, "linewidth": 2, "label": name}
                curves = [values["by position"] for values in result.runs(name) if name in MODELS]
                if curves:
                    means = [_mean(values) for values in zip(*curves, strict=True)]
                    window = max(1, length // POINTS)
                    loss.plot([window * (at + 0.5) for at in range(len(means))], means, **style)
                for axes, arm, place in (
                    (recall, name, ("recall",)),
                    (gradient, name, ("gradient",)),
                    (speed, TIMES, (name, "token ms")),
                ):
                    points = _points(result, arm, *place)
                    if points:
                        axes.plot(points.keys(), points.values(), "o-", markersize=4, **style)
            titles = {
                loss: ("bits per byte by position", "bytes before"),
                recall: ("letters recalled", "distance of the pattern"),
                gradient: ("gradient, nearest eight = 1", "distance"),
                speed: ("ms of one more token", "tokens before"),
            }
            for axes, (name, label) in titles.items():
                canvas.style_axes(axes, colors)
                axes.set_title(name, loc="left", size=12, weight="bold")
                axes.set_xlabel(label)
                axes.set_xscale("log", base=2)
                axes.xaxis.set_major_formatter("{x:,.0f}")
                axes.legend(frameon=False)
            recall.set_ylim(-0.02, 1.02)
            recall.yaxis.set_major_formatter("{x:.0%}")
            gradient.set_yscale("log")
            gradient.yaxis.set_major_formatter("{x:g}")
            gradient.minorticks_off()
            speed.set_ylim(bottom=0)

    def table(self, result: Result) -> str:
        tried = [[arm, result.text(arm, "bits")] for arm in result.arms if arm != TIMES]
        rates = markdown_table(["trained", "bits per byte"], tried)
        return f"{self._table_at_best_rates(at_best_rates(result))}\n\n{rates}"

    def _table_at_best_rates(self, result: Result) -> str:
        contexts, distances = result.settings["contexts"], result.settings["distances"]
        rows = [
            ["weights", *(f"{result.mean(name, 'parameters'):,.0f}" for name in MODELS)],
            *(
                [label, *(result.text(name, *path) for name in MODELS)]
                for label, path in {
                    "bits per byte": ("bits",),
                    "bits, early": ("early",),
                    "bits, late": ("late",),
                    **{f"bits, context {n}": ("by context", str(n)) for n in contexts},
                    **{f"recall at {n}": ("recall", str(n)) for n in distances},
                    "far gradient, power of ten": ("far gradient",),
                }.items()
            ),
            *(
                [label, *(result.text(TIMES, name, *path, digits=digits) for name in MODELS)]
                for label, path, digits in [
                    ("trained tokens per second", ("trained per s",), 0),
                    *(
                        (f"ms of a token after {n:,}", ("token ms", str(n)), 2)
                        for n in result.settings["lengths"]
                    ),
                    ("exponent of growth", ("exponent",), 2),
                    ("MiB of cache or state per text", ("state MiB",), 3),
                ]
            ),
        ]
        return markdown_table(["", *MODELS], rows)


def at_best_rates(result: Result) -> Result:
    """Each kind of model under its own name, at the rate that gave the fewest bits."""
    best = {TIMES: result.arms.get(TIMES, {})}
    for kind in MODELS:
        arms = [arm for arm in result.arms if arm.startswith(f"{kind} at ")]
        if arms:
            best[kind] = result.arms[min(arms, key=lambda arm: _bits_or_inf(result, arm))]
    return replace(result, arms=best)


def _bits_or_inf(result: Result, arm: str) -> float:
    bits = result.mean(arm, "bits")
    return math.inf if math.isnan(bits) else bits


def make_model(name: str, settings: Settings, seed: int) -> Decoder:
    """Both have the weights of attention, the LSTM in narrower feed-forwards."""
    width, layers, heads = settings["width"], settings["layers"], settings["heads"]
    model = language_model(width=width, layers=layers, heads=heads, seed=seed)
    if name != LSTM:
        return model
    mixers = [Lstm(width=width)] * layers
    return matched_model(
        count_parameters(model), width=width, layers=layers, heads=heads, mixers=mixers, seed=seed
    )


def _train(
    model: Decoder, texts: PatternTexts, settings: Settings, recipe: Recipe, arm: Arm
) -> float:
    """The seconds of a step."""
    batches = texts.pattern_batches(settings["batch"], settings["length"], arm.seed)
    return Trainer(model, recipe, loss_with_patterns).run(batches, arm.key).seconds_per_step


def measure_times(settings: Settings, device: str) -> Values:
    """Tokens per second of training, and the time of a generated token by length."""
    texts = PatternTexts(settings["text"], device, settings["limit"])
    ways = dict.fromkeys(MODELS, False) | ({RECORDED: True} if device == "cuda" else {})
    generated, values = settings["generated"], {}
    for name, recorded in ways.items():
        model = make_model(name, settings, 0).to(device)
        recipe = Recipe(steps=settings["timed_steps"], lr=LOW_RATE, recorded=recorded)
        seconds = _train(model, texts, settings, recipe, Arm(name))
        model = make_model(name, generated, 0).to(device).eval()
        times, size = {}, 0.0
        for length in settings["lengths"]:
            times[str(length)], size = cached_ms(
                model, generated["batch"], length, recorded=recorded
            )
            size *= length / 2**20
        values[name] = {
            "trained per s": settings["batch"] * settings["length"] / seconds,
            "token ms": times,
            "exponent": growth_exponent(times),
            "state MiB": size,
        }
    return values


def bits_by_context(model: Decoder, passages: Tensor, settings: Settings) -> dict[str, float]:
    """Bits per byte of the last bytes of passages, which follow so many others."""
    judged, bits = settings["judged"], {}
    for context in settings["contexts"]:
        losses = loss_by_position(model, passages[:, -context - judged - 1 :])
        bits[str(context)] = _mean(losses[context:]) / math.log(2)
    return bits


def gradient_measures(norms: Tensor) -> Values:
    """Norms by distance, over that of the nearest eight, and how far below it the far half is."""
    nearest = norms[:8].mean()
    edges = [2**power for power in range(3, 12) if 2 ** (power + 1) <= len(norms)]
    bins = {str(edge): float(norms[edge : 2 * edge].mean() / nearest) for edge in edges}
    far = float((norms[len(norms) // 2 :].mean() / nearest).log10())
    return {"gradient": bins, "far gradient": far}


def _falls_behind(early: tuple[float, float], late: tuple[float, float]) -> Verdict:
    """Worse later, by more than early; weakly if it is worse early too."""
    more = late[0] - early[0], math.hypot(early[1], late[1])
    verdict = weakest(compare(*late, least=LEAST_BITS), compare(*more, least=LEAST_BITS))
    return Verdict.WEAKLY if verdict is Verdict.HOLDS and early[0] > AS_GOOD else verdict


def _recalls(near: float, difference: tuple[float, float]) -> Verdict:
    """More of far patterns, if near ones are recalled at all."""
    verdict = compare(*difference, least=LEAST_SHARE)
    return Verdict.NOT_HERE if near < LEARNED else verdict


def _above(value: float, clear: float, hardly: float, below: float) -> Verdict:
    if math.isnan(value):
        return Verdict.OPEN
    if value >= hardly:
        return Verdict.HOLDS if value >= clear else Verdict.WEAKLY
    return Verdict.CONTRADICTED if value < below else Verdict.NOT_HERE


def _points(result: Result, arm: str, *path: str) -> Mapping[int, float]:
    keys: dict[str, Any] = next(iter(result.runs(arm)), {})
    for part in path:
        keys = keys.get(part, {})
    return {int(key): result.mean(arm, *path, key) for key in keys}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


STUDY = Recurrence()
