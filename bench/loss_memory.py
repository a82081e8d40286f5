"""Peak memory and time of the loss of a step, with all logits at once and in chunks.

python bench/loss_memory.py [--device cuda] [--tokens 8192] [--vocabulary 50304] [--width 768]
"""

import argparse
from functools import partial

import torch
import torch.nn.functional as F
from side_by_side import Work, alone, check_agreement, count, peak_extra, race, say, show
from torch import Tensor

from manyheads.train.loss.chunked_cross_entropy import cross_entropy_sums

Given = tuple[Tensor, Tensor, Tensor]


def loss_inputs(tokens: int, vocabulary: int, width: int, device: str) -> Given:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(tokens, width, generator=draw).to(device).requires_grad_()
    vectors = (torch.randn(vocabulary, width, generator=draw) * 0.02).to(device).requires_grad_()
    answers = torch.randint(vocabulary, (tokens,), generator=draw).to(device)
    return x, vectors, answers


def plain(x: Tensor, vectors: Tensor, answers: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, vectors).float(), answers, reduction="sum")


def chunked(x: Tensor, vectors: Tensor, answers: Tensor) -> Tensor:
    return cross_entropy_sums(x, vectors, None, answers)[0]


def chunked_squares(x: Tensor, vectors: Tensor, answers: Tensor) -> Tensor:
    return cross_entropy_sums(x, vectors, None, answers, squares=True)[0]


WAYS = {"all at once": plain, "chunks": chunked, "chunks, with z-loss": chunked_squares}


def step(way: str, inputs: Given, half: bool) -> Tensor:
    """Forward and backward; what is returned is the gradient of the words' vectors."""
    x, vectors, answers = inputs
    with torch.autocast(x.device.type, torch.bfloat16, enabled=half):
        loss = WAYS[way](x, vectors, answers)
    loss.backward()
    assert vectors.grad is not None
    gradient, vectors.grad, x.grad = vectors.grad, None, None
    return gradient


def peak(way: str, shape: tuple[int, int, int], device: str, half: bool) -> int:
    inputs = loss_inputs(*shape, device)
    # What libraries keep for themselves after their first call is not the step's.
    step(way, loss_inputs(16, 64, 32, device), half)
    return peak_extra(lambda: step(way, inputs, half), device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--vocabulary", type=int, default=50_304)
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--precision", choices=["float32", "bfloat16"], default="float32")
    request = parser.parse_args()
    shape = (request.tokens, request.vocabulary, request.width)
    say(f"{request.tokens} tokens, vocabulary {request.vocabulary}, width {request.width}")
    _measure(shape, request.device, request.rounds, request.precision == "bfloat16")


def _measure(shape: tuple[int, int, int], device: str, rounds: int, half: bool) -> None:
    inputs = loss_inputs(*shape, device)
    entrants: dict[str, Work] = {way: partial(step, way, inputs, half) for way in WAYS}
    few: Given = loss_inputs(512, *shape[1:], device)
    worst = check_agreement(
        {way: partial(step, way, few, half) for way in WAYS},
        truth="all at once",
        limit=0.02 if half else 1e-4,
    )
    peaks = {way: alone(peak, way, shape, device, half) for way in WAYS}
    times = race(entrants, device=device, rounds=rounds, warmups=int(device == "cuda"))
    rows = [
        [
            way,
            count(peaks[way], "B"),
            f"{peaks['all at once'] / peaks[way]:.2f}",
            count(times.seconds(way), "s"),
            f"{times.ratio('all at once', way):.2f}",
        ]
        for way in WAYS
    ]
    title = "bfloat16 autocast" if half else "float32"
    columns = ["loss and gradients", "peak", "times less", "time", "times faster"]
    show(f"{title}: gradients differ by at most {worst:.1e}", columns, rows)


if __name__ == "__main__":
    main()
