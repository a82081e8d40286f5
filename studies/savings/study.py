"""What unpadding, packing, batch warm-up, tiling and restarting before the decay save."""

import math
from collections.abc import Callable, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any, ClassVar

import torch

from manyheads.pictures import canvas
from manyheads.train import BatchGrowth, tile
from studies.byte_texts import ByteTexts
from studies.savings.filled_batches import ByteBatch, bytes_per_second, lines_of, packed
from studies.savings.schedules import ConstantThenDecay, growing, reached
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

UNPADDING = Claim(
    "Half of the tokens of Wikipedia in batches of 512 are padding; without them training is twice "
    "as fast.",
    "Krell and others, 2107.02027",
)
PACKING = Claim(
    "Greedy packing fills batches to more than 99 %, so that all are of one size.",
    "ModernBERT, 2412.13663",
)
GROWTH = Claim(
    "Small batches first, growing to the full size, speed up the beginning of training.",
    "ModernBERT, 2412.13663",
)
TILING = Claim(
    "A larger model whose weights are tiled from a smaller one learns faster than one from random "
    "weights.",
    "ModernBERT, 2412.13663",
)
COOLDOWN = Claim(
    "A constant rate with a short decay ends where a cosine of the same length ends.",
    "Hägele and others, 2405.18392",
)
RESTART = Claim(
    "Training goes on better from before the decay than from after it.",
    "ModernBERT, 2412.13663; Hägele and others, 2405.18392",
)
# Differences that count for a single seed: shares of compute, and bits per byte.
LEAST_SHARE, LEAST_BITS = 0.03, 0.01
DECAY = 0.2


