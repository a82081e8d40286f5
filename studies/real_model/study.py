"""A map of SmolLM2: what its 270 heads are, which are sinks, and what each is worth."""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

import manyheads
from manyheads import lens
from manyheads.formatting import listed, percent
from manyheads.lens.causal.gradient_importance import rank_correlation
from manyheads.lens.inputs.synthetic import default_texts
from manyheads.pictures import canvas
from studies.study import (
    Arm,
    Claim,
    Finding,
    Result,
    Settings,
    Study,
    Values,
    Verdict,
    markdown_table,
)

SINKS = Claim(
    "Language models that have read enough text have sinks: 18.2 % of the heads of a 60M model "
    "give the first token more than 0.3 of their weight.",
    "Gu and others 2025, 2410.10781",
)
ALONE = Claim(
    "Few heads matter alone: 8 of 96 in a model of translation.",
    "Michel and others 2019, 1905.10650",
)
HARMFUL = Claim(
    "Some heads do harm: without them the model is better (4 of those 8).",
    "Michel and others 2019, 1905.10650",
)
PROXY = Claim(
    "The gradient finds the heads that matter: it stands in for ablating each of them.",
    "Michel and others 2019, 1905.10650",
)
INDUCTION = Claim(
    "Induction heads lie above previous-token heads, whose output they read.",
    "Olsson and others 2022, 2209.11895",
)
# The published shares; Gu's threshold of a sink.
SINK_SHARE, SINK_WEIGHT, ALONE_SHARE = 0.182, 0.3, 8 / 96
# A head matters alone if the loss moves by more than a thousandth of it and by two errors.
LEAST_CHANGE, ERRORS = 0.001, 2.0
NAMED = 5
MIXED = "mixed"


