"""The claims about images, and the rules by which they are judged."""

import math
from collections.abc import Callable, Sequence
from statistics import mean

from studies.images import SIDE
from studies.study import Claim, Result, Verdict, compare, weakest
from studies.vision.image_models import grid_distances

DOSOVITSKIY = "Dosovitskiy and others 2021, arXiv 2010.11929"
FEW = Claim(
    "With 5,000 images of CIFAR-10 a CNN is far ahead of a ViT: 70.8 % against 49.6 %, and a small "
    "ResNet reaches 63.3 %.",
    "Mohapatra, soveshmohapatra.com/projects/vits-benchmark: 30 epochs, 1,000 test images",
)
CLOSES = Claim(
    "The gap closes with data: large ViTs are behind ResNets on ImageNet-1k and ahead after 300 "
    "million images (from memory); ViT-B/16 has 77.9 % after ImageNet-1k alone, 84.0 % after "
    "ImageNet-21k.",
    DOSOVITSKIY,
)
AUGMENTED = Claim(
    "Augmentation does for a ViT what more data would, and helps it more than a CNN, which knows "
    "about shifts already.",
    "Steiner and others 2021, arXiv 2106.10270 for the first half; the second is what is commonly "
    "said",
)
NEAR_AND_FAR = Claim(
    "In the lowest layers some heads attend near and others far; higher up all attend far.",
    DOSOVITSKIY,
)
GROWS = Claim("The distance of attention grows with depth.", DOSOVITSKIY)
FIELDS = Claim(
    "The lowest layers of a ViT have larger effective receptive fields than those of a ResNet, "
    "whose fields grow gradually.",
    "Raghu and others 2021, arXiv 2108.08810",
)
KINDS = ("CNN", "ViT")
# Differences below a point of accuracy, or half a pixel, are not counted.
LEAST_POINTS, LEAST_PIXELS = 1.0, 0.5


def arm_name(source: str, kind: str, count: int, augmented: bool) -> str:
    return f"{source} {kind} {count}" + (" augmented" if augmented else "")


Judged = tuple[Verdict, str]


def best_arm(result: Result, kind: str) -> str:
    """Of the first set: all images, augmented."""
    source, counts = next(iter(result.settings["sets"].items()))
    return arm_name(source, kind, counts[-1], True)


def judge_few(result: Result) -> Judged:
    """The CNN is ahead with the middle number of images, augmented or not."""
    middle = result.settings["middle"]
    source = next(iter(result.settings["sets"]))
    verdicts = [
        compare(*_gap(result, source, middle, augmented), least=LEAST_POINTS)
        for augmented in (False, True)
    ]
    return weakest(*verdicts), " ".join(
        f"{name}, {middle:,} images, % right: {_pair(result, name, middle)}."
        for name, counts in result.settings["sets"].items()
        if middle in counts
    )


def judge_closes(result: Result) -> Judged:
    """Augmented models have a gap at the middle number of images, and less of it with all."""
    source, counts = next(iter(result.settings["sets"].items()))
    before, after = (
        _gap(result, source, count, True) for count in (result.settings["middle"], counts[-1])
    )
    verdict = weakest(
        compare(*before, least=LEAST_POINTS),
        compare(before[0] - after[0], math.hypot(before[1], after[1]), least=LEAST_POINTS),
    )
    parts = []
    for source, counts in result.settings["sets"].items():
        for augmented, label in ((True, "augmented"), (False, "as they are")):
            gaps = [_gap(result, source, count, augmented)[0] for count in counts]
            listed = ", ".join(
                f"{in_points(gap)} with {n:,}" for gap, n in zip(gaps, counts, strict=True)
            )
            parts.append(f"{source}, {label}: {listed}")
    text = "points by which the CNN is ahead; " + "; ".join(parts) + "."
    return verdict, text


def judge_augmented(result: Result) -> Judged:
    """With the middle number of images the ViT gains more points than the CNN."""
    middle = result.settings["middle"]
    source = next(iter(result.settings["sets"]))
    gains = {kind: _gain(result, source, kind, middle) for kind in KINDS}
    error = math.hypot(gains["CNN"][1], gains["ViT"][1])
    verdict = compare(gains["ViT"][0] - gains["CNN"][0], error, least=LEAST_POINTS)
    parts = [
        f"{name} "
        + ", ".join(
            f"{n:,} images "
            + " ".join(
                f"{kind} {in_points(_gain(result, name, kind, n)[0], '+')}" for kind in KINDS
            )
            for n in counts
        )
        for name, counts in result.settings["sets"].items()
    ]
    return verdict, f"points gained by augmentation: {'; '.join(parts)}."


