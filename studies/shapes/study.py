"""Shapes of encoders: does what tiles and multiprocessors promise show on the clock?"""

import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from manyheads.formatting import pluralise
from manyheads.lens.causal.gradient_importance import rank_correlation
from manyheads.pictures import canvas
from manyheads.train.shape_search import EncoderShape, RankedShape, measure_shape, search_shapes
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

PREDICTED = Claim(
    "The speed of a shape can be predicted from how its matrices fill tiles and multiprocessors.",
    "ModernBERT appendix B, 2412.13663; Anthony and others, 2401.14489",
)
FASTER = Claim(
    "At equal size, good shapes are up to 39 % faster than others.",
    "Anthony and others, 2401.14489",
)
MODERNBERT = Claim(
    "22 x 768 x 1,152 uses the hardware well among models of its size and depth.",
    "ModernBERT appendix B, 2412.13663",
)
BASE = EncoderShape(22, 768, 1152)
PLACES = {"cuda": "H200", "cpu": "CPU"}


class Shapes(Study):
    """A sample of shapes of equal size, predicted and timed on a GPU and on a CPU."""

    name: ClassVar[str] = "shapes"
    title: ClassVar[str] = "Shapes that suit the hardware"
    question: ClassVar[str] = (
        "Encoders of 150 million parameters from deep and narrow to shallow and wide, drawn evenly "
        "from the ranking of manyheads shape: predicted against measured time of a forward, and "
        "all of 22 layers beside ModernBERT-base."
    )
    full: ClassVar[Settings] = {
        "parameters": 150_000_000,
        "vocabulary": 50_368,
        "shapes": 40,
        "layers": 22,
        "length": 512,
        "predicted tokens": {"cuda": 32_768, "cpu": 1024},
        "rounds": 2,
    }
    quick: ClassVar[Settings] = {
        "shapes": 12,
        "predicted tokens": {"cuda": 8192, "cpu": 512},
        "length": 256,
        "rounds": 1,
    }
    test: ClassVar[Settings] = {
        **quick,
        "parameters": 1_000_000,
        "vocabulary": 256,
        "layers": 4,
        "shapes": 5,
        "length": 16,
        "predicted tokens": {"cuda": 64, "cpu": 32},
    }
    limits: ClassVar[tuple[str, ...]] = (
        "Forward only, of two layers times the depth, without the embedding; all attention is "
        "global, and training is not timed.",
        "One GPU and one CPU; ModernBERT weighed seven GPUs, which are predicted by manyheads "
        "shape and not measured here.",
        "Speed alone: which depth is best for a task is not asked.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [
            Arm(PLACES[device], seed, {"device": device}, alone=True, device=device)
            for device in PLACES
            for seed in range(settings["rounds"])
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        kind = arm.options["device"]
        tokens, length = settings["predicted tokens"][kind], settings["length"]
        rows = []
        for row in sample(settings, kind):
            start = time.perf_counter()
            seconds = measure_shape(row.shape, device, tokens=tokens, length=length)
            shape = row.shape
            rows.append(
                {
                    "shape": [shape.layers, shape.width, shape.hidden],
                    "parameters": shape.parameters(settings["vocabulary"]),
                    "predicted": row.predicted[name_of(kind)],
                    "measured": seconds,
                    "took": round(time.perf_counter() - start, 2),
                }
            )
        return {"shapes": rows}

    def findings(self, result: Result) -> list[Finding]:
        rules = ((PREDICTED, prediction), (FASTER, gain), (MODERNBERT, modernbert_place))
        return [
            Finding(claim, *rule(result))
            if any(measured(result, place) for place in PLACES.values())
            else Finding(claim, Verdict.OPEN, "Not measured.")
            for claim, rule in rules
        ]

    def draw(self, result: Result, path: Path) -> None:
        title = "Predicted and measured time of a forward"
        subtitle = (
            f"{result.settings['parameters'] / 1e6:.0f} million parameters, the best of "
            f"{pluralise(result.settings['rounds'], 'round')}; colors: layers"
        )
        with canvas.themed_figure(path, "light", (12.0, 5.2), title, subtitle) as (figure, palette):
            for axes, place in zip(figure.subplots(1, 2), PLACES.values(), strict=True):
                rows = measured(result, place)
                axes.set_title(place, loc="left", size=12, weight="bold")
                axes.set_xlabel("predicted, ms")
                axes.set_ylabel("measured, ms")
                canvas.style_axes(axes, palette)
                if not rows:
                    axes.text(0.5, 0.5, "not measured", ha="center", transform=axes.transAxes)
                    axes.set_xticks([])
                    axes.set_yticks([])
                    continue
                x, y = ([1e3 * row[key] for row in rows] for key in ("predicted", "measured"))
                layers = [row["shape"][0] for row in rows]
                points = axes.scatter(x, y, c=layers, cmap="cividis", s=46)
                figure.colorbar(points, ax=axes, shrink=0.7)
                for row, left, top in zip(rows, x, y, strict=True):
                    if tuple(row["shape"]) == (BASE.layers, BASE.width, BASE.hidden):
                        axes.scatter([left], [top], s=160, facecolors="none", edgecolors="#d55e00")
                        axes.annotate(
                            "22 x 768 x 1,152",
                            (left, top),
                            xytext=(-8, 10),
                            textcoords="offset points",
                            ha="right",
                            color="#d55e00",
                        )

    def table(self, result: Result) -> str:
        rows = []
        for place in PLACES.values():
            for row in sorted(measured(result, place), key=lambda row: row["measured"]):
                shape = EncoderShape(*row["shape"])
                rows.append(
                    [
                        place,
                        str(shape),
                        f"{row['parameters'] / 1e6:.1f}M",
                        f"{1e3 * row['predicted']:.2f}",
                        f"{1e3 * row['measured']:.2f}",
                    ]
                )
        header = [
            "device",
            "layers x width x hidden",
            "parameters",
            "predicted, ms",
            "measured, ms",
        ]
        return markdown_table(header, rows)


def name_of(kind: str) -> str:
    """The device in the table of predictions: the GPU of the full study is an H200."""
    return "h200" if kind == "cuda" else "cpu"


def sample(settings: Settings, kind: str) -> list[RankedShape]:
    """Shapes spread evenly over the ranking, and as many of the depth of ModernBERT-base."""
    options: dict[str, Any] = {
        "vocabulary": settings["vocabulary"],
        "tokens": settings["predicted tokens"][kind],
        "length": settings["length"],
    }
    chosen: dict[EncoderShape, RankedShape] = {}
    half = settings["shapes"] // 2
    for layers in (None, settings["layers"]):
        ranked = search_shapes(settings["parameters"], [name_of(kind)], layers=layers, **options)
        steps = np.linspace(0, len(ranked) - 1, half).round().astype(int)
        wanted = {ranked[index].shape for index in steps} | {BASE}
        chosen |= {row.shape: row for row in ranked if row.shape in wanted}
    return list(chosen.values())


def measured(result: Result, place: str) -> list[dict[str, Any]]:
    """The shapes of a device with the best time of all rounds."""
    rounds = [run["shapes"] for run in result.runs(place)]
    return [
        {**rows[0], "measured": min(row["measured"] for row in rows)}
        for rows in zip(*rounds, strict=True)
    ]


def prediction(result: Result) -> tuple[Verdict, str]:
    """Holds if the ranks correlate by more than 0.8 on every device, weakly from 0.4 on."""
    ranks, texts = [], []
    for place in PLACES.values():
        rows = measured(result, place)
        if not rows:
            texts.append(f"{place} not measured")
            continue
        times = [np.array([row[key] for row in rows]) for key in ("predicted", "measured")]
        deep = [row["shape"][0] == result.settings["layers"] for row in rows]
        same_depth = rank_correlation(*(values[deep] for values in times))
        ranks.append(rank_correlation(*times))
        texts.append(
            f"{place} {ranks[-1]:.2f} over {len(rows)} shapes, {same_depth:.2f} among those of "
            f"{result.settings['layers']} layers"
        )
    worst = min(ranks)
    verdict = Verdict.HOLDS if worst > 0.8 else Verdict.WEAKLY
    return verdict if worst > 0.4 else Verdict.CONTRADICTED, (
        f"Rank correlation of predicted and measured time: {'; '.join(texts)}."
    )


def gain(result: Result) -> tuple[Verdict, str]:
    """Holds if the slowest shape of one depth takes 1.2 times as long as the fastest."""
    texts, gains = [], []
    for place in PLACES.values():
        rows = measured(result, place)
        if rows:
            deep = [row for row in rows if row["shape"][0] == result.settings["layers"]]
            every, own = ratio(rows), ratio(deep)
            gains.append(own if not math.isnan(own) else every)
            texts.append(
                f"on the {place} the slowest shape takes {every:.2f} times as long as the fastest "
                f"per weight, of {result.settings['layers']} layers {own:.2f} times"
            )
    best = max(gains)
    verdict = Verdict.HOLDS if best >= 1.2 else Verdict.WEAKLY
    sentence = "; ".join(texts)
    return verdict if best >= 1.05 else Verdict.NOT_HERE, f"{sentence[0].upper()}{sentence[1:]}."


def ratio(rows: list[dict[str, Any]]) -> float:
    """Of the time of the slowest to that of the fastest, per weight of the layers."""
    times = [slowness(row) for row in rows]
    return max(times) / min(times) if len(times) > 1 else math.nan


def slowness(row: dict[str, Any]) -> float:
    """Seconds per weight of the layers: sizes differ a little, and tables of tokens more."""
    return row["measured"] / EncoderShape(*row["shape"]).layer_weights


def modernbert_place(result: Result) -> tuple[Verdict, str]:
    """Holds in the fastest third of the shapes of 22 layers, weakly in the faster half."""
    texts, places = [], []
    for place in PLACES.values():
        deep = [row for row in measured(result, place) if row["shape"][0] == BASE.layers]
        deep.sort(key=slowness)
        order = [tuple(row["shape"]) for row in deep]
        base = (BASE.layers, BASE.width, BASE.hidden)
        if base in order and len(order) > 1:
            rank = order.index(base)
            places.append(rank / (len(order) - 1))
            slower = ratio([deep[0], deep[rank]]) if rank else 1.0
            fastest = EncoderShape(*order[0])
            texts.append(
                f"on the {place} it is number {rank + 1} of {len(order)}, {slower - 1:.0%} slower "
                f"per weight than {fastest}"
            )
    if not places:
        return Verdict.NOT_HERE, "The shape is not among those of this size."
    worst = max(places)
    verdict = Verdict.HOLDS if worst <= 1 / 3 else Verdict.WEAKLY
    verdict = verdict if worst <= 1 / 2 else Verdict.CONTRADICTED
    sentence = "; ".join(texts)
    return verdict, f"{sentence[0].upper()}{sentence[1:]}."


STUDY = Shapes()
