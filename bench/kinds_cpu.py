"""The kinds of all heads on the CPU, in core time, beside the limit: the matrix products alone.

    python bench/kinds_cpu.py smollm2

The products of the linear layers are counted, and timed at the rate that one large product reaches
on one core; the same tokens cannot be read in less. Run it with OMP_NUM_THREADS=1.
"""

import argparse
import resource
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import say
from stored_results import add_store, introduce, store

from manyheads import lens, load

__all__ = ["count_products", "main", "product_rate"]

# Tokens of a batch, and the width of SmolLM2's stream and feed-forward.
ROWS, WIDTH, HIDDEN = 1184, 576, 1536


def product_rate(rounds: int = 20) -> float:
    """Floating-point operations per second of one large product, the best of some rounds."""
    x, weight = torch.randn(ROWS, WIDTH), torch.randn(HIDDEN, WIDTH).T.contiguous().T
    best = float("inf")
    for _ in range(rounds):
        started = time.thread_time()
        F.linear(x, weight)
        best = min(best, time.thread_time() - started)
    return 2 * ROWS * WIDTH * HIDDEN / best


class count_products:  # noqa: N801
    """Counts the operations of all linear layers inside the block."""

    def __enter__(self) -> "count_products":
        self.operations, self._linear = 0, F.linear
        setattr(F, "linear", self._counted)  # noqa: B010
        return self

    def __exit__(self, *_: object) -> None:
        setattr(F, "linear", self._linear)  # noqa: B010

    def _counted(self, x: torch.Tensor, weight: torch.Tensor, *more: torch.Tensor) -> torch.Tensor:
        self.operations += 2 * x.numel() * weight.shape[0]
        return self._linear(x, weight, *more)


def core_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    add_store(parser)
    options = parser.parse_args()
    introduce("cpu")
    model, rate = load(options.model), product_rate()
    started = core_seconds()
    with count_products() as products:
        first = lens.kinds(model, remeasure=True, progress=False)
    measured = core_seconds() - started
    started = core_seconds()
    again = lens.kinds(model, progress=False)
    cached = core_seconds() - started
    limit = products.operations / rate
    differing = [head for head in first.labels if first.best(head) != again.best(head)]
    say(f"kinds of {len(first.labels)} heads of {options.model}: {measured:.1f} core-s")
    say(f"products of linear layers alone: {limit:.1f} core-s at {rate / 1e9:.1f} GFLOP/s")
    say(f"share of the limit {limit / measured:.0%}; from the cache {cached:.1f} core-s")
    say(f"heads whose first label differs from the stored one: {len(differing)}")
    figures = {
        "core-seconds": measured,
        "limit, core-seconds": limit,
        "share of limit": limit / measured,
        "core-seconds from the cache": cached,
    }
    store(options.store, f"kinds-{Path(options.model).name}", "cpu", figures)


if __name__ == "__main__":
    main()
