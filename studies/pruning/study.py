"""Pruning: how many heads are free by task and by order, which do harm, and small models."""

import math
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import ClassVar

from manyheads import build
from manyheads.pictures import canvas
from manyheads.surgery import prune
from studies.byte_texts import ByteTexts
from studies.pruning.head_orders import ORDERS, measure_heads, measure_orders, order_heads
from studies.pruning.tasks import TASKS, Task, train_language
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
from studies.training import bits_per_byte

# Published free shares: of translation, of inference, of sentiment.
FREE_SHARE, FREE_CLASSES = 0.2, 0.6
# Differences of free shares below this are not visible: one head of 32.
LEAST_SHARE = 1 / 32
# Heads that matter alone: 8 of 96 are published.
FEW, HALF = 0.25, 0.5
# A loss that rises by less than this share is about the same, and nearly so.
SAME, NEARLY = 0.01, 0.03
LEAST_BITS = 0.005

FREE = Claim(
    "A share of the heads is free on every task: about 20 % in translation, 40 % on MNLI, 60 % "
    "on SST-2, removed together by gradient order",
    "arXiv 1905.10650",
)
BY_TASK = Claim(
    "The free share depends on the task: a classifier of sentiment (60 %) can lose more than a "
    "model that produces text (20 %)",
    "arXiv 1905.10650",
)
ALONE = Claim(
    "Few heads matter alone: without 8 of 96 the score changes clearly", "arXiv 1905.10650"
)
HARMFUL = Claim(
    "Half of the heads that matter do harm: without 4 of these 8 the score rises",
    "arXiv 1905.10650",
)
GRADIENT = Claim("Gradients tell which heads can go: better than chance", "arXiv 1905.10650")
SHAPLEY = Claim(
    "Shapley values, which count how heads work together, tell better than gradients which heads "
    "can go",
    "arXiv 2210.05709; a comparison of orders is ours",
)
GATES = Claim(
    "Gates trained with an L0 penalty, and training afterwards, remove 38 of 48 heads for 0.15 "
    "BLEU, half a percent",
    "arXiv 1905.09418",
)
SMALL = Claim(
    "A model that was pruned is better than one of the same shape trained from the start",
    "arXiv 1905.09418",
)