class RealModel(Study):
    """Everything that the lens measures of a model that others trained."""

    name: ClassVar[str] = "real_model"
    title: ClassVar[str] = "A map of a real model"
    question: ClassVar[str] = (
        "What the heads of SmolLM2-135M-Instruct do (30 layers of 9), which of them are sinks, and "
        "how much the loss rises without each, on articles and Python's help."
    )
    # Without words heads are tested on random tokens alone: no kinds of brackets and numbers.
    full: ClassVar[Settings] = {
        "model": "smollm2",
        "texts": 16,
        "tokens": 64,
        "sequences": 64,
        "words": True,
    }
    quick: ClassVar[Settings] = {"texts": 4, "tokens": 32, "sequences": 4, "words": False}
    test: ClassVar[Settings] = {
        "model": "house-gpt",
        "texts": 3,
        "tokens": 24,
        "sequences": 2,
        "words": False,
    }
    limits: ClassVar[tuple[str, ...]] = (
        "One model, in the four-bit file that pip can fetch, computed in float32 on a CPU.",
        "Heads are ablated one at a time by zeros; what a pair of them does together is not seen.",
        "Sinks and worth depend on the texts: short English articles and Python's help topics.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        # It needs no GPU, and the model is fetched on one machine.
        options = {"model": settings["model"]}
        names = ("kinds", "weights", "ablation", "gradient")
        return [Arm(name, options=options, device="cpu") for name in names]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        model = manyheads.load(settings["model"], device=device)
        texts = texts_for(model, settings)
        measure: dict[str, Callable[[], Values]] = {
            "kinds": lambda: kinds_of(model, settings["sequences"], words=settings["words"]),
            "weights": lambda: weights_of(model, texts),
            "ablation": lambda: ablation_of(model, texts),
            "gradient": lambda: gradient_of(model, texts),
        }
        return measure[arm.name]()

    def findings(self, result: Result) -> list[Finding]:
        tests = {
            SINKS: sinks,
            ALONE: matter_alone,
            HARMFUL: harmful,
            PROXY: gradient_agrees,
            INDUCTION: induction_above,
        }
        findings = []
        for claim, test in tests.items():
            try:
                findings.append(Finding(claim, *test(result)))
            except KeyError:
                findings.append(Finding(claim, Verdict.OPEN, "Not measured."))
        return findings

    def draw(self, result: Result, path: Path) -> None:
        title = f"The heads of {result.settings['model']}"
        subtitle = "a row per layer, the first at the bottom; a column per head"
        with canvas.themed_figure(path, "light", (13.5, 8.0), title, subtitle) as (figure, palette):
            left, middle, right = figure.subplots(1, 3, width_ratios=(1.3, 1, 1))
            if result.runs("kinds"):
                draw_kinds(left, result.runs("kinds")[0]["labels"], palette)
            for axes, (arm, key, name) in (
                (middle, ("weights", "first_token", "weight on the first token")),
                (right, ("ablation", "change", "loss without the head, in %")),
            ):
                axes.set_title(name, loc="left", size=12, weight="bold")
                if not result.runs(arm):
                    continue
                run = result.runs(arm)[0]
                grid = np.array(run[key], dtype=float)
                if arm == "ablation":
                    grid = 100 * grid / run["loss"]
                    bound = float(np.quantile(np.abs(grid), 0.98)) or 1.0
                    image = axes.imshow(
                        grid, cmap=palette.diverging.reversed(), vmin=-bound, vmax=bound
                    )
                else:
                    image = axes.imshow(grid, cmap=palette.sequential, vmin=0, vmax=1)
                figure.colorbar(image, ax=axes, shrink=0.6)
            for axes in (left, middle, right):
                axes.invert_yaxis()
                axes.set_aspect("auto")
                canvas.style_axes(axes, palette, grid="none")
                axes.set_xlabel("head")
            left.set_ylabel("layer")

    def table(self, result: Result) -> str:
        if not all(map(result.runs, ("kinds", "weights", "ablation"))):
            return "Not all arms were measured."
        labels = result.runs("kinds")[0]["labels"]
        share = np.array(result.runs("weights")[0]["first_token"], dtype=float)
        ablation = result.runs("ablation")[0]
        change = 100 * np.array(ablation["change"], dtype=float) / ablation["loss"]
        rows = []
        for layer, names in enumerate(labels):
            counts = Counter(name for name in names if name != MIXED)
            best = int(np.argmax(change[layer]))
            rows.append(
                [
                    str(layer),
                    ", ".join(f"{count} {name}" for name, count in counts.most_common()) or "-",
                    f"{(share[layer] > SINK_WEIGHT).mean():.0%}",
                    f"{share[layer].mean():.2f}",
                    f"{change[layer].mean():+.2f}",
                    f"L{layer}H{best} {change[layer, best]:+.2f}",
                ]
            )
        header = ["layer", "kinds", "sinks", "on the first token", "loss without a head, %", "most"]
        return markdown_table(header, rows)


def texts_for(model: Any, settings: Settings) -> list[list[int]]:
    """The articles of the package, then Python's help, as ids of at most so many tokens."""
    from pydoc_data.topics import topics

    texts = [*default_texts(model), *(topics[key] for key in sorted(topics))]
    ids = [model.tokenizer.encode(text).ids[: settings["tokens"]] for text in texts]
    whole = [row for row in ids if len(row) == settings["tokens"]]
    return whole[: settings["texts"]]


def by_layer(result: Any, name: str) -> list[list[float]]:
    """A measure as a row per layer."""
    rows: dict[int, list[float]] = {}
    for address, value in zip(result.addresses, result.means[name], strict=True):
        rows.setdefault(address.head.layer, []).append(round(float(value), 6))
    return [rows[layer] for layer in sorted(rows)]


def kinds_of(model: Any, sequences: int, *, words: bool) -> Values:
    model.tokenizer = model.tokenizer if words else None
    kinds = lens.kinds(model, sequences=sequences, progress=False)
    rows: dict[int, list[str]] = {}
    for address, labels in kinds.labels.items():
        rows.setdefault(address.head.layer, []).append(labels[0].kind if labels else MIXED)
    every = Counter(kind for own in kinds.labels.values() for kind in {one.kind for one in own})
    layers = {
        kind: sorted({address.head.layer for address in kinds.heads(kind)})
        for kind in ("previous-token", "induction")
    }
    return {"labels": [rows[layer] for layer in sorted(rows)], "counts": dict(every), **layers}


def weights_of(model: Any, texts: list[list[int]]) -> Values:
    measured = lens.statistics(model, texts, progress=False)
    return {name: by_layer(measured, name) for name in ("first_token", "entropy", "output_share")}


def ablation_of(model: Any, texts: list[list[int]]) -> Values:
    ablation = lens.ablate(model, texts, progress=False)
    errors = iter(np.nan_to_num(ablation.errors["change"]).tolist())
    change = by_layer(ablation, "change")
    return {
        "loss": ablation.baseline,
        "change": change,
        "error": [[round(next(errors), 6) for _ in row] for row in change],
    }


def gradient_of(model: Any, texts: list[list[int]]) -> Values:
    return {"importance": by_layer(lens.importance(model, texts, progress=False), "importance")}


def grid(result: Result, arm: str, key: str) -> np.ndarray:
    """By layer and head; a KeyError if it was not measured."""
    return np.array(result.arms[arm]["0"][key], dtype=float)


def names_of(mask: np.ndarray, order: np.ndarray) -> str:
    """The heads of a mask, those with the largest values first."""
    heads = sorted(zip(*np.nonzero(mask), strict=True), key=lambda head: -order[head])
    return listed([f"L{layer}H{head}" for layer, head in heads], NAMED)


def sinks(result: Result) -> tuple[Verdict, str]:
    share = grid(result, "weights", "first_token")
    mask = share > SINK_WEIGHT
    part = float(mask.mean())
    verdict = Verdict.HOLDS if part >= SINK_SHARE else Verdict.WEAKLY
    by_third = [percent(float(rows.mean())) for rows in np.array_split(mask, 3)]
    return verdict if part > SINK_SHARE / 4 else Verdict.NOT_HERE, (
        f"{mask.sum()} of {mask.size} heads ({part:.0%}) give the first token more than "
        f"{SINK_WEIGHT} of their weight, {share.mean():.2f} on average; by thirds of the layers "
        f"{by_third[0]}, {by_third[1]} and {by_third[2]}."
    )


def mattering(result: Result) -> tuple[np.ndarray, np.ndarray]:
    """The change of the loss as a fraction, and which heads change it for sure."""
    loss = result.arms["ablation"]["0"]["loss"]
    change, error = grid(result, "ablation", "change"), grid(result, "ablation", "error")
    return change / loss, np.abs(change) > np.maximum(LEAST_CHANGE * loss, ERRORS * error)


def matter_alone(result: Result) -> tuple[Verdict, str]:
    change, moves = mattering(result)
    part, large = float(moves.mean()), change > 0.01
    verdict = Verdict.HOLDS if part <= 2 * ALONE_SHARE else Verdict.WEAKLY
    return verdict if part <= 0.5 else Verdict.CONTRADICTED, (
        f"Without one head the loss changes by more than {LEAST_CHANGE:.1%} and {ERRORS:.0f} "
        f"standard errors for {moves.sum()} of {moves.size} heads ({part:.0%}); it rises by more "
        f"than 1 % for {large.sum()}" + (f": {names_of(large, change)}." if large.any() else ".")
    )


def harmful(result: Result) -> tuple[Verdict, str]:
    change, moves = mattering(result)
    better = moves & (change < 0)
    share = better.sum() / max(1, moves.sum())
    verdict = Verdict.HOLDS if share >= 0.25 else Verdict.WEAKLY
    best = f"; the most, {names_of(better, -change)}" if better.any() else ""
    return verdict if better.any() else Verdict.CONTRADICTED, (
        f"Without {better.sum()} of the {moves.sum()} heads that matter alone the loss is lower "
        f"(by at most {max(0.0, -float(change.min())):.2%}){best}."
    )


def gradient_agrees(result: Result) -> tuple[Verdict, str]:
    change, _ = mattering(result)
    importance = grid(result, "gradient", "importance")
    rank = rank_correlation(importance.ravel(), np.abs(change).ravel())
    count = max(1, change.size // 10)
    top = [set(np.argsort(-values.ravel())[:count]) for values in (importance, change)]
    both = len(top[0] & top[1])
    verdict = Verdict.HOLDS if rank > 0.5 else Verdict.WEAKLY
    verdict = verdict if rank > 0.2 else Verdict.CONTRADICTED
    return Verdict.OPEN if math.isnan(rank) else verdict, (
        f"The ranks of gradient and ablation correlate by {rank:.2f}; of the {count} heads that "
        f"ablation finds most important, the gradient has {both} among its own {count}."
    )


def induction_above(result: Result) -> tuple[Verdict, str]:
    run = result.arms["kinds"]["0"]
    previous, induction = run["previous-token"], run["induction"]
    if not previous or not induction:
        lacking = "previous-token" if not previous else "induction"
        return Verdict.NOT_HERE, f"No head of the model is labeled {lacking}."
    above = sum(layer > previous[0] for layer in induction) / len(induction)
    verdict = Verdict.HOLDS if above == 1 else Verdict.WEAKLY
    counts = run["counts"]
    return verdict if above > 0.5 else Verdict.CONTRADICTED, (
        f"{counts['previous-token']} previous-token heads from layer {previous[0]} on, "
        f"{counts['induction']} induction heads from layer {induction[0]} on; {above:.0%} of the "
        f"layers with induction heads lie above the first previous-token head."
    )


def draw_kinds(axes: Any, labels: list[list[str]], palette: Any) -> None:
    """Colors by kind, mixed heads left blank; the legend counts them."""
    counts = Counter(name for row in labels for name in row if name != MIXED)
    names = [name for name, _ in counts.most_common(len(palette.series))]
    axes.set_xlim(-0.5, max(map(len, labels)) - 0.5)
    axes.set_ylim(len(labels) - 0.5, -0.5)
    for name, color in zip(names, palette.series, strict=False):
        points = [
            (head, layer)
            for layer, row in enumerate(labels)
            for head, kind in enumerate(row)
            if kind == name
        ]
        columns, rows = zip(*points, strict=True)
        axes.scatter(
            columns, rows, marker="s", s=60, color=color, label=f"{name}, {len(points)}", zorder=2
        )
    if names:
        axes.legend(
            frameon=False, loc="upper left", bbox_to_anchor=(1.0, 1.0), labelcolor=palette.text
        )
    axes.set_title("kind (the most specific)", loc="left", size=12, weight="bold")


STUDY = RealModel()
