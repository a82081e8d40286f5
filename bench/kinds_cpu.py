"""The kinds of all heads on the CPU, in core time, beside the limit: the matrix products alone.

    python bench/kinds_cpu.py smollm2

The products of the linear layers are counted, and timed at the rate that one large product reaches
on one core; the same tokens cannot be read in less. Run it with OMP_NUM_THREADS=1.
"""

import argparse
import json
import platform
import resource
import time
from datetime import UTC, datetime
from pathlib import Path

import torch
import torch.nn.functional as F
from side_by_side import say

from manyheads import lens, load

__all__ = ["count_products", "main", "product_rate"]

RESULTS = Path(__file__).parent / "results"
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


def cpu_flags() -> list[str]:
    lines = Path("/proc/cpuinfo").read_text("utf-8").splitlines()
    flags = next((line for line in lines if line.lower().startswith(("flags", "features"))), ":")
    wanted = ("avx2", "avx512f", "avx512_vnni", "amx", "asimd", "asimddp", "i8mm", "bf16", "sve")
    return [flag for flag in flags.partition(":")[2].split() if flag.startswith(wanted)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", nargs="?", default="smollm2")
    parser.add_argument("--write", action="store_true", help="store the result in bench/results")
    options = parser.parse_args()
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
    say(f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}")
    say(f"kinds of {len(first.labels)} heads of {options.model}: {measured:.1f} core-s")
    say(f"products of linear layers alone: {limit:.1f} core-s at {rate / 1e9:.1f} GFLOP/s")
    say(f"share of the limit {limit / measured:.0%}; from the cache {cached:.1f} core-s")
    say(f"heads whose first label differs from the stored one: {len(differing)}")
    if options.write:
        file = RESULTS / f"kinds-cpu-{platform.machine()}.json"
        result = {
            "machine": platform.machine(),
            "flags": cpu_flags(),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "date": datetime.now(UTC).date().isoformat(),
            "model": options.model,
            "core_seconds": round(measured, 1),
            "limit_core_seconds": round(limit, 1),
            "cached_core_seconds": round(cached, 1),
            "gflops": round(rate / 1e9, 1),
        }
        file.write_text(json.dumps(result, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
