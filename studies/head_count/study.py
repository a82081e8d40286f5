"""How many heads: from one wide to 64 narrow ones at equal width and parameters."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import numpy as np
from torch import Tensor

from manyheads import lens
from manyheads.models import Decoder
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.head_count.head_loop import WAYS, measure_ways
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
from studies.training import Recipe, Trainer, bits_per_byte

TIMES = "time and memory"
LEAST_BITS, LEAST_SHARE = 0.005, 0.05
# Heads are free as long as the loss rises by less than this many nats without them.
FREE_NATS = 0.02
# Patterns whose cosine is above this are the same.
ALIKE = 0.9
# A time within a quarter is the same, within twice nearly.
SAME, NEARLY = 1.25, 2.0
# A loop that takes so many times as long is slower.
SLOWER, HARDLY = 1.5, 1.1

WIDE = Claim(
    "One head of the full width is worse than eight: perplexity 5.29 against 4.92",
    "arXiv 1706.03762, table 3 (A)",
)
NARROW = Claim(
    "Too many narrow heads are worse too: perplexity 5.01 with 32 heads of 16 channels against "
    "4.92; below some size a head cannot form every pattern",
    "arXiv 1706.03762, table 3 (A); arXiv 2002.07028",
)
REDUNDANT = Claim(
    "Most heads can be left out: of 16 in a layer a large share is redundant, 20 to 60 % free "
    "by task",
    "arXiv 1905.10650",
)
COST = Claim(
    "Several narrow heads cost about as much as one of the full width", "arXiv 1706.03762, 3.2.2"
)
LOOP = Claim(
    "A loop over heads computes the same and takes longer than one batched product",
    "common practice; no published figure",
)


def arm_name(heads: int) -> str:
    return f"{heads} head" if heads == 1 else f"{heads} heads"


class HeadCount(Study):
    """1 to 64 heads; and what they cost as a loop and as one product."""

    name = "head_count"
    title = "How many heads"
    question = (
        "Models of equal width and parameters with 1 to 64 heads, so with head sizes from the full "
        "width down to a few channels: loss, how similar the patterns of a layer's heads are, and "
        "which heads do nothing. Beside it the time and memory of one attention layer as a loop "
        "over heads and as one batched product."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 6,
        "heads": [1, 2, 4, 8, 16, 32, 64],
        "middle": 8,
        "seeds": {"1": 2, "8": 2, "64": 2},
        "length": 512,
        "batch": 32,
        "steps": 2500,
        "lr": 1e-3,
        "passages": 256,
        "measured": 8,
        "timed_batch": 8,
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 3,
        "heads": [1, 4, 16],
        "middle": 4,
        "seeds": {},
        "length": 128,
        "batch": 8,
        "steps": 250,
        "passages": 16,
        "measured": 4,
    }
    test: ClassVar[Settings] = {
        "text": "topics",
        "limit": 50_000,
        "width": 16,
        "layers": 1,
        "heads": [1, 2, 4],
        "middle": 2,
        "seeds": {},
        "length": 16,
        "batch": 2,
        "steps": 5,
        "passages": 2,
        "measured": 2,
        "timed_batch": 1,
    }
    limits = (
        "Byte models of five million weights and 2,500 steps; the published ones translate with 65 "
        "million weights.",
        "One learning rate for all; only the ends and the middle have two seeds.",
        "Narrow heads of 4 channels are padded to 8 by the fused kernels, so that they cost more "
        "than they compute.",
        "Times are the least of 15 repetitions of one layer in bfloat16 on the GPU (float32 on a "
        "CPU); memory is what PyTorch allocates at the peak, and is not measured on a CPU.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        arms = [
            Arm(arm_name(heads), seed, {"heads": heads})
            for heads in settings["heads"]
            for seed in range(settings["seeds"].get(str(heads), 1))
        ]
        return [*arms, Arm(TIMES, alone=True)]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        width, length = settings["width"], settings["length"]
        if arm.name == TIMES:
            return {
                str(heads): measure_ways(heads, width, settings["timed_batch"], length, device)
                for heads in settings["heads"]
            }
        model = language_model(
            width=width, layers=settings["layers"], heads=arm.options["heads"], seed=arm.seed
        ).to(device)
        texts = ByteTexts(settings["text"], device, settings["limit"])
        passages = texts.held_out(settings["passages"], length)
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"])
        batches = texts.batches(settings["batch"], length, seed=arm.seed)
        Trainer(model, recipe).run(batches, arm.key)
        return {
            "parameters": count_parameters(model),
            "bits": bits_per_byte(model, passages),
            **compare_heads(model, passages[: settings["measured"]]),
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        counts: list[int] = result.settings["heads"]
        middle, most = arm_name(result.settings["middle"]), arm_name(counts[-1])
        one, several = arm_name(counts[0]), [arm_name(heads) for heads in counts[1:]]

        def bits(arm: str) -> str:
            return f"{arm} {result.text(arm, 'bits')}"

        free, error = result.difference(most, several[0], "free")
        shares = ", ".join(f"{_percent(result.mean(arm, 'free'))} with {arm}" for arm in several)
        alike = ", ".join(f"{result.mean(arm, 'overlap'):.2f}" for arm in several)
        return [
            Finding(
                WIDE,
                compare(*result.difference(one, middle, "bits"), least=LEAST_BITS),
                f"Bits per byte: {bits(one)}, {bits(middle)}.",
            ),
            Finding(
                NARROW,
                compare(*result.difference(most, middle, "bits"), least=LEAST_BITS),
                f"Bits per byte: {bits(most)}, {bits(middle)}; all: "
                + ", ".join(bits(arm) for arm in several)
                + ".",
            ),
            Finding(
                REDUNDANT,
                _redundant(result.mean(most, "free"), compare(free, error, least=LEAST_SHARE)),
                "So many of all heads can be left out together, by gradient order, before the loss "
                f"rises by {FREE_NATS} nats: {shares} per layer. Alone, "
                f"{_percent(result.mean(most, 'dead'))} do nothing that can be measured with "
                f"{most}, {_percent(result.mean(middle, 'dead'))} with {middle}. The mean cosine "
                f"of two patterns of a layer is {alike}.",
            ),
            self._cost(result),
            self._loop(result),
        ]

    def _cost(self, result: Result) -> Finding:
        counts: list[int] = result.settings["heads"]
        middle, most = str(result.settings["middle"]), str(counts[-1])

        def ratio(heads: str, way: str) -> float:
            times = [result.mean(TIMES, each, way, "train ms") for each in (heads, str(counts[0]))]
            return times[0] / times[1]

        batched, fused = ratio(middle, "batched"), ratio(middle, "fused")
        return Finding(
            COST,
            _same(fused),
            f"Training time of a layer with {middle} heads over that with one: {batched:.2f} where "
            f"the pattern is formed, {fused:.2f} by the fused kernel; with {most} heads "
            f"{ratio(most, 'batched'):.2f} and {ratio(most, 'fused'):.2f}.",
        )

    def _loop(self, result: Result) -> Finding:
        counts: list[int] = result.settings["heads"]
        chosen = [str(result.settings["middle"]), str(counts[-1])]

        def cells(heads: str, measure: str, digits: int) -> str:
            values = {way: result.mean(TIMES, heads, way, measure) for way in WAYS}
            return ", ".join(f"{way} {value:,.{digits}f}" for way, value in values.items())

        ratios = [
            result.mean(TIMES, heads, "loop", "train ms")
            / result.mean(TIMES, heads, "batched", "train ms")
            for heads in chosen
        ]
        parts = []
        for heads in chosen:
            memory = ""
            if result.each(TIMES, heads, "loop", "train MiB"):
                memory = (
                    f", MiB at the peak {cells(heads, 'train MiB', 0)} (without gradients "
                    f"{cells(heads, 'run MiB', 0)})"
                )
            parts.append(f"with {heads} heads {cells(heads, 'train ms', 2)}{memory}")
        text = "Milliseconds of a layer forwards and backwards: " + "; ".join(parts) + "."
        return Finding(LOOP, _slower(ratios), text)

    def draw(self, result: Result, path: Path) -> None:
        counts: list[int] = result.settings["heads"]
        title = "One wide head, or many narrow ones"
        subtitle = f"width {result.settings['width']}, equal parameters"
        with canvas.themed_figure(path, "light", (15.0, 4.2), title, subtitle) as (figure, palette):
            left, middle, right = figure.subplots(1, 3)
            names = [arm_name(heads) for heads in counts]
            for name, heads in zip(names, counts, strict=True):
                values = result.each(name, "bits")
                left.plot([heads] * len(values), values, "o", color=palette.series[0], alpha=0.5)
            bits = [result.mean(name, "bits") for name in names]
            left.plot(counts, bits, "-", color=palette.series[0], linewidth=2)
            shares = {
                "cosine of two patterns": "overlap",
                "free to leave out together": "free",
                "no effect alone": "dead",
            }
            for (label, measure), color in zip(shares.items(), palette.series, strict=False):
                values = [result.mean(name, measure) for name in names]
                middle.plot(counts, values, "o-", color=color, linewidth=2, label=label)
            for way, color in zip(WAYS, palette.series, strict=False):
                values = [result.mean(TIMES, str(heads), way, "train ms") for heads in counts]
                right.plot(counts, values, "o-", color=color, linewidth=2, label=way)
            titles = ("bits per byte", "similar and idle heads, share", "ms of a layer, training")
            for axes, name in zip((left, middle, right), titles, strict=True):
                canvas.style_axes(axes, palette)
                axes.set_title(name, loc="left", size=12, weight="bold")
                axes.set_xscale("log", base=2)
                axes.set_xticks(counts, [str(heads) for heads in counts])
                axes.set_xlabel("heads")
            right.set_yscale("log", base=2)
            right.yaxis.set_major_formatter("{x:g}")
            right.minorticks_off()
            middle.legend(frameon=False)
            right.legend(frameon=False)

    def table(self, result: Result) -> str:
        rows = []
        for heads in result.settings["heads"]:
            arm = arm_name(heads)
            times = [result.text(TIMES, str(heads), way, "train ms", digits=2) for way in WAYS]
            memory = [result.text(TIMES, str(heads), way, "train MiB", digits=0) for way in WAYS]
            rows.append(
                [
                    str(heads),
                    str(result.settings["width"] // heads),
                    result.text(arm, "bits"),
                    *(result.text(arm, name, digits=2) for name in MEASURES),
                    *times,
                    *memory,
                ]
            )
        header = ["heads", "channels", "bits per byte", *MEASURES.values()]
        header += [f"{way}, ms" for way in WAYS] + [f"{way}, MiB" for way in WAYS]
        return markdown_table(header, rows)


MEASURES = {
    "overlap": "cosine of patterns",
    "alike": "pairs above 0.9",
    "free": "free together",
    "dead": "no effect alone",
}


def compare_heads(model: Decoder, passages: Tensor) -> dict[str, float]:
    """How similar the heads of a layer are, and how many of them are not needed.

    One head per layer has no other to be compared with, so that its overlap is missing.
    """
    texts = passages.tolist()
    pairs = lens.overlap(model, texts, partners="same layer", progress=False).values
    pairs = pairs[~np.eye(len(pairs), dtype=bool) & ~np.isnan(pairs)]
    dead = lens.dead_heads(model, texts, progress=False)
    importance = lens.importance(model, texts, progress=False)["importance"]
    order = [str(address) for address, _ in importance.ranked(smallest=True)]
    removal = lens.ablate_in_order(model, texts, order, progress=False)
    free = next(
        (index for index, step in enumerate(removal.steps) if step.change > FREE_NATS),
        len(removal.steps),
    )
    values = {"free": free / len(order), "dead": len(dead.heads) / len(order)}
    if len(pairs):
        values |= {"overlap": float(pairs.mean()), "alike": float((pairs > ALIKE).mean())}
    return values


def _percent(share: float) -> str:
    return "not measured" if math.isnan(share) else f"{share:.0%}"


def _redundant(free: float, grows: Verdict) -> Verdict:
    """Whether a fifth of many heads is free, and more than of few."""
    if math.isnan(free) or grows is Verdict.OPEN:
        return Verdict.OPEN
    if free >= 0.2:
        return Verdict.HOLDS if grows is Verdict.HOLDS else Verdict.WEAKLY
    return Verdict.WEAKLY if free >= 0.1 else Verdict.NOT_HERE


def _same(ratio: float) -> Verdict:
    if math.isnan(ratio):
        return Verdict.OPEN
    if ratio <= SAME:
        return Verdict.HOLDS
    return Verdict.WEAKLY if ratio <= NEARLY else Verdict.CONTRADICTED


def _slower(ratios: Sequence[float]) -> Verdict:
    """Whether a loop is slower with every number of heads, or with one of them."""
    if any(map(math.isnan, ratios)):
        return Verdict.OPEN
    if min(ratios) >= SLOWER:
        return Verdict.HOLDS
    if max(ratios) >= SLOWER or min(ratios) >= HARDLY:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if max(ratios) < 1 else Verdict.NOT_HERE


STUDY = HeadCount()