def judge_near_and_far(result: Result) -> Judged:
    """The distances of heads differ more in the first layer than in the last."""
    verdict = compare(*_value(result, "narrowing"), least=LEAST_PIXELS)
    return verdict, _heads(result, lambda heads: f"{min(heads):.1f} to {max(heads):.1f}")


def judge_grows(result: Result) -> Judged:
    verdict = compare(*_value(result, "growth"), least=LEAST_PIXELS)
    return verdict, _heads(result, lambda heads: f"{mean(heads):.1f} on average")


def judge_fields(result: Result) -> Judged:
    """The first layer of the ViT reads farther, and the field of the CNN grows by more."""
    cnn, vit = (best_arm(result, kind) for kind in KINDS)
    farther = compare(*result.difference(vit, cnn, "field", "first"), least=LEAST_PIXELS)
    growth = [
        result.mean(arm, "field", "last") - result.mean(arm, "field", "first") for arm in (cnn, vit)
    ]
    more = compare(growth[0] - growth[1], math.nan, least=LEAST_PIXELS)
    text = f"mean distance of what a layer reads, in pixels: CNN {list_fields(result, cnn)}; "
    return weakest(farther, more), text + f"ViT {list_fields(result, vit)}."


def _error(result: Result, arm: str, *path: str) -> float:
    """The standard error; of a single seed the spread of the arms that have several."""
    error = result.error(arm, *path)
    return result.spread(*path) if math.isnan(error) else error


def _gap(result: Result, source: str, count: int, augmented: bool) -> tuple[float, float]:
    arms = [arm_name(source, kind, count, augmented) for kind in KINDS]
    return result.difference(*arms, "accuracy")


def _gain(result: Result, source: str, kind: str, count: int) -> tuple[float, float]:
    arms = [arm_name(source, kind, count, augmented) for augmented in (True, False)]
    return result.difference(*arms, "accuracy")


def in_points(value: float, sign: str = "") -> str:
    return "not measured" if math.isnan(value) else f"{value:{sign}.1f}"


def _value(result: Result, measure: str) -> tuple[float, float]:
    arm = best_arm(result, "ViT")
    return result.mean(arm, "distance", measure), _error(result, arm, "distance", measure)


def _pair(result: Result, source: str, count: int) -> str:
    parts = []
    for augmented, label in ((False, "as they are"), (True, "augmented")):
        cells = [
            f"{kind} {result.text(arm_name(source, kind, count, augmented), 'accuracy', digits=1)}"
            for kind in KINDS
        ]
        parts.append(f"{label} {', '.join(cells)}")
    return "; ".join(parts)


def _heads(result: Result, describe: Callable[[Sequence[float]], str]) -> str:
    """What was measured of the heads, layer by layer."""
    runs = result.runs(best_arm(result, "ViT"))
    if not runs:
        return "not measured."
    layers = [describe(heads) for heads in runs[0]["distance"]["heads"]]
    even = even_attention(result)
    numbered = ", ".join(f"layer {number} {text}" for number, text in enumerate(layers, start=1))
    return (
        f"mean distance of attention in pixels: {numbered}; even attention would have {even:.1f}."
    )


def even_attention(result: Result) -> float:
    """The mean distance of attention to all patches alike."""
    size = result.settings["ViT"]["patch"]
    return float(grid_distances(SIDE // size, size).mean())


def list_fields(result: Result, arm: str) -> str:
    runs = result.runs(arm)
    return (
        ", ".join(f"{value:.1f}" for value in runs[0]["field"]["all"]) if runs else "not measured"
    )


JUDGES: tuple[tuple[Claim, Callable[[Result], Judged]], ...] = (
    (FEW, judge_few),
    (CLOSES, judge_closes),
    (AUGMENTED, judge_augmented),
    (NEAR_AND_FAR, judge_near_and_far),
    (GROWS, judge_grows),
    (FIELDS, judge_fields),
)
