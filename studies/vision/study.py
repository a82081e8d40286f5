"""Vision transformers against convolutions, with few images and with many."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

from manyheads.models import Vision
from manyheads.pictures import canvas
from studies.images import SIDE, ImageTask
from studies.study import Arm, Finding, Result, Settings, Study, Values, markdown_table
from studies.training import Recipe, Trainer
from studies.vision.image_models import (
    accuracy,
    attention_distances,
    class_loss,
    gradient_distances,
    grid_distances,
    make_model,
)
from studies.vision.judges import (
    JUDGES,
    KINDS,
    arm_name,
    best_arm,
    even_attention,
    in_points,
    list_fields,
)


class VisionStudy(Study):
    name = "vision"
    title = "ViT against CNN"
    question = (
        "A vision transformer and a residual CNN of about a million weights, trained for the same "
        "number of steps on 500 to 50,000 images, with and without random shifts and mirroring; "
        "and from how far away their layers read."
    )
    full: ClassVar[Settings] = {
        # The first of them is what the claims are measured on.
        "sets": {
            "cifar10": [500, 2000, 5000, 20_000, 50_000],
            "fashion-mnist": [500, 5000, 50_000],
        },
        "middle": 5000,
        # The others only for the first set, with the middle number of images.
        "seeds": [0, 1, 2],
        "test_images": 10_000,
        "measured_images": 32,
        "ViT": {"width": 128, "layers": 6, "heads": 4, "hidden": 512, "patch": 4},
        "CNN": {"widths": [32, 64, 128], "blocks": 3},
        "steps": 1500,
        "batch": 256,
        "lr": {"ViT": 1e-3, "CNN": 2e-3},
        "weight_decay": 0.05,
        "warm_up": 100,
    }
    quick: ClassVar[Settings] = {
        "sets": {"shapes": [100, 800]},
        "middle": 100,
        "seeds": [0, 1],
        "test_images": 400,
        "measured_images": 8,
        "ViT": {"width": 48, "layers": 3, "heads": 3, "hidden": 96, "patch": 4},
        "CNN": {"widths": [8, 16, 32], "blocks": 1},
        "steps": 150,
        "batch": 24,
        "lr": {"ViT": 2e-3, "CNN": 5e-3},
        "warm_up": 20,
    }
    test: ClassVar[Settings] = {
        **quick,
        "sets": {"shapes": [16, 32]},
        "middle": 16,
        "seeds": [0],
        "test_images": 16,
        "measured_images": 2,
        "ViT": {"width": 16, "layers": 2, "heads": 2, "hidden": 16, "patch": 8},
        "CNN": {"widths": [8, 16], "blocks": 1},
        "steps": 3,
        "batch": 4,
    }
    limits = (
        "At most 50,000 images of 32 pixels and models of a million weights: a ViT overtook "
        "ResNets in the publication only after tens of millions of larger images.",
        "All runs have the same number of steps, so that few images are seen often: 500 of them "
        "768 times, 50,000 of them eight times. More steps would help large sets more.",
        "One learning rate for each kind, not tuned. A set of n images is its first n, the same "
        "for all seeds; three seeds at 5,000 images of CIFAR-10, and arms of one seed take their "
        "error from the spread of those.",
        "Augmentation is a shift by up to four pixels and mirroring, for Fashion-MNIST too; not "
        "the mixing and erasing of images that is usual for ViTs.",
        "Distances of attention leave out the class token. Receptive fields are those of the "
        "middle position, as a mean distance weighted by the size of gradients.",
        "The quick study draws simple shapes instead of reading photographs.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        first, *others = settings["seeds"]
        main = next(iter(settings["sets"]))
        runs = [
            (source, kind, count, augmented)
            for source, counts in settings["sets"].items()
            for count in counts
            for augmented in (False, True)
            for kind in KINDS
        ]
        keys = ("source", "kind", "count", "augmented")
        repeated = [run for run in runs if run[0] == main and run[2] == settings["middle"]]
        return [
            Arm(arm_name(*run), seed, dict(zip(keys, run, strict=True)))
            for seed, chosen in ((first, runs), *((seed, repeated) for seed in others))
            for run in chosen
        ]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        options: Mapping[str, Any] = arm.options
        kind = options["kind"]
        task = ImageTask(options["source"], device, options["count"], settings["test_images"])
        model = make_model(kind, settings, task.channels, task.classes, arm.seed).to(device)
        recipe = Recipe(
            steps=settings["steps"],
            lr=settings["lr"][kind],
            warm_up=settings["warm_up"],
            weight_decay=settings["weight_decay"],
        )
        batches = task.batches(settings["batch"], arm.seed, augmented=options["augmented"])
        Trainer(model, recipe, class_loss).run(batches, arm.key)
        # As many training images, to see what was learned by heart.
        head = slice(settings["test_images"])
        values: Values = {
            "accuracy": accuracy(model, task.images("test", head), task.labels["test"]),
            "train_accuracy": accuracy(
                model, task.images("train", head), task.labels["train"][head]
            ),
            "parameters": sum(weight.numel() for weight in model.parameters()),
        }
        measured = task.images("test", slice(settings["measured_images"]))
        fields = gradient_distances(model, measured)
        values["field"] = {"first": fields[0], "last": fields[-1], "all": fields}
        if isinstance(model, Vision):
            heads = attention_distances(model, measured)
            spans = [max(layer) - min(layer) for layer in heads]
            values["distance"] = {
                "heads": heads,
                "growth": mean(heads[-1]) - mean(heads[0]),
                "narrowing": spans[0] - spans[-1],
            }
        return values

    def findings(self, result: Result) -> Sequence[Finding]:
        return [Finding(claim, *judge(result)) for claim, judge in JUDGES]

    def table(self, result: Result) -> str:
        header = ["images", "augmented", *(f"{kind}, %" for kind in KINDS)]
        header += ["gap, points", *(f"{kind} in training, %" for kind in KINDS)]
        parts = []
        for source, counts in result.settings["sets"].items():
            rows = []
            for count in counts:
                for augmented in (False, True):
                    arms = [arm_name(source, kind, count, augmented) for kind in KINDS]
                    gap = result.mean(arms[0], "accuracy") - result.mean(arms[1], "accuracy")
                    row = [f"{count:,}", "yes" if augmented else "no"]
                    row += [result.text(arm, "accuracy", digits=1) for arm in arms]
                    row.append(in_points(gap))
                    row += [result.text(arm, "train_accuracy", digits=1) for arm in arms]
                    rows.append(row)
            parts.append(f"{source}, share of test images that are right:")
            parts.append(markdown_table(header, rows))
        best = {kind: best_arm(result, kind) for kind in KINDS}
        weights = ", ".join(
            f"{kind} {result.mean(arm, 'parameters'):,.0f}" for kind, arm in best.items()
        )
        fields = "; ".join(f"{kind} {list_fields(result, arm)}" for kind, arm in best.items())
        parts.append(f"Weights: {weights}. Receptive field by layer, in pixels: {fields}.")
        return "\n\n".join(parts)

    def draw(self, result: Result, path: Path) -> None:
        sets = result.settings["sets"]
        subtitle = (
            "lines: augmented; dashed: as they are. Right: trained on the largest set, augmented; "
            "dotted: reading everything evenly"
        )
        size = (5.2 * (len(sets) + 2), 4.2)
        with canvas.themed_figure(path, "light", size, self.title, subtitle) as (figure, palette):
            panels = figure.subplots(1, len(sets) + 2)
            for axes, (source, counts) in zip(panels, sets.items(), strict=False):
                for kind, color in zip(KINDS, palette.series, strict=False):
                    for augmented, style in ((True, "o-"), (False, "o--")):
                        names = [arm_name(source, kind, count, augmented) for count in counts]
                        values = [result.mean(name, "accuracy") for name in names]
                        label = kind if augmented else None
                        axes.plot(counts, values, style, color=color, linewidth=2, label=label)
                axes.set_xscale("log")
                axes.set_xticks(counts, [f"{count:,}" for count in counts])
                axes.minorticks_off()
                axes.set_xlabel("images to train on")
                axes.set_title(f"{source}, accuracy in %", loc="left", size=12, weight="bold")
                axes.legend(frameon=False)
            heads, fields = panels[-2:]
            for runs in result.runs(best_arm(result, "ViT"))[:1]:
                for layer, values in enumerate(runs["distance"]["heads"], start=1):
                    heads.plot([layer] * len(values), values, "o", color=palette.series[1])
                means = [mean(values) for values in runs["distance"]["heads"]]
                heads.plot(range(1, 1 + len(means)), means, color=palette.series[1], linewidth=2)
            heads.axhline(even_attention(result), color=palette.muted, linestyle=":")
            heads.set_title("distance of heads, pixels", loc="left", size=12, weight="bold")
            heads.set_xlabel("layer of the ViT")
            heads.set_xticks(range(1, 1 + result.settings["ViT"]["layers"]))
            for kind, color in zip(KINDS, palette.series, strict=False):
                for runs in result.runs(best_arm(result, kind))[:1]:
                    values = runs["field"]["all"]
                    depth = [number / len(values) for number in range(1, 1 + len(values))]
                    fields.plot(depth, values, "o-", color=color, linewidth=2, label=kind)
            even = float(grid_distances(SIDE, 1)[SIDE // 2 * (SIDE + 1)].mean())
            fields.axhline(even, color=palette.muted, linestyle=":")
            fields.set_title("receptive field, pixels", loc="left", size=12, weight="bold")
            fields.set_xlabel("depth, as a share of all layers")
            fields.legend(frameon=False)
            for axes in (heads, fields):
                axes.set_ylim(bottom=0)
            for axes in panels:
                canvas.style_axes(axes, palette)


STUDY = VisionStudy()
