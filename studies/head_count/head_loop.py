"""Attention of several heads as a loop, as one batched product and by a fused kernel, timed."""

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from einops import rearrange
from torch import Tensor

WARM_UP, REPEATS = 3, 15


def loop_over_heads(x: Tensor, project: Tensor, output: Tensor, heads: int) -> Tensor:
    """Each head has its own products; what they write is summed."""
    size = x.shape[-1] // heads
    written = torch.zeros_like(x)
    for head in range(heads):
        rows = slice(head * size, (head + 1) * size)
        q, k, v = (x @ part[rows].T for part in project)
        written = written + _weights(q, k) @ v @ output[:, rows].T
    return written


def batched_product(x: Tensor, project: Tensor, output: Tensor, heads: int) -> Tensor:
    """All heads in one product each."""
    q, k, v = _heads(x, project, heads)
    return rearrange(_weights(q, k) @ v, "b h t d -> b t (h d)") @ output.T


def fused_kernel(x: Tensor, project: Tensor, output: Tensor, heads: int) -> Tensor:
    """The same without forming the weights."""
    mixed = F.scaled_dot_product_attention(*_heads(x, project, heads), is_causal=True)
    return rearrange(mixed, "b h t d -> b t (h d)") @ output.T


WAYS: Mapping[str, Callable[[Tensor, Tensor, Tensor, int], Tensor]] = {
    "loop": loop_over_heads,
    "batched": batched_product,
    "fused": fused_kernel,
}


def _heads(x: Tensor, project: Tensor, heads: int) -> Any:
    joined = x @ project.flatten(0, 1).T
    return rearrange(joined, "b t (three h d) -> three b h t d", three=3, h=heads)


def _weights(q: Tensor, k: Tensor) -> Tensor:
    scores = q @ k.mT * q.shape[-1] ** -0.5
    length = scores.shape[-1]
    hidden = torch.ones(length, length, dtype=torch.bool, device=q.device).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def measure_ways(
    heads: int, width: int, batch: int, length: int, device: str
) -> dict[str, dict[str, float]]:
    """Milliseconds (the least of several) and, on CUDA, MiB at the peak of each way.

    "train" is forward and backward, "run" forward alone.
    """
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x = draw(batch, length, width)
    project, output = (draw(*shape, width) * width**-0.5 for shape in ((3, width), (width,)))
    project.requires_grad_()
    output.requires_grad_()
    values: dict[str, dict[str, float]] = {}
    for name, way in WAYS.items():

        def train(way: Any = way) -> None:
            project.grad = output.grad = None
            way(x, project, output, heads).square().mean().backward()

        @torch.no_grad()
        def run(way: Any = way) -> None:
            way(x, project, output, heads)

        values[name] = {}
        for kind, step in (("train", train), ("run", run)):
            values[name][f"{kind} ms"] = _least_ms(step, device)
            if device == "cuda":
                values[name][f"{kind} MiB"] = _peak_mib(step)
    return values


def _least_ms(step: Callable[[], None], device: str) -> float:
    times = []
    for _ in range(WARM_UP + REPEATS):
        start = _now(device)
        step()
        times.append(_now(device) - start)
    return 1000 * min(times[WARM_UP:])


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _peak_mib(step: Callable[[], None]) -> float:
    """What a step adds to the memory that is in use before it."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20
