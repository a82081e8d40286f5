"""Why scores are divided by the root of the head size: trained with and without."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.scale.score_statistics import draw_unit_variance, measure_scores
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
)
from studies.training import Recipe, Trainer, bits_per_byte

SCALED, PLAIN, FOLDED = "scaled", "not scaled", "folded"
# A variance between half and twice the expected one agrees with it.
VARIANCE_WITHIN = 2.0
# A gradient of less than half counts as smaller, of less than 0.8 weakly; above 1.25 as larger.
HALF, LESS, MORE = 0.5, 0.8, 1.25
LEAST_BITS = 0.01

VARIANCE = Claim(
    "If queries and keys have components of variance 1, their product has variance d, and divided "
    "by the root of d variance 1",
    "arXiv 1706.03762, footnote 4",
)
GRADIENT = Claim(
    "Large products push the softmax into regions where it has extremely small gradients",
    "arXiv 1706.03762, section 3.2.1",
)
LOSS = Claim(
    "Without the scale attention is worse for large d and as good for small d",
    "arXiv 1706.03762, section 3.2.1, after arXiv 1703.03906",
)
FOLD = Claim(
    "The scale can be left out if queries are drawn smaller by the root of d instead",
    "T5, arXiv 1910.10683, whose code does so",
)


def arm_name(mode: str, size: int) -> str:
    return f"{mode}, d {size}"


class Scale(Study):
    """Head sizes of 16 to 256 at equal width, with and without the scale."""

    name = "scale"
    title = "Dividing scores by the root of the head size"
    question = (
        "The same models with and without the division, heads of 16 to 256 channels. Width and "
        "parameters stay equal, so heads of twice the size are half as many, as in the paper. "
        "Queries and keys start with variance 1. Scores, entropy and gradients are measured before "
        "and after training."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 4,
        "length": 256,
        "batch": 32,
        "steps": 1000,
        "lr": 1e-3,
        "sizes": [16, 32, 64, 128, 256],
        "seeds": 2,
        "passages": 256,
        "measured": 8,
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "length": 128,
        "batch": 8,
        "steps": 200,
        "sizes": [4, 16, 64],
        "seeds": 1,
        "passages": 16,
    }
    test: ClassVar[Settings] = {
        "text": "topics",
        "limit": 50_000,
        "width": 16,
        "layers": 1,
        "length": 16,
        "batch": 2,
        "steps": 5,
        "sizes": [4, 16],
        "seeds": 1,
        "passages": 2,
        "measured": 2,
    }
    limits = (
        "The paper argues from random vectors and translates sentences with 65 million weights; "
        "here are byte models of three million and a thousand steps of AdamW, whose rate was not "
        "tuned for either arm.",
        "Heads of twice the size are half as many: what that alone changes is in both arms, and "
        "in the study of the number of heads.",
        "The arm with the folded scale exists only for the largest heads. T5 is trained by "
        "Adafactor, whose steps are in proportion to the weights; AdamW moves small queries as far "
        "as large ones.",
        "The first rule for small gradients looked only at that of the loss at the scores, by "
        "which the claim is contradicted. After a trial of a few steps, and before this run, the "
        "gradient of the softmax itself was added: if only that is smaller, the claim holds "
        "weakly.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        pairs = [(mode, size) for size in settings["sizes"] for mode in (SCALED, PLAIN)]
        pairs.append((FOLDED, settings["sizes"][-1]))
        return [
            Arm(arm_name(mode, size), seed, {"mode": mode, "size": size})
            for seed in range(settings["seeds"])
            for mode, size in pairs
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        mode, size = arm.options["mode"], arm.options["size"]
        model = language_model(
            width=settings["width"],
            layers=settings["layers"],
            heads=settings["width"] // size,
            attention={"scale": "root" if mode == SCALED else 1.0},
            seed=arm.seed,
        )
        draw_unit_variance(model, size**-0.5 if mode == FOLDED else 1.0)
        model.to(device)
        texts = ByteTexts(settings["text"], device, settings["limit"])
        passages = texts.held_out(settings["passages"], settings["length"])
        start = measure_scores(model, passages[: settings["measured"]])
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"])
        batches = texts.batches(settings["batch"], settings["length"], seed=arm.seed)
        log = Trainer(model, recipe).run(batches, arm.key)
        return {
            "bits": bits_per_byte(model, passages),
            "start": start,
            "end": measure_scores(model, passages[: settings["measured"]]),
            "diverged": log.diverged,
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        sizes: list[int] = result.settings["sizes"]
        small, large = sizes[0], sizes[-1]
        scaled, plain = arm_name(SCALED, large), arm_name(PLAIN, large)

        def variance(mode: str, size: int) -> float:
            return result.mean(arm_name(mode, size), "start", "variance")

        ratios = [variance(SCALED, size) for size in sizes]
        ratios += [variance(PLAIN, size) / size for size in sizes]
        softmax, scores = (
            result.mean(plain, "start", name) / result.mean(scaled, "start", name)
            for name in ("softmax gradient", "score gradient")
        )
        gap, error = result.difference(plain, scaled, "bits")
        near, _ = result.difference(arm_name(PLAIN, small), arm_name(SCALED, small), "bits")
        folded, fold_error = result.difference(arm_name(FOLDED, large), scaled, "bits")
        listed = ", ".join(f"{variance(PLAIN, size):.1f} for d = {size}" for size in sizes)
        loss = compare(gap, error, least=LEAST_BITS)
        if loss is Verdict.HOLDS and not near < gap / 2:
            # It is worse, but not more so for large heads.
            loss = Verdict.WEAKLY
        return [
            Finding(
                VARIANCE,
                _agree(ratios),
                f"Before training, the variance of scores without the scale is {listed}; with it, "
                + ", ".join(f"{variance(SCALED, size):.2f}" for size in sizes)
                + ".",
            ),
            Finding(
                GRADIENT,
                _smaller(softmax, scores),
                f"For d = {large} and before training, a query gives one key "
                f"{result.text(plain, 'start', 'largest', digits=2)} of its weight without the "
                f"scale ({result.text(scaled, 'start', 'largest', digits=2)} with it). The "
                f"gradients of the softmax are {softmax:.2f} times as large as with the scale, and "
                f"that of the loss at the scores {scores:.2f} times. At the weights of queries and "
                "keys, where the missing division gives a factor of the root of d, its norm is "
                f"{result.text(plain, 'start', 'weight gradient', digits=4)} against "
                f"{result.text(scaled, 'start', 'weight gradient', digits=4)}.",
            ),
            Finding(
                LOSS,
                loss,
                f"Bits per byte for d = {large}: {result.text(plain, 'bits')} without, "
                f"{result.text(scaled, 'bits')} with the scale; for d = {small}: "
                f"{result.text(arm_name(PLAIN, small), 'bits')} and "
                f"{result.text(arm_name(SCALED, small), 'bits')}.",
            ),
            Finding(
                FOLD,
                # Up to what counts as a difference, it is as good.
                compare(2 * LEAST_BITS - folded, fold_error, least=LEAST_BITS),
                f"Bits per byte for d = {large}: {result.text(arm_name(FOLDED, large), 'bits')} "
                f"with smaller queries and no scale, {result.text(scaled, 'bits')} with the scale.",
            ),
        ]

    def draw(self, result: Result, path: Path) -> None:
        sizes: list[int] = result.settings["sizes"]
        title = "Scores with and without the division by √d"
        subtitle = "dotted: after training; equal width and parameters"
        panels = [
            ("variance of scores", "variance", True),
            ("entropy, share of the largest", "entropy", False),
            ("gradient of the softmax", "softmax gradient", False),
            ("bits per byte", "bits", False),
        ]
        with canvas.themed_figure(path, "light", (16.0, 4.0), title, subtitle) as (figure, palette):
            for axes, (name, measure, logarithmic) in zip(
                figure.subplots(1, 4), panels, strict=True
            ):
                for mode, color in ((SCALED, palette.series[0]), (PLAIN, palette.series[1])):
                    for moment, line in (("start", "o-"), ("end", "o:")):
                        keys = (measure,) if measure == "bits" else (moment, measure)
                        if measure == "bits" and moment == "start":
                            continue
                        values = [result.mean(arm_name(mode, size), *keys) for size in sizes]
                        label = mode if moment == "start" else None
                        axes.plot(sizes, values, line, color=color, linewidth=2, label=label)
                canvas.style_axes(axes, palette)
                axes.set_title(name, loc="left", size=12, weight="bold")
                axes.set_xlabel("channels of a head, d")
                axes.set_xscale("log", base=2)
                axes.set_xticks(sizes, [str(size) for size in sizes])
                if logarithmic:
                    axes.set_yscale("log")
                    axes.yaxis.set_major_formatter("{x:g}")
                    axes.minorticks_off()
                if measure == "variance":
                    axes.legend(frameon=False)

    def table(self, result: Result) -> str:
        rows = []
        for size in result.settings["sizes"]:
            for mode in (SCALED, PLAIN, FOLDED):
                arm = arm_name(mode, size)
                if result.runs(arm):
                    cells = [
                        result.text(arm, moment, measure, digits=digits)
                        for measure, digits in (
                            ("variance", 2),
                            ("entropy", 3),
                            ("softmax gradient", 2),
                            ("score gradient", 5),
                            ("weight gradient", 4),
                        )
                        for moment in ("start", "end")
                    ]
                    rows.append([str(size), mode, result.text(arm, "bits"), *cells])
        moments = [
            f"{name}, {moment}"
            for name in (
                *("variance", "entropy", "gradient of the softmax"),
                *("gradient at scores", "gradient at weights"),
            )
            for moment in ("start", "trained")
        ]
        return markdown_table(["d", "scores", "bits per byte", *moments], rows)


def _agree(ratios: Sequence[float]) -> Verdict:
    """Whether measured over expected variances are near 1, all of them or most."""
    if any(map(math.isnan, ratios)):
        return Verdict.OPEN
    near = sum(1 / VARIANCE_WITHIN <= ratio <= VARIANCE_WITHIN for ratio in ratios)
    if near == len(ratios):
        return Verdict.HOLDS
    return Verdict.WEAKLY if near > len(ratios) / 2 else Verdict.CONTRADICTED


def _smaller(softmax: float, scores: float) -> Verdict:
    """Whether the gradients of the softmax are smaller, and with them that of the loss."""
    if math.isnan(softmax) or math.isnan(scores):
        return Verdict.OPEN
    if softmax < HALF and scores < HALF:
        return Verdict.HOLDS
    if softmax < LESS:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if softmax > MORE else Verdict.NOT_HERE


STUDY = Scale()
