"""Low-rank adapters on a full base (on CUDA 16 bits) and on a 4-bit one: memory, time and loss.

python bench/adapt.py [--model FOLDER] [--steps 30] [--rank 16] [--tokens 4096] [--length 1024]

Without a model the base is a Llama of 1.2 billion weights drawn by a seed (on a CPU, a small one),
and the text is this library's own source, byte by byte: what is compared is how well the same
adapter learns on the same base, whole and rounded to four bits.
"""

import argparse
import gc
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
from side_by_side import count, say, show
from torch import Tensor

from manyheads.checkpoints.folder import load
from manyheads.models.build import build
from manyheads.ragged import Ragged
from manyheads.surgery.lora.adapters import adapt
from manyheads.surgery.lora.low_rank import LoraConfig
from manyheads.surgery.lora.quantization import quantize
from manyheads.train.loss.chunked_cross_entropy import cross_entropy_sums

SHAPE = "llama-1b-shape"
SMALL = {"width": 64, "heads": 4, "kv_heads": 2, "head_size": 16, "hidden": 128, "layers": 2}
TARGETS = ("query", "key", "value", "output", "gate", "up", "contract")
BYTES = 256
# A processor may have no product of half numbers: there all is whole, and shows that it runs.
PRECISION = {"cuda": torch.bfloat16, "cpu": torch.float32}
SOURCE = Path(__file__).parents[1] / "src" / "manyheads"
KINDS = ("whole, all weights", "whole, adapter", "4 bits, adapter")


@dataclass(frozen=True, slots=True)
class Measured:
    """Bytes that rest between steps and at their highest, seconds a step, losses of all steps."""

    base: int
    peak: int
    seconds: float
    losses: tuple[float, ...]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="", help="a folder of a decoder with expand and gate")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--length", type=int, default=1024)
    request = parser.parse_args()
    name = torch.cuda.get_device_name() if request.device == "cuda" else "CPU"
    say(f"{name}, torch {torch.__version__}, rank {request.rank}, {request.tokens} tokens a step")
    texts = batches(request)
    result = {}
    for kind in KINDS:
        result[kind] = measure(kind, request, texts)
        gc.collect()
        if request.device == "cuda":
            torch.cuda.empty_cache()
    truth = result["whole, adapter"]
    rows = [
        [
            kind,
            count(each.base, "B"),
            count(each.peak, "B"),
            count(each.seconds, "s"),
            f"{each.seconds / truth.seconds:.2f}",
            f"{each.losses[0]:.3f}",
            f"{sum(each.losses[-5:]) / len(each.losses[-5:]):.3f}",
        ]
        for kind, each in result.items()
    ]
    columns = ["base, what learns", "base", "peak", "step", "times", "first loss", "last five"]
    show(f"{request.model or SHAPE}, {request.steps} steps of AdamW", columns, rows)


def batches(request: argparse.Namespace) -> list[Ragged]:
    """One batch a step: pieces of the source, as bytes."""
    source = b"".join(file.read_bytes() for file in sorted(SOURCE.rglob("*.py")))
    text = torch.tensor(list(source))
    needed = request.steps * request.tokens
    text = text.repeat(-(-needed // len(text)))[:needed]
    pieces = text.view(request.steps, -1, request.length)
    return [Ragged.from_list(list(step)).to(request.device) for step in pieces]


def base(request: argparse.Namespace) -> Any:
    dtype = PRECISION[request.device]
    if request.model:
        return load(request.model, dtype=dtype, device=request.device)
    changes = SMALL | {"vocabulary": BYTES} if request.device == "cpu" else {}
    return build(SHAPE, **changes, seed=0, device=request.device, dtype=dtype)


def measure(kind: str, request: argparse.Namespace, texts: list[Ragged]) -> Measured:
    before = allocated(request.device)
    model = base(request)
    if kind.startswith("4"):
        quantize(model)
        gc.collect()
    rests = allocated(request.device) - before
    if request.device == "cpu":
        tensors = (*model.parameters(), *model.buffers())
        rests = sum(each.nbytes for each in tensors)
    if kind.endswith("adapter"):
        adapt(model, LoraConfig(rank=request.rank, alpha=2.0 * request.rank, targets=TARGETS))
    learns = [each for each in model.parameters() if each.requires_grad]
    rate = 1e-3 if kind.endswith("adapter") else 1e-4
    optimizer = torch.optim.AdamW(learns, lr=rate, weight_decay=0.0, fused=True)
    model.train()
    if request.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    losses, seconds = [], []
    for batch in texts:
        started = time.perf_counter()
        loss = step(model, optimizer, batch)
        # Reading it waits for the device.
        losses.append(loss.item())
        seconds.append(time.perf_counter() - started)
    peak = torch.cuda.max_memory_allocated() - before if request.device == "cuda" else 0
    return Measured(rests, peak, median(seconds[2:] or seconds), tuple(losses))


def step(model: Any, optimizer: torch.optim.Optimizer, batch: Ragged) -> Tensor:
    """The next byte of every byte but the last of a piece."""
    device = batch.values.device.type
    with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
        hidden = model.hidden(batch)[0].values
        width = batch.lengths.longest
        read = hidden.view(-1, width, hidden.shape[-1])[:, :-1].flatten(0, 1)
        answers = batch.values.view(-1, width)[:, 1:].flatten()
        vectors = model.readout.vectors(model.table)
        loss: Tensor = cross_entropy_sums(read, vectors, None, answers)[0] / len(answers)
    loss.backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def allocated(device: str) -> int:
    return torch.cuda.memory_allocated() if device == "cuda" else 0


if __name__ == "__main__":
    main()