class Savings(Study):
    """Each trick against plain training of the same model on the same bytes."""

    name: ClassVar[str] = "savings"
    title: ClassVar[str] = "What tricks of training save"
    question: ClassVar[str] = (
        "Unpadding and packing are timed on lines of text; batch warm-up, tiling and restarts are "
        "compared by the bytes or the compute that a decoder needs for the same held-out loss."
    )
    full: ClassVar[Settings] = {
        "source": "enwik8",
        "limit": 50_000_000,
        "width": 256,
        "layers": 6,
        "heads": 4,
        "small width": 128,
        "small layers": 4,
        "steps": 1250,
        "rows": 32,
        "length": 512,
        "lr": 2e-3,
        "warm up": 100,
        "points": 50,
        "held out": 64,
        "growth": [8, 8],
        "growth share": 0.3,
        "seeds": [0, 1],
        "timed seeds": [0, 1, 2],
        "lines": 6400,
        "lines per batch": 128,
        "timed width": 512,
        "timed layers": 8,
    }
    quick: ClassVar[Settings] = {
        "source": "topics",
        "limit": None,
        "width": 64,
        "layers": 3,
        "heads": 2,
        "small width": 32,
        "small layers": 2,
        "steps": 120,
        "rows": 8,
        "length": 64,
        "lr": 4e-3,
        "warm up": 15,
        "points": 12,
        "held out": 16,
        "growth": [2, 2],
        "seeds": [0],
        "timed seeds": [0],
        "lines": 400,
        "lines per batch": 32,
        "timed width": 64,
        "timed layers": 2,
    }
    test: ClassVar[Settings] = {
        **quick,
        "width": 16,
        "layers": 2,
        "small width": 8,
        "small layers": 1,
        "steps": 10,
        "rows": 4,
        "length": 16,
        "warm up": 2,
        "points": 3,
        "held out": 4,
        "growth": [2, 1],
        "lines": 30,
        "lines per batch": 6,
        "timed width": 16,
        "timed layers": 1,
    }
    limits: ClassVar[tuple[str, ...]] = (
        "Decoders of bytes with 0.8 and 4.7 million weights outside the embedding instead of "
        "encoders with hundreds of millions; lines instead of whole articles.",
        "Compute is counted as weights times bytes. The GPU is shared by other studies, so only "
        "unpadding and packing are timed, alone.",
        "Rates are those of the plain run and were not tuned for each trick.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        trained = ("plain", "cosine", "short cosine", "growing batch", "tiled")
        return [
            *(Arm(name, seed) for name in trained for seed in settings["seeds"]),
            *(Arm("batches", seed, alone=True) for seed in settings["timed seeds"]),
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        if arm.name == "batches":
            return time_batches(arm.seed, settings, device)
        return Comparison(settings, arm.seed, device).run(arm.name)

    def findings(self, result: Result) -> list[Finding]:
        return [
            Finding(claim, verdict if text else Verdict.OPEN, text or "Not measured.")
            for claim, (verdict, text) in (
                (UNPADDING, unpadding(result)),
                (PACKING, packing(result)),
                (GROWTH, growth_saving(result)),
                (TILING, tiling_saving(result)),
                (COOLDOWN, cooldown(result)),
                (RESTART, restart(result)),
            )
        ]

    def draw(self, result: Result, path: Path) -> None:
        title, size = "What tricks of training save", (13.5, 4.6)
        subtitle = f"Bytes of {result.settings['source']}; lower and further left is better"
        with canvas.themed_figure(path, "light", size, title, subtitle) as (figure, palette):
            left, middle, right = figure.subplots(1, 3)
            for arm, color in zip(
                ("plain", "growing batch", "tiled"), palette.series, strict=False
            ):
                for index, run in enumerate(result.runs(arm)):
                    cost = [1e-6 * value for value in run["cost"]]
                    left.plot(cost, run["losses"], color=color, label=None if index else arm)
            left.set_xlabel("million bytes of the large model")
            left.set_title("while the rate is constant", loc="left")
            ends = (
                ("cosine, half", "short cosine", "bits", 1),
                ("decay, half", "plain", "short bits", 0),
                ("cosine", "cosine", "bits", 1),
                ("decay", "plain", "bits", 0),
                ("from after\nthe decay", "plain", "after bits", 2),
            )
            for label, arm, value, shade in ends:
                values = result.each(arm, value) or [math.nan]
                dots = {"marker": "o", "color": palette.series[shade]}
                middle.plot([label] * len(values), values, linestyle="none", alpha=0.6, **dots)
                middle.plot([label], [sum(values) / len(values)], markersize=11, **dots)
            middle.set_title("after the decay", loc="left")
            middle.tick_params(axis="x", labelrotation=30)
            ways = ("padded", "unpadded", "packed")
            speeds = [1e-6 * result.mean("batches", way) for way in ways]
            right.bar(ways, speeds, color=palette.series[:3])
            right.set_title("million bytes per second", loc="left")
            for axes, name in ((left, "bits per byte"), (middle, "bits per byte"), (right, "")):
                canvas.style_axes(axes, palette)
                axes.set_ylabel(name)
            if result.runs("plain"):
                left.legend(frameon=False, labelcolor=palette.text)

    def table(self, result: Result) -> str:
        trained = ("plain", "cosine", "short cosine", "growing batch", "tiled")
        rows = [[arm, result.text(arm, "bits"), result.text(arm, "stable bits")] for arm in trained]
        rows += [
            ["plain, half as long", result.text("plain", "short bits"), ""],
            ["on from after its decay", result.text("plain", "after bits"), ""],
        ]
        speeds = [
            [way, *(f"{result.mean('batches', way) / 1e6:.3f}",)]
            for way in ("padded", "unpadded", "packed")
        ]
        header = ["run", "bits per byte at the end", "before the decay"]
        return "\n\n".join(
            [
                markdown_table(header, rows),
                markdown_table(["batches of lines", "million bytes per second"], speeds),
            ]
        )


class Comparison:
    """The runs of one seed: one model, one text, one order of passages."""

    def __init__(self, settings: Settings, seed: int, device: str) -> None:
        self.settings, self.seed, self.device = settings, seed, device
        self.texts = ByteTexts(settings["source"], device, settings["limit"])
        self.held_out = self.texts.held_out(settings["held out"], settings["length"])
        self.steps = settings["steps"]
        self.decay = round(DECAY * self.steps)
        self.stable = self.steps - self.decay
        self.step_bytes = settings["rows"] * settings["length"]

    def model(self, width: int, layers: int, heads: int) -> Any:
        return language_model(width=width, layers=layers, heads=heads, seed=self.seed).to(
            self.device
        )

    def large(self) -> Any:
        settings = self.settings
        return self.model(settings["width"], settings["layers"], settings["heads"])

    def recipe(self, steps: int, decay: int = 0, warm_up: int | None = None) -> ConstantThenDecay:
        warm = self.settings["warm up"] if warm_up is None else warm_up
        return ConstantThenDecay(steps=steps, lr=self.settings["lr"], warm_up=warm, decay=decay)

    def batches(self, seed: int = 0) -> Any:
        rows, length = self.settings["rows"], self.settings["length"]
        return self.texts.batches(rows, length, 1000 * seed + self.seed)

    def bits(self, model: Any) -> float:
        return bits_per_byte(model, self.held_out)

    def watch(self, steps: int) -> dict[int, Callable[[Any], float]]:
        every = max(1, self.stable // self.settings["points"])
        return dict.fromkeys(range(0, steps + 1, every), self.bits)

    def run(self, arm: str) -> Values:
        return {
            "plain": self.plain,
            "cosine": lambda: self.cosine(self.steps),
            "short cosine": lambda: self.cosine(self.steps // 2),
            "growing batch": self.growing_batch,
            "tiled": self.tiled,
        }[arm]()

    def cosine(self, steps: int) -> Values:
        model = self.large()
        recipe = Recipe(
            steps=steps, lr=self.settings["lr"], warm_up=self.settings["warm up"], final=0.0
        )
        Trainer(model, recipe).run(self.batches())
        return {"bits": self.bits(model)}

    def plain(self) -> Values:
        """One constant run; it decays at half and at its end, and goes on from both sides."""
        half, half_decay = self.stable // 2, self.decay // 2
        batches, watch = self.batches(), self.watch(self.stable)
        first = Trainer(self.large(), self.recipe(half))
        log = first.run(batches, "plain", {at: watch[at] for at in watch if at < half})
        short = resumed(first, self.recipe(half_decay, half_decay, warm_up=1))
        short.run(self.batches(seed=1), "decay at half")
        short_bits = self.bits(short.model)
        # As many steps in all as the plain run, with a new warm-up and the same decay.
        rest = self.steps - half - half_decay
        after = resumed(short, self.recipe(rest, self.decay))
        after.run(self.batches(seed=2), "on from after the decay")
        second = resumed(first, self.recipe(self.stable - half, warm_up=1))
        late = second.run(batches, "plain", {at - half: watch[at] for at in watch if at >= half})
        stable_bits = self.bits(second.model)
        last = resumed(second, self.recipe(self.decay, self.decay, warm_up=1))
        last.run(batches, "decay")
        curve = {**log.watched, **{at + half: bits for at, bits in late.watched.items()}}
        return {
            "bits": self.bits(last.model),
            "stable bits": stable_bits,
            "short bits": short_bits,
            "after bits": self.bits(after.model),
            "cost": [step * self.step_bytes for step in curve],
            "losses": list(curve.values()),
        }

    def growing_batch(self) -> Values:
        length, (first, by) = self.settings["length"], self.settings["growth"]
        growth = BatchGrowth(
            first=first * length,
            last=self.step_bytes,
            by=by * length,
            over=round(self.settings["growth share"] * self.stable * self.step_bytes),
        )
        stable = growth.steps_for(self.stable * self.step_bytes)
        rows = (batch for _, batch in growing(self.batches(), growth, length))
        trainer = Trainer(self.large(), self.recipe(stable))
        log = trainer.run(rows, "growing batch", self.watch(stable))
        stable_bits = self.bits(trainer.model)
        last = resumed(trainer, self.recipe(self.decay, self.decay, warm_up=1))
        last.run(rows, "decay")
        return {
            "bits": self.bits(last.model),
            "stable bits": stable_bits,
            "cost": [growth.tokens_before(step) for step in log.watched],
            "losses": list(log.watched.values()),
        }

    def tiled(self) -> Values:
        settings = self.settings
        large, size = self.large(), settings["width"] // settings["heads"]
        width = settings["small width"]
        small = self.model(width, settings["small layers"], max(1, width // size))
        Trainer(small, self.recipe(self.steps, self.decay)).run(self.batches(seed=3), "small")
        model = tile(small, large.config, seed=self.seed)
        trainer = Trainer(model, self.recipe(self.stable))
        log = trainer.run(self.batches(), "tiled", self.watch(self.stable))
        stable_bits = self.bits(model)
        last = resumed(trainer, self.recipe(self.decay, self.decay, warm_up=1))
        last.run(self.batches(seed=4), "decay")
        share = count_parameters(small) / count_parameters(large)
        return {
            "bits": self.bits(last.model),
            "stable bits": stable_bits,
            "small bits": self.bits(small),
            "small cost": share * self.steps * self.step_bytes,
            "cost": [step * self.step_bytes for step in log.watched],
            "losses": list(log.watched.values()),
        }


def resumed(trainer: Trainer, recipe: Recipe) -> Trainer:
    """A trainer of a copy of the model with a copy of what its optimizer remembers."""
    other = Trainer(deepcopy(trainer.model), recipe)
    other.optimizer.load_state_dict(deepcopy(trainer.optimizer.state_dict()))
    for group in other.optimizer.param_groups:
        group["lr"] = other.rate
    return other


def time_batches(seed: int, settings: Settings, device: str) -> Values:
    """Bytes per second of the same lines: padded, unpadded, packed; and what padding there is."""
    length, count = settings["length"], settings["lines per batch"]
    lines = lines_of(settings["source"], settings["lines"], length, settings["limit"])
    order = torch.randperm(len(lines), generator=torch.Generator().manual_seed(seed)).tolist()
    lines = [lines[index] for index in order]
    width = settings["timed width"]
    model = language_model(
        width=width, layers=settings["timed layers"], heads=max(1, width // 64), seed=seed
    ).to(device)
    groups = [lines[at : at + count] for at in range(0, len(lines) - count + 1, count)]
    padded = [ByteBatch.of(group, device, length) for group in groups]
    unpadded = [ByteBatch.of(group, device) for group in groups]
    budget = round(sum(batch.counted for batch in unpadded) / len(unpadded))
    # The last batches are what is left over.
    filled = [ByteBatch.of(group, device) for group in packed(lines, budget)][: len(groups) - 1]
    sizes = [batch.counted for batch in unpadded]
    with torch.no_grad():
        losses = [float(batch.loss(model)) for batch in (padded[0], unpadded[0])]
    return {
        "padded": bytes_per_second(model, padded),
        "unpadded": bytes_per_second(model, unpadded),
        "packed": bytes_per_second(model, filled),
        "padding": 1 - sum(sizes) / (len(padded) * count * length),
        "filled": sum(batch.counted for batch in filled) / (len(filled) * budget),
        "smallest": min(sizes) / max(sizes),
        "same loss": abs(losses[0] - losses[1]),
    }


def unpadding(result: Result) -> tuple[Verdict, str]:
    """Holds if eight tenths of what the share of padding promises are gained.

    Where padding is less than a tenth there is nothing to gain.
    """
    gain = result.mean("batches", "unpadded") / result.mean("batches", "padded")
    padding = result.mean("batches", "padding")
    if math.isnan(gain):
        return Verdict.OPEN, ""
    promised = 1 / (1 - padding)
    if padding < 0.1:
        verdict = Verdict.NOT_HERE
    elif gain >= 0.8 * promised:
        verdict = Verdict.HOLDS
    else:
        verdict = compare(gain - 1, math.nan, least=0.05)
        verdict = Verdict.WEAKLY if verdict is Verdict.HOLDS else verdict
    return verdict, (
        f"{padding:.0%} of the padded batches is padding, which promises {promised:.2f} times the "
        f"speed; without it forward and backward are {gain:.2f} times as fast, with the same loss "
        f"(difference {result.mean('batches', 'same loss'):.1g})."
    )


def packing(result: Result) -> tuple[Verdict, str]:
    filled = result.mean("batches", "filled")
    if math.isnan(filled):
        return Verdict.OPEN, ""
    gain = result.mean("batches", "packed") / result.mean("batches", "unpadded")
    verdict = Verdict.HOLDS if filled > 0.99 else Verdict.WEAKLY
    return verdict if filled > 0.95 else Verdict.CONTRADICTED, (
        f"Packed batches are filled to {filled:.1%}; unpadded ones of equally many lines differ in "
        f"size (the smallest has {result.mean('batches', 'smallest'):.0%} of the largest). Speed "
        f"per byte: {gain:.2f} times that of unpadded ones."
    )


def saved(result: Result, arm: str, share: float) -> list[float]:
    """By seed, the share of bytes saved to the loss that plain has after so much of its run.

    A run that never comes down to it saves minus infinity.
    """
    values = []
    for seed, run in result.arms.get(arm, {}).items():
        plain = result.arms.get("plain", {}).get(seed)
        if plain is None:
            continue
        limit = share * plain["cost"][-1]
        target = min(
            loss for cost, loss in zip(plain["cost"], plain["losses"], strict=True) if cost <= limit
        )
        own = reached(plain["cost"], plain["losses"], target)
        other = reached(run["cost"], run["losses"], target)
        if own:
            values.append(-math.inf if other is None else 1 - other / own)
    return values


def spread(values: Sequence[float]) -> tuple[float, float]:
    """The mean and its error."""
    if -math.inf in values:
        return -math.inf, math.nan
    holder = Result("", "", {}, "")
    for seed, value in enumerate(values):
        holder.add(Arm("arm", seed), {"value": value}, 0.0)
    return holder.mean("arm", "value"), holder.error("arm", "value")


def shown(saving: float, of: str) -> str:
    """
    >>> shown(0.25, "bytes"), shown(-0.1, "bytes"), shown(-math.inf, "bytes")
    ('25% fewer bytes', '10% more bytes', 'more bytes than the whole run')
    """
    if math.isinf(saving):
        return f"more {of} than the whole run"
    return f"{abs(saving):.0%} {'fewer' if saving >= 0 else 'more'} {of}"


def final_bits(result: Result, arm: str) -> str:
    own, plain = result.text(arm, "bits"), result.text("plain", "bits")
    return f"After the decay: {own} and {plain} bits per byte."


def growth_saving(result: Result) -> tuple[Verdict, str]:
    early, error = spread(saved(result, "growing batch", 0.25))
    whole, _ = spread(saved(result, "growing batch", 1.0))
    if math.isnan(early):
        return Verdict.OPEN, ""
    return compare(early, error, least=LEAST_SHARE), (
        f"Beside plain training, growing batches need {shown(early, 'bytes')} to the loss of a "
        f"quarter of the constant phase, and {shown(whole, 'bytes')} to that of its end. "
        + final_bits(result, "growing batch")
    )


def tiling_saving(result: Result) -> tuple[Verdict, str]:
    whole, error = spread(saved(result, "tiled", 1.0))
    if math.isnan(whole):
        return Verdict.OPEN, ""
    early, _ = spread(saved(result, "tiled", 0.25))
    [total] = [run["cost"][-1] for run in result.runs("plain")[:1]]
    price = result.mean("tiled", "small cost") / total
    return compare(whole, error, least=LEAST_SHARE), (
        f"The tiled model needs {shown(early, 'steps')} to the loss of a quarter of the constant "
        f"phase, and {shown(whole, 'steps')} to that of its end; the training of the small model "
        f"costs as much as {price:.0%} of the plain run. " + final_bits(result, "tiled")
    )


def cooldown(result: Result) -> tuple[Verdict, str]:
    """Holds if the decay ends at most a hundredth of a bit above the cosine."""
    pairs = [("cosine", "bits"), ("short cosine", "short bits")]
    gaps = [result.mean("plain", key) - result.mean(arm, "bits") for arm, key in pairs]
    worst = max(gaps)
    if any(map(math.isnan, gaps)):
        return Verdict.OPEN, ""
    verdict = Verdict.HOLDS if worst <= LEAST_BITS else Verdict.WEAKLY
    return verdict if worst <= 2 * LEAST_BITS else Verdict.CONTRADICTED, (
        f"Constant with a decay over the last fifth: {result.text('plain', 'bits')}, cosine "
        f"{result.text('cosine', 'bits')}; at half the length {result.text('plain', 'short bits')} "
        f"and {result.text('short cosine', 'bits')} bits per byte. Both lengths from one constant "
        f"run cost {1 + DECAY / 2:.1f} times the long one, two cosines 1.5 times."
    )


def restart(result: Result) -> tuple[Verdict, str]:
    gaps = [run["after bits"] - run["bits"] for run in result.runs("plain")]
    gap, error = spread(gaps)
    if math.isnan(gap):
        return Verdict.OPEN, ""
    return compare(gap, error, least=LEAST_BITS), (
        f"After equally many steps, the run that went on from before its decay ends at "
        f"{result.text('plain', 'bits')} bits per byte, the one from after the decay, with a new "
        f"warm-up, at {result.text('plain', 'after bits')}: {gap:+.3f}."
    )


STUDY = Savings()
