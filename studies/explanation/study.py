"""Attention as explanation: Jain and Wallace, and the four tests of Wiegreffe and Pinter."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from manyheads.pictures import canvas
from studies.explanation.classifiers import LabeledWords
from studies.explanation.four_tests import Tests
from studies.explanation.judged_claims import GUIDES, JUDGES, TESTED
from studies.explanation.weight_tests import MAX_DIVERGENCE
from studies.study import Arm, Finding, Result, Settings, Study, Values, markdown_table


class Explanation(Study):
    name = "explanation"
    title = "Attention as explanation"
    question = (
        "Is attention an explanation? Sentiment of film reviews, told by an LSTM with one head of "
        "attention on top, as published, and by a small transformer whose last layer is tested: "
        "do weights agree with gradients, are there others with the same answer, and do they help "
        "another model?"
    )
    full: ClassVar[Settings] = {
        "seeds": [0, 1, 2, 3, 4],
        "labeled": "reviews",
        "texts": 10_043,
        "length": 40,
        "vocabulary": 8000,
        "width": 128,
        "heads": 4,
        "dropout": 0.3,
        "batch": 64,
        "steps": 600,
        "lr": 2e-3,
        "adversary_costs": [0.003, 0.03, 0.3],
        "tested": 300,
        "draws": 100,
        "search_steps": 200,
    }
    quick: ClassVar[Settings] = {
        "seeds": [0, 1],
        "labeled": "topics",
        "texts": 1000,
        "length": 24,
        "vocabulary": 1000,
        "width": 32,
        "heads": 2,
        "batch": 32,
        "steps": 150,
        "lr": 5e-3,
        "tested": 60,
        "draws": 20,
        "search_steps": 100,
    }
    test: ClassVar[Settings] = {
        **quick,
        "seeds": [0],
        "texts": 60,
        "length": 6,
        "width": 8,
        "batch": 4,
        "steps": 4,
        "adversary_costs": [0.03],
        "tested": 6,
        "draws": 2,
        "search_steps": 4,
    }
    limits = (
        "About 8,500 sentences to learn from and vectors of words that start at random; the "
        "published models start with pretrained ones. Accuracy instead of F1, since both classes "
        "are equally frequent.",
        "The transformer has one whole layer and one of attention from a start vector, whose "
        "weights are tested; those of the layer below are not. Its answer can pass the tested "
        "weights by, through the residual. Weights of its heads are averaged where one weight per "
        "word is needed.",
        "One data set of short texts. The published tests differ most on long ones and on medical "
        "notes, which cannot be had.",
        "Of the trained adversaries the farthest is taken whose answers differ from the model's by "
        "at most 0.1 on the mean of the held-out texts, or else the one that differs least.",
        "The quick run has no sentiment: it tells two help topics of Python apart.",
    )

    def arms(self, settings: Settings) -> Sequence[Arm]:
        return [Arm(kind, seed) for kind in TESTED for seed in settings["seeds"]]

    def run(self, arm: Arm, settings: Settings, device: str) -> Values:
        texts = LabeledWords(
            settings["labeled"],
            device,
            settings["texts"],
            settings["length"],
            settings["vocabulary"],
        )
        kind = next(kind for kind in TESTED if kind == arm.name)
        return Tests(kind, texts, settings, device, arm.seed).run()

    def findings(self, result: Result) -> Sequence[Finding]:
        findings = []
        for claim, (judge, describe) in JUDGES.items():
            texts = [f"{kind} {describe(result, kind)}" for kind in TESTED]
            verdict = judge(result, "LSTM")
            also = f" The transformer alone: {judge(result, 'transformer')}."
            findings.append(Finding(claim, verdict, f"{'; '.join(texts)}.{also}"))
        return findings

    def table(self, result: Result) -> str:
        rows = [
            [name, *(result.text(kind, *path) for kind in TESTED)]
            for name, path in MEASURES.items()
        ]
        for cost in map(str, result.settings["adversary_costs"]):
            for name in ("divergence", "moved", "accuracy"):
                texts = [result.text(kind, "trained", cost, name) for kind in TESTED]
                rows.append([f"adversary trained at {cost}: {name}", *texts])
        return markdown_table(["", *TESTED], rows)

    def draw(self, result: Result, path: Path) -> None:
        subtitle = "means over seeds with standard errors; dotted: the largest divergence"
        with canvas.themed_figure(path, "light", (14.0, 4.2), self.title, subtitle) as (
            figure,
            palette,
        ):
            panels = figure.subplots(1, 3)
            colors = dict(zip(TESTED, palette.series, strict=False))
            groups = (
                ("Kendall's tau of weights with", TAUS),
                ("divergence from the model's weights, nats", FAR),
                ("accuracy without context, by weights", ACCURACIES),
            )
            for axes, (title, measures) in zip(panels, groups, strict=True):
                canvas.style_axes(axes, palette)
                axes.set_title(title, loc="left", size=12, weight="bold")
                for index, kind in enumerate(TESTED):
                    at = [place + 0.38 * (index - 0.5) for place in range(len(measures))]
                    values = [result.mean(kind, *path) for path in measures.values()]
                    errors = [_or_zero(result.error(kind, *path)) for path in measures.values()]
                    ticks = {"ecolor": palette.muted, "elinewidth": 1.5}
                    axes.bar(
                        at,
                        values,
                        0.36,
                        yerr=errors,
                        color=colors[kind],
                        label=kind,
                        error_kw=ticks,
                    )
                axes.set_xticks(range(len(measures)), list(measures))
            panels[1].axhline(MAX_DIVERGENCE, color=palette.muted, linestyle=":", linewidth=1)
            accuracies = [
                value
                for kind in TESTED
                for name in GUIDES
                for value in result.each(kind, "guides", name)
            ]
            panels[2].set_ylim(bottom=min([CHANCE, *accuracies]))
            panels[0].legend(frameon=False)


# Of two classes that are equally frequent.
CHANCE = 0.5
TAUS = {
    "gradients": ("tau", "gradient"),
    "words\nleft out": ("tau", "left out"),
    "(gradients with\nleft out)": ("tau", "each other"),
}
FAR = {
    "another\nseed": ("seeds",),
    "searched": ("searched", "divergence"),
    "trained": ("adversary", "divergence"),
}
ACCURACIES = {name: ("guides", name) for name in GUIDES}
MEASURES = {
    "accuracy": ("accuracy",),
    "accuracy with uniform weights": ("uniform",),
    "tau of weights and gradients": ("tau", "gradient"),
    "tau of weights and leaving out": ("tau", "left out"),
    "tau of gradients and leaving out": ("tau", "each other"),
    "answers move if weights change places, median": ("permuted",),
    "divergence of another seed": ("seeds",),
    "divergence of searched adversaries": ("searched", "divergence"),
    "texts with an adversary beyond 0.35": ("searched", "far"),
    **{f"without context, weights {name}": ("guides", name) for name in GUIDES},
}


def _or_zero(value: float) -> float:
    return 0.0 if math.isnan(value) else value


STUDY = Explanation()
