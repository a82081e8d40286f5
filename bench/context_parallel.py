"""Memory of a process and work of all, where processes share a text or the weights of a model.

python bench/context_parallel.py [--tokens 16384] [--gigabytes 2] [--store]

Processes talk by gloo on one machine. Memory is the peak of a process above what it had before,
files that it maps included; work is the time of the processor, summed over the processes.
"""

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from importlib import import_module
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from side_by_side import say
from stored_results import add_store, introduce, store

from manyheads import Ragged, build, lens, load, load_sharded, save
from manyheads.data.batch import Batch
from manyheads.train import CausalLM
from manyheads.train.context_parallel import own_part
from manyheads.train.distributed import ProcessGroup

COUNTS = (1, 2, 4)
THRESHOLD = "MALLOC_MMAP_THRESHOLD_"
SHAPE: dict[str, Any] = {"layers": 4, "width": 256, "heads": 4, "vocabulary": 1000, "seed": 0}


def peak_bytes() -> int:
    """The most memory that this process has had."""
    fields = dict(line.split(":") for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["VmHWM"].split()[0]) * 1024


def measured(rank: int, count: int, meeting: str, work: Callable[[], Any], results: Any) -> None:
    """Work in one of several processes: its peak memory and its time of the processor."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=count)
    dist.barrier()
    # So that the peak counts from here.
    Path("/proc/self/clear_refs").write_text("5")
    before, start = peak_bytes(), time.process_time()
    number = work()
    results.put((peak_bytes() - before, time.process_time() - start, number))
    dist.barrier()
    dist.destroy_process_group()


def together(count: int, work: Callable[[], Any]) -> tuple[float, float, Any]:
    """The largest peak of a process in MB, the work of all in seconds, what one returned."""
    context = get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        results = context.Queue()
        where = f"file://{folder}/meeting"
        processes = [
            context.Process(target=measured, args=(rank, count, where, work, results))
            for rank in range(count)
        ]
        for process in processes:
            process.start()
        answers = [results.get() for _ in processes]
        for process in processes:
            process.join()
    peaks, times, numbers = zip(*answers, strict=True)
    return max(peaks) / 1e6, sum(times), numbers[0]


def text(tokens: int) -> torch.Tensor:
    return torch.randint(1000, (tokens,), generator=torch.Generator().manual_seed(0))


def statistics(tokens: int) -> float:
    model = build("gpt2", positions=tokens, **SHAPE)
    shares = dist.get_world_size() > 1
    result = lens.statistics(
        model, [text(tokens)], batch_tokens=tokens, context_parallel=shares, progress=False
    )
    return float(result.means["entropy"].sum())


def step(tokens: int) -> float:
    """The loss of a step, forward and backward."""
    model = build("gpt2", positions=tokens, dropout=0.0, **SHAPE).train()
    size = dist.get_world_size()
    group = dist.group.WORLD if size > 1 else None
    processes = ProcessGroup(
        rank=dist.get_rank(), world_size=size, context=size, context_group=group
    )
    batch = Batch(texts=Ragged.from_list([text(tokens)]))
    prepared = CausalLM().prepare(model, batch, torch.Generator())
    loss = CausalLM().score(model, own_part(prepared, processes)).total
    loss.backward()
    total = loss.detach().clone()
    dist.all_reduce(total)
    return float(total)


def weights(folder: Path, forward: bool) -> float:
    """Load, and perhaps compute the logits of a short text."""
    model = load(folder) if dist.get_world_size() == 1 else load_sharded(folder)
    if not forward:
        return 0.0
    with torch.no_grad():
        output = model(torch.arange(16)[None]).logits
    return float(output.abs().sum())


def large_folder(gigabytes: float, where: Path) -> Path:
    """A GPT-2 of 48 layers: one more layer than its shards is what a process has to hold."""
    width = 64 * max(1, round((gigabytes * 1e9 / (4 * 12 * 48)) ** 0.5 / 64))
    shape = {"layers": 48, "width": width, "heads": width // 64, "vocabulary": 8000}
    model = build("gpt2", positions=128, **shape)
    return save(model, where / "large").folder


def show_rows(name: str, work: Callable[[], Any], figures: dict[str, Any]) -> None:
    for count in COUNTS:
        memory, seconds, number = together(count, work)
        row = {"MB per process": round(memory), "core s": round(seconds, 2), "result": number}
        figures[f"{name}, {count}"] = row
        say(f"{name}, {count} processes: {memory:,.0f} MB each, {seconds:.2f} core s, {number:.6g}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--gigabytes", type=float, default=2.0)
    add_store(parser)
    options = parser.parse_args()
    if sys.platform != "linux":
        raise SystemExit("memory is read from /proc, which only Linux has")
    if THRESHOLD not in os.environ:
        # Otherwise glibc keeps the memory of gathered weights that were freed.
        os.environ |= {THRESHOLD: str(2**20), "OMP_NUM_THREADS": "1"}
        os.execv(sys.executable, [sys.executable, *sys.argv])
    introduce("cpu")
    # Libraries that only some of the processes import would count as memory of theirs.
    for library in ("torch.distributed.fsdp", "torch.export", "torch.distributed.tensor"):
        import_module(library)
    figures: dict[str, Any] = {}
    show_rows(f"statistics of {options.tokens} tokens", lambda: statistics(options.tokens), figures)
    half = options.tokens // 2
    show_rows(f"training step of {half} tokens", lambda: step(half), figures)
    where = Path(tempfile.mkdtemp())
    try:
        folder = large_folder(options.gigabytes, where)
        size = (folder / "model.safetensors").stat().st_size / 1e6
        figures["weights, MB"] = round(size)
        say(f"weights of {size:,.0f} MB")
        show_rows("loading", lambda: weights(folder, False), figures)
        show_rows("loading and a forward", lambda: weights(folder, True), figures)
    finally:
        shutil.rmtree(where)
    store(options.store, "context-parallel", "cpu", figures)


if __name__ == "__main__":
    main()