class Pruning(Study):
    name = "pruning"
    title = "Pruning heads"
    question = (
        "A decoder of bytes, and `house-bert` fine-tuned to tell similar passages, sentiment and "
        "entities: heads are put in order on some texts and removed one after another on others. "
        "A share of them is free as long as the score falls by less than 2 % of the whole model's "
        "(score: share of right bytes, halves or classes; F1 of entities)."
    )
    full: ClassVar[Settings] = {
        "seeds": [0, 1, 2],
        "bound": 0.02,
        "text": "enwik8",
        "limit": 20_000_000,
        "width": 256,
        "layers": 4,
        "heads": 8,
        "length": 256,
        "batch": 32,
        "steps": 1500,
        "recovery_steps": 500,
        "lr": 1e-3,
        "passages": 64,
        "held_out": 256,
        "cuts": [0.5, 0.79],
        "labeled": "reviews",
        "labeled_texts": 10_043,
        "tagged": "wnut17",
        "tagged_texts": 4403,
        "pairs": 6000,
        "half_tokens": 32,
        "similar_among": 32,
        "max_tokens": 64,
        "encoder_layers": 4,
        "finetune_steps": 500,
        "finetune_lr": 5e-4,
        "batch_tokens": 2048,
        "gate_passages": 256,
        "gate_steps": 300,
        "gate_lr": 0.1,
        "gate_cost": 0.01,
        "permutations": 20,
        "draws": 3,
    }
    quick: ClassVar[Settings] = {
        "seeds": [0],
        "text": "topics",
        "limit": None,
        "width": 64,
        "layers": 3,
        "heads": 4,
        "length": 64,
        "batch": 16,
        "steps": 400,
        "recovery_steps": 100,
        "lr": 3e-3,
        "passages": 24,
        "held_out": 64,
        "labeled": "topics",
        "labeled_texts": 480,
        "tagged": "topics",
        "tagged_texts": 480,
        "pairs": 192,
        "half_tokens": 16,
        "similar_among": 16,
        "max_tokens": 32,
        "finetune_steps": 40,
        "batch_tokens": 512,
        "gate_passages": 64,
        "gate_steps": 60,
        "permutations": 4,
        "draws": 2,
    }
    test: ClassVar[Settings] = {
        **quick,
        "limit": 40_000,
        "width": 16,
        "layers": 1,
        "heads": 2,
        "length": 16,
        "batch": 2,
        "steps": 4,
        "recovery_steps": 2,
        "passages": 4,
        "held_out": 4,
        "cuts": [0.5],
        "labeled_texts": 24,
        "tagged_texts": 36,
        "pairs": 12,
        "half_tokens": 4,
        "similar_among": 2,
        "max_tokens": 8,
        "encoder_layers": 1,
        "finetune_steps": 2,
        "gate_passages": 4,
        "gate_steps": 2,
        "permutations": 2,
        "draws": 1,
    }
    limits = (
        "Models of three million weights with 32 heads; the published ones are a large translator "
        "with 96 heads in each of three kinds of attention, and BERT with 144.",
        "The free share ends at the first removal after which the score is too low. Published "
        "shares are read off curves, without a bound.",
        "Our tasks are easier to run, not the published ones: next bytes instead of translation, "
        "sentiment of films rated by the crowd instead of SST-2; no inference (MNLI).",
        "L0 gates are trained with all weights frozen, and only give an order; the published ones "
        "are trained together with the model.",
        "A removed head gives zero. Speed is not measured: at this size time is not spent in "
        "heads.",
        "The quick run has no sentiment: it tells two help topics of Python apart, and its "
        "entities are words that they quote as code.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [Arm(name, seed) for seed in settings["seeds"] for name in TASKS]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        task = TASKS[arm.name](settings, device, arm.seed)
        orders = order_heads(task, settings, arm.seed)
        values = {
            "orders": measure_orders(task, orders, settings["bound"]),
            **measure_heads(task),
        }
        values["score"] = values["orders"]["gradient"]["curve"][0]
        if arm.name == "language":
            values |= cut_and_compare(task, orders["L0 gates"][0], settings, device, arm.seed)
        return values

    def findings(self, result: Result) -> Sequence[Finding]:
        tasks = list(TASKS)
        shares = [_free(result, task) for task in tasks]
        by_order = {
            name: _text(result, [f"{task} {_free(result, task, name)}" for task in tasks])
            for name in ORDERS
        }
        matter = [result.mean(task, "matter") for task in tasks]
        return [
            Finding(
                FREE,
                _least_share([result.mean(task, *_path()) for task in tasks]),
                "Free by gradient order: "
                + ", ".join(f"{task} {text}" for task, text in zip(tasks, shares, strict=True))
                + ".",
            ),
            Finding(
                BY_TASK,
                compare(*_across(result, "classification", "language"), least=LEAST_SHARE),
                f"Classification {shares[2]}, language {shares[0]}, similarity {shares[1]}, "
                f"entities {shares[3]}.",
            ),
            Finding(
                ALONE,
                _few(matter),
                "Share of heads whose removal alone changes the score by 2.58 standard errors: "
                + ", ".join(f"{task} {result.text(task, 'matter', digits=2)}" for task in tasks)
                + ".",
            ),
            Finding(HARMFUL, _harm(result), _harm_text(result)),
            Finding(
                GRADIENT,
                _better_order(result, "gradient", "random"),
                f"Free share by gradient: {by_order['gradient']}; at random: {by_order['random']}.",
            ),
            Finding(
                SHAPLEY,
                _better_order(result, "Shapley", "gradient"),
                f"Free share by Shapley values: {by_order['Shapley']}; by gradient: "
                f"{by_order['gradient']}; by L0 gates: {by_order['L0 gates']}; by the loss without "
                f"each head alone: {by_order['alone']}.",
            ),
            *_cut_findings(result),
        ]

    def table(self, result: Result) -> str:
        rows = []
        for task in TASKS:
            rows.append(
                [
                    task,
                    result.text(task, "score"),
                    *(result.text(task, *_path(name), digits=2) for name in ORDERS),
                    result.text(task, "matter", digits=2),
                    result.text(task, "harmful", digits=1),
                    result.text(task, "harmful_on_both", digits=1),
                    result.text(task, "gain", digits=4),
                ]
            )
        header = ["task", "score", *(f"free, {name}" for name in ORDERS), "matter alone"]
        header += ["harmful", "on other texts too", "score without them"]
        cuts = [
            [f"{float(cut):.0%}", *(result.text("language", "cuts", cut, name) for name in CUTS)]
            for cut in map(str, result.settings["cuts"])
        ]
        second = markdown_table(["removed by L0 gates", *CUTS.values()], cuts)
        return f"{markdown_table(header, rows)}\n\nLanguage model, bits per byte:\n\n{second}"

    def draw(self, result: Result, path: Path) -> None:
        subtitle = "score by share of heads removed; dotted: 2 % below the whole model"
        size = (4.0 * len(TASKS), 4.0)
        with canvas.themed_figure(path, "light", size, self.title, subtitle) as (figure, palette):
            panels = figure.subplots(1, len(TASKS), squeeze=False)[0]
            colors = dict(zip(ORDERS, (*palette.series[:4], palette.muted), strict=True))
            for axes, task in zip(panels, TASKS, strict=True):
                canvas.style_axes(axes, palette)
                axes.set_title(task, loc="left", size=12, weight="bold")
                axes.set_xlabel("share of heads removed")
                for name in ORDERS:
                    curves = [run["orders"][name]["curve"] for run in result.runs(task)]
                    if not curves:
                        continue
                    mean = [sum(points) / len(points) for points in zip(*curves, strict=True)]
                    at = [index / (len(mean) - 1) for index in range(len(mean))]
                    axes.plot(at, mean, color=colors[name], linewidth=2, label=name)
                if result.runs(task):
                    bound = (1 - result.settings["bound"]) * result.mean(task, "score")
                    axes.axhline(bound, color=palette.muted, linestyle=":", linewidth=1)
            panels[0].legend(frameon=False)


# What is measured of a language model that loses a share of its heads.
CUTS = {
    "full": "whole, trained as long",
    "pruned": "pruned",
    "recovered": "pruned and trained on",
    "small": "same shape from the start",
}


def cut_and_compare(
    task: Task, order: Sequence[str], settings: Settings, device: str, seed: int
) -> Values:
    """Bits per byte of the pruned model, trained on, beside one of its shape that was not pruned.

    All of them see as many batches in the end.
    """
    texts = ByteTexts(settings["text"], device, settings["limit"])
    passages = texts.held_out(settings["held_out"], settings["length"], seed=1)
    steps, more = settings["steps"], settings["recovery_steps"]
    whole = deepcopy(task.model)
    train_language(whole, texts, settings, more, seed + 100)
    full, cuts = bits_per_byte(whole, passages), {}
    for cut in settings["cuts"]:
        smaller = prune(task.model, list(order[: round(cut * len(order))]))
        values = {"full": full, "pruned": bits_per_byte(smaller, passages)}
        train_language(smaller, texts, settings, more, seed + 100)
        small = build(smaller.config, seed=seed + 1).to(device)
        train_language(small, texts, settings, steps + more, seed)
        values |= {
            "recovered": bits_per_byte(smaller, passages),
            "small": bits_per_byte(small, passages),
        }
        cuts[str(cut)] = values | {
            "rise": values["recovered"] / full - 1,
            "lead": values["small"] - values["recovered"],
        }
    return {"cuts": cuts}


def _path(order: str = "gradient") -> tuple[str, ...]:
    return "orders", order, "free"


def _free(result: Result, task: str, order: str = "gradient") -> str:
    return result.text(task, *_path(order), digits=2)


def _text(result: Result, parts: Sequence[str]) -> str:
    return ", ".join(parts)


def _least_share(shares: Sequence[float]) -> Verdict:
    """A fifth on every task holds, on most weakly."""
    if any(map(math.isnan, shares)):
        return Verdict.OPEN
    enough = sum(share >= FREE_SHARE for share in shares)
    if enough == len(shares):
        return Verdict.HOLDS
    return Verdict.WEAKLY if enough > len(shares) / 2 else Verdict.NOT_HERE


def _across(result: Result, more: str, less: str) -> tuple[float, float]:
    return result.difference(more, less, *_path())


def _few(shares: Sequence[float]) -> Verdict:
    """At most a quarter of the heads on the mean of the tasks holds, at most a half weakly."""
    if any(map(math.isnan, shares)):
        return Verdict.OPEN
    mean = sum(shares) / len(shares)
    if mean <= FEW:
        return Verdict.HOLDS
    return Verdict.WEAKLY if mean <= HALF else Verdict.NOT_HERE


def _harm(result: Result) -> Verdict:
    """Heads that do harm on both halves of the texts on most tasks holds, on any weakly."""
    counts = [result.mean(task, "harmful_on_both") for task in TASKS]
    if any(map(math.isnan, counts)):
        return Verdict.OPEN
    harmed = sum(count >= 1 for count in counts)
    if harmed > len(counts) / 2:
        return Verdict.HOLDS
    return Verdict.WEAKLY if any(counts) else Verdict.NOT_HERE


def _harm_text(result: Result) -> str:
    parts = [
        f"{task} {result.text(task, 'harmful', digits=1)}, of which "
        f"{result.text(task, 'harmful_on_both', digits=1)} on other texts too (score without them "
        f"{result.mean(task, 'gain'):+.4f})"
        for task in TASKS
        if result.runs(task)
    ]
    return f"Heads without which the loss falls by 2.58 standard errors: {'; '.join(parts)}."


def _better_order(result: Result, better: str, worse: str) -> Verdict:
    """The difference of free shares over all tasks and seeds, and its standard error."""
    pairs = [zip(result.each(task, *_path(better)), result.each(task, *_path(worse)), strict=True) for task in TASKS]
    differences = [more - less for task in pairs for more, less in task]
    if len(differences) < 2:
        return Verdict.OPEN
    count, mean = len(differences), sum(differences) / len(differences)
    spread = math.sqrt(sum((value - mean) ** 2 for value in differences) / (count - 1))
    return compare(mean, spread / math.sqrt(count), least=LEAST_SHARE)


def _cut_findings(result: Result) -> list[Finding]:
    cuts = [str(cut) for cut in result.settings["cuts"]]
    most = cuts[-1]
    rise = result.mean("language", "cuts", most, "rise")

    def bits(cut: str) -> str:
        parts = [f"{CUTS[name]} {result.text('language', 'cuts', cut, name)}" for name in CUTS]
        return f"without {float(cut):.0%} of the heads: {', '.join(parts)}"

    if math.isnan(rise):
        verdict = Verdict.OPEN
    elif rise <= SAME:
        verdict = Verdict.HOLDS
    else:
        verdict = Verdict.WEAKLY if rise <= NEARLY else Verdict.NOT_HERE
    leads = [
        compare(
            result.mean("language", "cuts", cut, "lead"),
            result.error("language", "cuts", cut, "lead"),
            least=LEAST_BITS,
        )
        for cut in cuts
    ]
    text = f"Bits per byte {'; '.join(map(bits, cuts))}."
    rises = f"With {float(most):.0%} removed and trained on, the loss rises by {rise:.1%}. "
    rises = "" if math.isnan(rise) else rises
    return [Finding(GATES, verdict, rises + text), Finding(SMALL, weakest(*leads), text)]


STUDY = Pruning()
