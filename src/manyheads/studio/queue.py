"""A queue of requests for the model, which runs one at a time."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from manyheads.studio import requests, run_cache

Result = TypeVar("Result")


class RequestQueue:
    """Runs work on a single thread, first come, first served.

    Long work such as generation returns to the queue after every token, so that other requests get
    their turn. `niceness` lowers the priority of the thread on Linux.
    """

    def __init__(self, max_waiting: int, *, niceness: int = 0) -> None:
        self.max_waiting = max_waiting
        self.waiting = 0
        self._lock: asyncio.Lock | None = None
        self._thread = ThreadPoolExecutor(1, "model", _lower_priority, (niceness,))

    async def run(
        self, work: Callable[[run_cache.IsCancelled], Result], disconnected: threading.Event
    ) -> Result:
        """Return the result of the work, or raise DisconnectedError if its turn comes too late.

        Cancelling the caller sets `disconnected`, and the work stops at the next layer.
        """
        if self._lock is None:
            # Created here, because a lock belongs to the running event loop.
            self._lock = asyncio.Lock()
        if self.waiting >= self.max_waiting:
            raise requests.RequestError(
                503, f"{self.waiting} other requests are waiting for the model: try again soon."
            )
        self.waiting += 1
        try:
            async with self._lock:
                if disconnected.is_set():
                    raise requests.DisconnectedError
                loop = asyncio.get_running_loop()
                running = loop.run_in_executor(self._thread, work, disconnected.is_set)
                # Mark the exception as retrieved even if nobody awaits the result any more.
                running.add_done_callback(lambda done: done.cancelled() or done.exception())
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    disconnected.set()
                    # The model must be idle before the next request starts.
                    await asyncio.wait([running])
                    raise
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _lower_priority(niceness: int) -> None:
    if niceness and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), niceness)
