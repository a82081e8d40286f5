"""The recorded step after long texts on CUDA, beside a step of transformers.

The Llama shape of 1.24 billion weights, in bfloat16. A step has to read all weights, and the keys
and values of all tokens so far: the table shows the share of that limit.
"""

import gc
from functools import partial
from typing import Any

import torch
from generate_cuda import LIMIT, memory_rate, pair
from side_by_side import race, show
from torch import Tensor

from manyheads.decoding.steps.cuda_graph import CudaGraphSteps, capacity_for
from manyheads.ragged import Ragged

__all__ = ["run"]

LENGTHS = (1_000, 4_000, 16_000, 32_000)
BATCHES = (1, 8)
# Steps whose scores are compared, and room for those that are timed.
CHECKED, ROOM = 8, 64


def run(rounds: int) -> dict[str, float]:
    peer, ours = pair()
    rate = memory_rate()
    weights = sum(parameter.nbytes for parameter in ours.parameters())
    rows, figures = [], {}
    for batch in BATCHES:
        for length in LENGTHS:
            seconds, peer_seconds, keys, off = _steps(peer, ours, batch, length, rounds)
            share = (weights + keys) / rate / seconds
            row = [f"{batch} x {length:,}", f"{seconds * 1e3:.2f} ms", f"{share:.0%}"]
            rows.append(
                [
                    *row,
                    f"{peer_seconds * 1e3:.1f} ms",
                    f"{peer_seconds / seconds:.1f}",
                    f"{off:.0e}",
                ]
            )
            figures[f"{batch} x {length}, recorded step, ms"] = seconds * 1e3
            figures[f"{batch} x {length}, share of limit"] = share
            figures[f"{batch} x {length}, transformers, ms"] = peer_seconds * 1e3
    columns = ["texts x tokens", "recorded", "of limit", "transformers", "ratio", "differ"]
    show("a step after long texts", columns, rows)
    return figures


@torch.inference_mode()
def _steps(
    peer: Any, ours: Any, batch: int, length: int, rounds: int
) -> tuple[float, float, int, float]:
    """Seconds of both steps, the bytes of keys and values, and how far scores differ."""
    from transformers import DynamicCache

    gc.collect()
    torch.cuda.empty_cache()
    draw = torch.Generator().manual_seed(length)
    ids = torch.randint(10, 1000, (batch, length + CHECKED), generator=draw).cuda()
    prompts = ids[:, :length]
    steps = CudaGraphSteps(ours, batch, capacity_for(length + ROOM, compiled=False))
    result = steps.start(Ragged.from_padded(prompts))
    kept = DynamicCache()
    read = partial(peer, past_key_values=kept, logits_to_keep=1)
    expected = read(prompts).logits[:, -1]
    off = _apart(result, expected)
    for step in range(length, length + CHECKED):
        result = steps.next(ids[:, step])
        expected = read(ids[:, step, None]).logits[:, -1]
        off = max(off, _apart(result, expected))
    if not off <= LIMIT:
        raise SystemExit(f"scores differ by {off:.1e} of their length, more than {LIMIT}")
    keys = sum(layer.keys.nbytes + layer.values.nbytes for layer in kept.layers)
    program = steps.latest
    assert program is not None

    def replay() -> Tensor:
        program.graph.replay()
        return program.logits

    def launch() -> Tensor:
        scores: Tensor = read(ids[:, :1]).logits
        # The peer's kernels plan anew for every length, so it stays at this one.
        kept.crop(-1)
        return scores

    times = race({"recorded": replay, "launched": launch}, device="cuda", rounds=rounds, calls=5)
    # The host is behind the device where it launches every kernel of a step.
    host = max(times.seconds("launched"), times.host_seconds("launched"))
    return times.seconds("recorded"), host, keys, off


def _apart(result: Tensor, expected: Tensor) -> float:
    return float((result.float() - expected.float()).norm() / expected.float().norm())
