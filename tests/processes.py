"""The same work in several processes that talk to each other: forks of this one, with gloo."""

import os
import tempfile
from collections.abc import Callable
from datetime import timedelta

import torch.distributed as dist

from tests.forked import forked


def in_processes(count: int, work: Callable[[], object]) -> bool:
    """Whether the work succeeded in all of `count` processes; what one raises is printed."""
    with tempfile.TemporaryDirectory() as folder:
        children = [_start(rank, count, f"file://{folder}/meeting", work) for rank in range(count)]
        return not any(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children)


def _start(rank: int, count: int, meeting: str, work: Callable[[], object]) -> int:
    child = os.fork()
    if child:
        return child
    # A process of its own: the one that is waited for starts no thread before it forks again.
    os._exit(forked(lambda: _join(rank, count, meeting, work)))


def _join(rank: int, count: int, meeting: str, work: Callable[[], object]) -> None:
    dist.init_process_group(
        "gloo", init_method=meeting, rank=rank, world_size=count, timeout=timedelta(seconds=120)
    )
    work()
    dist.destroy_process_group()
