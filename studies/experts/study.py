"""Mixtures of experts against dense models of equal compute and of equal weights."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from manyheads.models import Decoder
from manyheads.parts import Experts, SwiGLU
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.experts.judges import (
    CLAIMS,
    DENSE,
    DOUBLED,
    FOURFOLD,
    JUDGES,
    MAIN,
    ONE,
    REPEATED,
    ROUTED,
    STRICT,
    TIMES,
    UNBALANCED,
    WHOLE,
)
from studies.experts.routing import (
    balanced_loss,
    find_routes,
    measure_choices,
    measure_loads,
    overlap,
    read_documents,
    write_routes,
)
from studies.small_models import count_parameters, language_model
from studies.study import Arm, Finding, Result, Settings, Study, Values, markdown_table
from studies.training import Recipe, Trainer, TrainingLog, bits_per_byte

# What changes of the settings, by arm.
CHANGES: dict[str, dict[str, float]] = {
    MAIN: {},
    UNBALANCED: {"balance": 0},
    STRICT: {"balance": 10},
    DOUBLED: {"count": 2},
    FOURFOLD: {"count": 4},
}


def feedforward_of(name: str, settings: Settings) -> SwiGLU | Experts:
    """What an arm has for feed-forwards; all but one compute as much as `top_k` experts."""
    width, hidden = settings["width"], settings["hidden"]
    count, top_k = settings["count"], settings["top_k"]
    if name in (DENSE, WHOLE):
        return SwiGLU(width=width, hidden=hidden * (count if name == WHOLE else top_k))
    if name == ONE:
        return Experts(width=width, hidden=hidden * top_k, count=count // top_k, top_k=1)
    count *= int(CHANGES[name].get("count", 1))
    return Experts(width=width, hidden=hidden, count=count, top_k=top_k)


class ExpertsStudy(Study):
    name = "experts"
    title = "Experts"
    question = (
        "Small decoders of bytes whose feed-forwards are eight experts, two for each byte, against "
        "dense ones of equal compute and of equal weights: loss, balance with and without the "
        "balancing loss, dead experts, and what the choice of an expert depends on."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 4,
        "heads": 4,
        # Of one expert.
        "hidden": 344,
        "count": 8,
        "top_k": 2,
        "balance": 0.01,
        "length": 256,
        "batch": 32,
        "steps": 1500,
        "lr": 1e-3,
        "warm_up": 100,
        "recorded": True,
        "held_out": 512,
        "documents": 16,
        "passages": 16,
        "routes": 1000,
        "timed_steps": 60,
        "seeds": [0, 1, 2],
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "heads": 4,
        "hidden": 88,
        "length": 64,
        "batch": 8,
        "steps": 150,
        "lr": 3e-3,
        "warm_up": 20,
        "held_out": 32,
        "documents": 8,
        "passages": 4,
        "timed_steps": 20,
        "seeds": [0, 1],
    }
    test: ClassVar[Settings] = {
        **quick,
        "limit": 20_000,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "hidden": 8,
        "length": 16,
        "batch": 2,
        "steps": 10,
        "warm_up": 2,
        "held_out": 2,
        "documents": 2,
        "passages": 2,
        "timed_steps": 2,
        "seeds": [0],
    }
    limits = (
        "Models of three to twenty million weights that read twelve million bytes; the published "
        "ones have billions and read billions of tokens. Tokens are bytes, so that syntax is that "
        "of letters, digits and markup.",
        "Equal compute counts multiplications: routing takes time of its own, which is measured.",
        "Balance by biases (arXiv 2408.15664) is not measured, as the library does not train with "
        "them; nor are limits on what an expert takes.",
        "Documents are stretches of four thousand bytes, far apart in the held-out text: articles, "
        "not topics that somebody has named.",
        "A router sees the byte itself, so that choices depend on it before any training; the "
        "page has both.",
        "Three seeds for the dense models and for experts with and without balance; the other arms "
        "have one, and take their error from the spread of those.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        first, *others = settings["seeds"]
        return [
            *(Arm(name, first) for name in (WHOLE, DENSE, *ROUTED)),
            *(Arm(name, seed) for seed in others for name in REPEATED),
            Arm(TIMES, alone=True),
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        texts = ByteTexts(settings["text"], device, settings["limit"])
        if arm.name == TIMES:
            steps, ids = settings["timed_steps"], texts.held_out(1, settings["length"])
            logs = {
                name: train(Arm(name), {**settings, "steps": steps}, texts, ids)[1]
                for name in (DENSE, WHOLE, MAIN)
            }
            return {name: 1000 * log.seconds_per_step for name, log in logs.items()}
        documents, length = settings["documents"], settings["length"]
        ids = read_documents(texts, documents, settings["passages"], length)
        model, log = train(arm, settings, texts, ids)
        inner = feedforward_of(arm.name, settings)
        values: Values = {
            "bits": bits_per_byte(model, texts.held_out(settings["held_out"], length)),
            **count_weights(model, inner),
        }
        if isinstance(inner, Experts):
            start, tenth, later, end = log.watched.values()
            values |= measure_loads(end, inner.count)
            values["choices"] = measure_choices(end, ids, documents)
            values["untrained"] = measure_choices(start, ids, documents)
            marks = {"start": start, "tenth": tenth, "two fifths": later}
            values["settled"] = {name: overlap(routes, end) for name, routes in marks.items()}
            values["routes"] = write_routes(end, settings["routes"])
        return values

    def findings(self, result: Result) -> Sequence[Finding]:
        return [Finding(claim, *JUDGES[key](result)) for key, claim in CLAIMS.items()]

    def table(self, result: Result) -> str:
        measures: dict[str, tuple[tuple[str, ...], int]] = {
            "bits per byte": (("bits",), 4),
            "weights, millions": (("weights",), 2),
            "active": (("active",), 2),
            "busiest above the mean": (("violation",), 2),
            "evenness": (("evenness",), 3),
            "dead": (("dead",), 3),
            "choice by class": (("choices", "class"), 3),
            "by byte": (("choices", "byte"), 3),
            "by document": (("choices", "document"), 3),
            "repeated": (("choices", "repeated"), 3),
            "settled at 10 %": (("settled", "tenth"), 3),
        }
        rows = [
            [
                name,
                *(
                    result.text(name, *path, digits=digits) if result.each(name, *path) else ""
                    for path, digits in measures.values()
                ),
            ]
            for name in (DENSE, WHOLE, *ROUTED)
            if result.runs(name)
        ]
        return markdown_table(["arm", *measures], rows)

    def draw(self, result: Result, path: Path) -> None:
        subtitle = (
            "diamonds: means over seeds. Right: shares of entropy by layer; dotted: untrained"
        )
        with canvas.themed_figure(path, "light", (16.0, 4.4), self.title, subtitle) as (
            figure,
            palette,
        ):
            left, middle, right = figure.subplots(1, 3, width_ratios=(1.2, 1, 1))
            names = [name for name in (DENSE, WHOLE, *ROUTED) if result.runs(name)]
            for row, name in enumerate(names):
                color = palette.series[1 if name in (DENSE, WHOLE) else 0]
                bits = result.each(name, "bits")
                left.plot(bits, [row] * len(bits), "o", color=color, alpha=0.5)
                left.plot(result.mean(name, "bits"), row, "D", color=color, markersize=8)
            left.set_yticks(range(len(names)), names)
            left.invert_yaxis()
            left.set_title("bits per byte", loc="left", size=12, weight="bold")
            routed = [name for name in ROUTED if result.runs(name)]
            loads = [result.mean(name, "violation") for name in routed]
            middle.barh(routed, loads, color=palette.series[0], height=0.6)
            middle.invert_yaxis()
            middle.set_title("busiest expert above the mean", loc="left", size=12, weight="bold")
            for name, color in zip(("class", "byte", "document"), palette.series, strict=False):
                for state, style in (("choices", "o-"), ("untrained", "o:")):
                    layers = [run[state]["layers"][name] for run in result.runs(MAIN)]
                    means = [sum(values) / len(values) for values in zip(*layers, strict=True)]
                    label = name if state == "choices" else None
                    numbers = range(1, 1 + len(means))
                    right.plot(numbers, means, style, color=color, linewidth=2, label=label)
            right.set_title("what determines the choice", loc="left", size=12, weight="bold")
            right.set_xlabel("layer")
            right.set_ylim(bottom=0)
            right.set_xticks(range(1, 1 + result.settings["layers"]))
            right.legend(frameon=False)
            for axes, grid in ((left, "x"), (middle, "x"), (right, "y")):
                canvas.style_axes(axes, palette, grid=grid)


def train(
    arm: Arm, settings: Settings, texts: ByteTexts, ids: Tensor
) -> tuple[Decoder, TrainingLog]:
    """The model of an arm, and its routes before, at 10 and 40 % of the steps, and at the end."""
    inner, steps = feedforward_of(arm.name, settings), settings["steps"]
    shape = {key: settings[key] for key in ("width", "layers", "heads")}
    model = language_model(**shape, feedforward=inner, seed=arm.seed).to(texts.device)
    recipe = Recipe(
        steps=steps,
        lr=settings["lr"],
        warm_up=settings["warm_up"],
        recorded=settings["recorded"],
    )
    watch = {}
    if isinstance(inner, Experts):
        marks = (0, steps // 10, 2 * steps // 5, steps)
        watch = dict.fromkeys(marks, lambda model: find_routes(model, ids))
    weight = settings["balance"] * CHANGES.get(arm.name, {}).get("balance", 1)
    batches = texts.batches(settings["batch"], settings["length"], arm.seed)
    return model, Trainer(model, recipe, balanced_loss(weight)).run(batches, arm.key, watch)


def count_weights(model: Decoder, inner: Any) -> dict[str, float]:
    """All weights of the layers and those that a byte passes, in millions."""
    weights = count_parameters(model)
    idle = inner.count - inner.top_k if isinstance(inner, Experts) else 0
    unused = len(model.stack.layers) * idle * 3 * inner.width * inner.hidden
    return {"weights": weights / 1e6, "active": (weights - unused) / 1e6}


STUDY = ExpertsStudy()
