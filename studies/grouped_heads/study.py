"""Multi-query and grouped heads: what shared keys and values cost, and what they save."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

import torch

from manyheads.models import Decoder
from manyheads.pictures import canvas
from studies.byte_texts import ByteTexts
from studies.decoding_times import cached_ms, growth_exponent, uncached_ms
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
)
from studies.training import Recipe, Trainer, bits_per_byte

TIMES = "time per token"
# Bits per byte that count, and those up to which a loss of quality is small (1 to 2 %).
LEAST_BITS, LITTLE_BITS = 0.005, 0.03
# So many times as fast is faster, or hardly.
FASTER, HARDLY = 1.5, 1.1
# Exponents of growth that differ by so much differ clearly, or hardly.
CLEAR_GROWTH, HARDLY_GROWTH = 0.3, 0.1

QUERY = Claim(
    "One key-value head for all queries is a little worse at equal weights: perplexity 30.2 "
    "against 29.9 on Billion Words, 26.5 against 26.7 BLEU",
    "Shazeer 2019, arXiv 1911.02150; figures from memory",
)
GROUPED = Claim(
    "Some key-value heads are nearly as good as all: on average 47.1 with 8 of 64, 47.2 with all "
    "and 46.6 with one",
    "Ainslie and others 2023, arXiv 2305.13245, table 1; figures from memory",
)
WIDENED = Claim(
    "The weights that keys and values save are worth spending on the feed-forward: the comparison "
    "is made at equal weights",
    "as in arXiv 1911.02150; no published figure without it",
)
CACHE = Claim(
    "The cache shrinks as the number of key-value heads",
    "arXiv 1911.02150; arXiv 2305.13245",
)
FAST = Claim(
    "Fewer key-value heads generate faster: 3.8 instead of 46 microseconds per token with one; "
    "0.24 s with one, 0.28 s with 8 of 64 and 1.51 s with all",
    "arXiv 1911.02150, table 3; arXiv 2305.13245, table 1; figures from memory",
)
GROWTH = Claim(
    "With a cache the time of a token grows less with the length of the text than without: it is "
    "compared with the tokens before it, which are not read again",
    "common practice; no published figure",
)


def arm_name(kv_heads: int, *, widened: bool = True) -> str:
    name = f"{kv_heads} key-value head" + "s" * (kv_heads > 1)
    return name if widened else f"{name}, not widened"


class GroupedHeads(Study):
    """All query heads, fewer heads of keys and values."""

    name = "grouped_heads"
    title = "Multi-query and grouped heads"
    question = (
        "Query heads share the keys and values of fewer heads, down to one. The feed-forward is "
        "widened by the weights that this saves, or left as it is. Beside the loss: the bytes of "
        "the cache, and the time of one more token after short and long texts, with a cache and "
        "without."
    )
    full: ClassVar[Settings] = {
        "text": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 4,
        "heads": 8,
        "kv_heads": [8, 4, 2, 1],
        "grouped": 2,
        "seeds": {"8": 3, "4": 1, "2": 2, "1": 3},
        "length": 512,
        "batch": 32,
        "steps": 1200,
        "lr": 1e-3,
        "passages": 256,
        "timed": {"width": 1024, "layers": 4, "batch": 16},
        "lengths": [1024, 2048, 4096, 8192, 16384],
    }
    quick: ClassVar[Settings] = {
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 2,
        "seeds": {"8": 2, "4": 1, "2": 1, "1": 2},
        "length": 64,
        "batch": 8,
        "steps": 150,
        "lr": 3e-3,
        "passages": 32,
        "timed": {"width": 256, "layers": 2, "batch": 4},
        "lengths": [128, 256, 512, 1024],
    }
    test: ClassVar[Settings] = {
        "text": "topics",
        "limit": 20_000,
        "width": 16,
        "layers": 1,
        "heads": 4,
        "kv_heads": [4, 2, 1],
        "seeds": {},
        "length": 16,
        "batch": 2,
        "steps": 3,
        "passages": 2,
        "timed": {"width": 16, "layers": 1, "batch": 1},
        "lengths": [8, 16],
    }
    limits = (
        "Byte models of three million weights after 1,200 steps with 8 heads of 32 channels; the "
        "published ones translate or have up to 11 billion weights, with heads of 64 or 128. "
        "Grouped heads there come from a trained model, here from the start.",
        "All train at one rate. The arms with four key-value heads and those that are not widened "
        "have one seed, that with two has two; arms of one seed take their error from the others.",
        "Times are of models of random weights, wider than those that are trained: the least of "
        "four rounds of four tokens, in bfloat16 with recorded steps on a GPU, in float32 on a "
        "CPU. Exponents are fitted over all lengths: what a token costs at any length lowers them.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        kv_heads, seeds = settings["kv_heads"], settings["seeds"]
        arms = [
            Arm(arm_name(count), seed, {"kv_heads": count, "widened": True})
            for count in kv_heads
            for seed in range(seeds.get(str(count), 1))
        ]
        arms += [
            Arm(arm_name(count, widened=False), 0, {"kv_heads": count, "widened": False})
            for count in kv_heads[1:]
        ]
        return [*arms, Arm(TIMES, alone=True)]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        if arm.name == TIMES:
            return {
                str(count): measure_times(count, settings, device) for count in settings["kv_heads"]
            }
        model = make_model(arm.options["kv_heads"], settings, arm.seed, arm.options["widened"])
        model, length = model.to(device), settings["length"]
        texts = ByteTexts(settings["text"], device, settings["limit"])
        recipe = Recipe(steps=settings["steps"], lr=settings["lr"])
        batches = texts.batches(settings["batch"], length, seed=arm.seed)
        log = Trainer(model, recipe).run(batches, arm.key)
        return {
            "parameters": count_parameters(model),
            "bits": bits_per_byte(model, texts.held_out(settings["passages"], length)),
            "step ms": 1000 * log.seconds_per_step,
        }

    def findings(self, result: Result) -> Sequence[Finding]:
        counts: list[int] = result.settings["kv_heads"]
        every, one = arm_name(counts[0]), arm_name(counts[-1])
        grouped, bare = (
            arm_name(result.settings["grouped"]),
            arm_name(counts[-1], widened=False),
        )

        def bits(*arms: str) -> str:
            listed = ", ".join(f"{result.text(arm, 'bits')} with {arm}" for arm in arms)
            return f"Bits per byte: {listed}."

        gap, gap_error = result.difference(one, every, "bits")
        part, error = result.difference(grouped, every, "bits")
        return [
            Finding(QUERY, _slightly(gap, gap_error), bits(every, one)),
            Finding(
                GROUPED, _close(part, gap, error), bits(*(arm_name(count) for count in counts))
            ),
            Finding(
                WIDENED,
                compare(*result.difference(bare, one, "bits"), least=LEAST_BITS),
                bits(bare, one),
            ),
            self._cache(result),
            self._speed(result),
            self._growth(result),
        ]

    def _cache(self, result: Result) -> Finding:
        counts: list[int] = result.settings["kv_heads"]
        sizes = {count: result.mean(TIMES, str(count), "cache bytes") for count in counts}
        ratio, expected = sizes[counts[0]] / sizes[counts[-1]], counts[0] / counts[-1]
        verdict = Verdict.HOLDS if abs(ratio / expected - 1) < 0.01 else Verdict.CONTRADICTED
        listed = ", ".join(f"{size:,.0f} with {count}" for count, size in sizes.items())
        return Finding(
            CACHE,
            Verdict.OPEN if math.isnan(ratio) else verdict,
            f"Bytes of the cache per token of the timed model, by key-value heads: {listed}; "
            f"{ratio:.1f} times fewer with {counts[-1]}.",
        )

    def _speed(self, result: Result) -> Finding:
        counts: list[int] = result.settings["kv_heads"]
        length = result.settings["lengths"][-1]
        times = {count: result.mean(TIMES, str(count), "cached", str(length)) for count in counts}
        listed = ", ".join(f"{ms:.2f} with {count}" for count, ms in times.items())
        ratio = times[counts[0]] / times[counts[-1]]
        return Finding(
            FAST,
            _faster(ratio),
            f"Milliseconds of a token after {length:,} others, "
            f"{result.settings['timed']['batch']} texts at a time, by key-value heads: {listed}; "
            f"{ratio:.1f} times as fast with {counts[-1]}.",
        )

    def _growth(self, result: Result) -> Finding:
        counts: list[int] = result.settings["kv_heads"]
        exponents = {
            (count, way): result.mean(TIMES, str(count), f"{way} exponent")
            for count in (counts[0], counts[-1])
            for way in ("cached", "uncached")
        }
        gaps = [
            exponents[count, "uncached"] - exponents[count, "cached"]
            for count in (counts[0], counts[-1])
        ]
        short, *_, long = map(str, result.settings["lengths"])
        every = str(counts[0])
        rows = [
            f"{way} from {result.text(TIMES, every, way, short, digits=2)} to "
            f"{result.text(TIMES, every, way, long, digits=2)} ms"
            for way in ("cached", "uncached")
        ]
        listed = ", ".join(
            f"{value:.2f} {way} with {count}" for (count, way), value in exponents.items()
        )
        return Finding(
            GROWTH,
            _grows_less(min(gaps)),
            f"The time of a token grows as length to the power of, by key-value heads: {listed}. "
            f"From {short} to {long} tokens with {every}: {', '.join(rows)}.",
        )

    def draw(self, result: Result, path: Path) -> None:
        counts: list[int] = result.settings["kv_heads"]
        title = "Fewer heads of keys and values"
        subtitle = f"{result.settings['heads']} query heads"
        with canvas.themed_figure(path, "light", (12.5, 4.4), title, subtitle) as (figure, colors):
            left, right = figure.subplots(1, 2)
            for widened, color in ((True, colors.series[0]), (False, colors.series[1])):
                names = [arm_name(counts[0]), *(arm_name(n, widened=widened) for n in counts[1:])]
                for count, name in zip(counts, names, strict=True):
                    values = result.each(name, "bits")
                    left.plot([count] * len(values), values, "o", color=color, alpha=0.4)
                means = [result.mean(name, "bits") for name in names]
                label = "feed-forward widened" if widened else "not widened"
                left.plot(counts, means, color=color, linewidth=2, label=label)
            left.set_xscale("log", base=2)
            sizes = [result.mean(TIMES, str(count), "cache bytes") for count in counts]
            labels = [
                f"{count}\n{size / 1024:,.3g} KiB"
                for count, size in zip(counts, sizes, strict=True)
            ]
            left.set_xticks(counts, labels)
            left.invert_xaxis()
            left.set_xlabel("key-value heads, and cache of the timed model per token")
            for count, color in zip(counts, colors.series, strict=False):
                for way, line in (("cached", "-"), ("uncached", "--")):
                    points = {
                        length: result.mean(TIMES, str(count), way, str(length))
                        for length in result.settings["lengths"]
                    }
                    key = str(count) if way == "cached" else None
                    right.plot(
                        points.keys(),
                        points.values(),
                        line,
                        marker="o",
                        markersize=4,
                        color=color,
                        linewidth=2,
                        label=key,
                    )
            right.set_xscale("log", base=2)
            right.set_yscale("log")
            right.yaxis.set_major_formatter("{x:g}")
            right.minorticks_off()
            lengths: list[int] = result.settings["lengths"]
            right.set_xticks(lengths, [f"{length:,}" for length in lengths])
            right.set_xlabel("tokens before")
            for axes, name in (
                (left, "bits per byte"),
                (right, "ms of a token; dashed: without a cache"),
            ):
                canvas.style_axes(axes, colors)
                axes.set_title(name, loc="left", size=12, weight="bold")
            left.legend(frameon=False)
            right.legend(frameon=False, title="key-value heads")

    def table(self, result: Result) -> str:
        short, *_, long = map(str, result.settings["lengths"])
        rows = []
        for count in result.settings["kv_heads"]:
            for widened in (True, False):
                arm = arm_name(count, widened=widened)
                if not result.runs(arm):
                    continue
                times = [
                    result.text(TIMES, str(count), way, length, digits=2)
                    for way in ("cached", "uncached")
                    for length in (short, long)
                ]
                exponents = [
                    result.text(TIMES, str(count), f"{way} exponent", digits=2)
                    for way in ("cached", "uncached")
                ]
                rows.append(
                    [
                        arm,
                        f"{result.mean(arm, 'parameters'):,.0f}",
                        result.text(arm, "bits"),
                        result.text(TIMES, str(count), "cache bytes", digits=0),
                        *times,
                        *exponents,
                    ]
                )
        header = ["arm", "weights", "bits per byte", "cache bytes per token"]
        for way in ("cached", "uncached"):
            header += [f"{way} ms at {short}", f"{way} ms at {long}"]
        return markdown_table([*header, "exponent cached", "exponent uncached"], rows)


def make_model(kv_heads: int, settings: Settings, seed: int, widened: bool) -> Decoder:
    """With the weights of all key-value heads if `widened`."""
    width, layers, heads = settings["width"], settings["layers"], settings["heads"]
    shared = {"kv_heads": kv_heads}
    if not widened:
        return language_model(width=width, layers=layers, heads=heads, attention=shared, seed=seed)
    weights = count_parameters(language_model(width=width, layers=layers, heads=heads))
    return matched_model(
        weights, width=width, layers=layers, heads=heads, attention=shared, seed=seed
    )


def measure_times(kv_heads: int, settings: Settings, device: str) -> Values:
    """Milliseconds of a token by length, how they grow, and the bytes of the cache."""
    timed = {**settings, **settings["timed"]}
    model = make_model(kv_heads, timed, 0, widened=True).to(device).eval()
    if device == "cuda":
        model = model.to(torch.bfloat16)
    values: Values = {"cached": {}, "uncached": {}}
    for length in settings["lengths"]:
        milliseconds, size = cached_ms(model, timed["batch"], length)
        values["cached"][str(length)] = milliseconds
        values["uncached"][str(length)] = uncached_ms(model, timed["batch"], length)
        values["cache bytes"] = size
    for way in ("cached", "uncached"):
        values[f"{way} exponent"] = growth_exponent(values[way])
    return values


def _slightly(gap: float, error: float) -> Verdict:
    """Worse, but only a little: weakly if it is more than that."""
    verdict = compare(gap, error, least=LEAST_BITS)
    return Verdict.WEAKLY if verdict is Verdict.HOLDS and gap > LITTLE_BITS else verdict


def _close(part: float, gap: float, error: float) -> Verdict:
    """Nearer to all heads than to one, or as good; weakly if within two errors of all."""
    if math.isnan(part) or math.isnan(gap):
        return Verdict.OPEN
    if part <= max(LEAST_BITS, gap / 2):
        return Verdict.HOLDS
    if part <= 2 * error:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if part >= gap else Verdict.NOT_HERE


def _faster(ratio: float) -> Verdict:
    if math.isnan(ratio):
        return Verdict.OPEN
    if ratio >= FASTER:
        return Verdict.HOLDS
    if ratio >= HARDLY:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if ratio < 1 / HARDLY else Verdict.NOT_HERE


def _grows_less(gap: float) -> Verdict:
    if math.isnan(gap):
        return Verdict.OPEN
    if gap >= CLEAR_GROWTH:
        return Verdict.HOLDS
    if gap >= HARDLY_GROWTH:
        return Verdict.WEAKLY
    return Verdict.CONTRADICTED if gap < -HARDLY_GROWTH else Verdict.NOT_HERE


STUDY = GroupedHeads()
