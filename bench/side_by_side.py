"""Several ways to do the same work: check that they agree, then time each of them.

All run in turn in one process, round after round, so that other load on the machine affects all of
them. A ratio is the median over rounds of the ratios within a round.
"""

import gc
import math
import multiprocessing
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TypeVar

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

__all__ = ["Race", "Work", "alone", "check_agreement", "count", "peak_extra", "race", "say", "show"]

Work = Callable[[], Tensor]
Result = TypeVar("Result")

CONSOLE = Console(width=118, highlight=False, emoji=False)
# Enough for the host to queue a few calls behind it: events then time the device, not the queueing.
HEAD_START_CYCLES = 8_000_000


@dataclass(frozen=True, slots=True)
class Race:
    """Seconds per call of every entrant in every round.

    `elapsed` is wall time on the CPU and device time on CUDA; `host` is what the processor spent:
    its own seconds over all cores on the CPU, the time to queue the call on CUDA.
    """

    elapsed: dict[str, list[float]]
    host: dict[str, list[float]]

    def seconds(self, name: str) -> float:
        return median(self.elapsed[name])

    def host_seconds(self, name: str) -> float:
        return median(self.host[name])

    def ratio(self, slow: str, fast: str) -> float:
        """How many times longer `slow` takes than `fast`."""
        return _paired(self.elapsed[slow], self.elapsed[fast])

    def host_ratio(self, slow: str, fast: str) -> float:
        """The same by the processor's time, which other work on the machine does not stretch."""
        return _paired(self.host[slow], self.host[fast])

    def fastest(self, names: Sequence[str]) -> str:
        return min(names, key=self.seconds)


def _paired(slow: Sequence[float], fast: Sequence[float]) -> float:
    return median(one / other for one, other in zip(slow, fast, strict=True))


def race(
    entrants: Mapping[str, Work], *, device: str, rounds: int, warmups: int = 1, calls: int = 1
) -> Race:
    """Time every entrant once a round, `calls` calls at a time."""
    elapsed: dict[str, list[float]] = {name: [] for name in entrants}
    host: dict[str, list[float]] = {name: [] for name in entrants}
    for number in range(-warmups, rounds):
        gc.collect()
        for name, work in entrants.items():
            one = _time_on_cuda(work, calls) if device == "cuda" else _time_on_cpu(work, calls)
            if number >= 0:
                elapsed[name].append(one[0] / calls)
                host[name].append(one[1] / calls)
    return Race(elapsed, host)


def _time_on_cpu(work: Work, calls: int) -> tuple[float, float]:
    wall, processor = time.perf_counter(), time.process_time()
    for _ in range(calls):
        work()
    return time.perf_counter() - wall, time.process_time() - processor


def _time_on_cuda(work: Work, calls: int) -> tuple[float, float]:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(HEAD_START_CYCLES)
    queued = time.perf_counter()
    start.record()
    for _ in range(calls):
        work()
    stop.record()
    queued = time.perf_counter() - queued
    torch.cuda.synchronize()
    return start.elapsed_time(stop) / 1e3, queued


def check_agreement(
    entrants: Mapping[str, Work],
    *,
    truth: str,
    limit: float,
    answer: Callable[[Tensor], Tensor] = lambda result: result,
) -> float:
    """The largest difference from `truth`; ends the program where it exceeds the limit.

    The limit is a share of the largest value. `answer` brings every result to one layout.
    """
    expected = answer(entrants[truth]()).float()
    allowed = limit * expected.abs().max().item()
    worst = 0.0
    for name, work in entrants.items():
        if name == truth:
            continue
        actual = answer(work()).float()
        if actual.shape != expected.shape:
            sys.exit(f"{name} answers {tuple(actual.shape)} and {truth} {tuple(expected.shape)}")
        difference = (actual - expected).abs().max().item()
        if math.isnan(difference) or difference > allowed:
            sys.exit(f"{name} differs from {truth} by {difference:.2e}, more than {allowed:.2e}")
        worst = max(worst, difference)
    return worst


def peak_extra(work: Work, device: str) -> int:
    """Bytes in use at the highest point of a call, beyond those in use before it.

    On the CPU ask for it in a process of its own, by `alone`: what the allocator kept of earlier
    work counts as in use before the call, and would serve it unseen.
    """
    gc.collect()
    if device == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        work()
        torch.cuda.synchronize()
        return torch.cuda.max_memory_allocated() - before
    # 5 sets the high-water mark back to what is resident now.
    Path("/proc/self/clear_refs").write_text("5")
    before = _resident("VmRSS")
    work()
    return _resident("VmHWM") - before


def alone(function: Callable[..., Result], *arguments: object) -> Result:
    """The function's answer from a fresh process."""
    fresh = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(max_workers=1, mp_context=fresh) as process:
        return process.submit(function, *arguments).result()


def _resident(field: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(field):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {field}: measuring memory needs Linux")


def count(number: float, unit: str) -> str:
    """A number that reads well in a column.

    >>> count(12_345_678, "B"), count(0.00123, "s")
    ('12.3 MB', '1.23 ms')
    """
    if number == 0:
        return f"0 {unit}"
    power = max(-3, min(4, math.floor(math.log10(abs(number)) / 3)))
    prefix = ("n", "µ", "m", "", "k", "M", "G", "T")[power + 3]
    return f"{number / 1000**power:.3g} {prefix}{unit}"


def say(text: str) -> None:
    CONSOLE.print(text, markup=False)


def show(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    table = Table(*columns, box=None, pad_edge=False)
    for column in table.columns[1:]:
        column.justify = "right"
    for row in rows:
        table.add_row(*row)
    say(title)
    CONSOLE.print(table)
    CONSOLE.print()
