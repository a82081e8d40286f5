"""Pruning: how many heads are free by task and by order, which do harm, and small models."""

from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from typing import ClassVar

from manyheads import build
from manyheads.pictures import canvas
from manyheads.surgery import prune
from studies.byte_texts import ByteTexts
from studies.pruning.head_orders import ORDERS, measure_heads, measure_orders, order_heads
from studies.pruning.judged_claims import CUTS, JUDGES, free_by
from studies.pruning.tasks import TASKS, Task, train_language
from studies.study import (
    Arm,
    Finding,
    Result,
    Settings,
    Study,
    Values,
    markdown_table,
)
from studies.training import bits_per_byte


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
        "pairs": 5000,
        "half_tokens": 32,
        "similar_among": 128,
        "chosen_texts": 512,
        "max_tokens": 64,
        "encoder_layers": 4,
        "finetune_steps": 400,
        "finetune_lr": 5e-4,
        "batch_tokens": 2048,
        "gate_passages": 256,
        "gate_steps": 200,
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
        "steps": 200,
        "recovery_steps": 60,
        "lr": 3e-3,
        "passages": 16,
        "held_out": 64,
        "labeled": "topics",
        "labeled_texts": 480,
        "tagged": "topics",
        "tagged_texts": 480,
        "pairs": 192,
        "half_tokens": 16,
        "similar_among": 16,
        "chosen_texts": 64,
        "max_tokens": 32,
        "encoder_layers": 2,
        "finetune_steps": 40,
        "batch_tokens": 512,
        "gate_passages": 64,
        "gate_steps": 60,
        "permutations": 4,
        "draws": 1,
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
        return [Finding(claim, *judge(result)) for claim, judge in JUDGES.items()]

    def table(self, result: Result) -> str:
        rows = []
        for task in TASKS:
            rows.append(
                [
                    task,
                    result.text(task, "score"),
                    *(result.text(task, *free_by(name), digits=2) for name in ORDERS),
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


STUDY = Pruning()
