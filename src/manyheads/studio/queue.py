"""One model call at a time: everybody waits in line, and whoever leaves loses the place."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from manyheads.studio.kept_run import Stopped
from manyheads.studio.requests import LeftError, RefusedError

Found = TypeVar("Found")


class Turns:
    """A line before one thread, first come, first served.

    Work that takes long, such as writing a text, comes back to the line after every token, so that
    others get their turn in between. With `patience` the thread leaves the processor to others, as
    far as the system knows of such manners.
    """

    def __init__(self, waiting: int, *, patience: int = 0) -> None:
        self.most = waiting
        self.waiting = 0
        self._turn: asyncio.Lock | None = None
        self._thread = ThreadPoolExecutor(1, "model", _step_back, (patience,))

    async def take(self, work: Callable[[Stopped], Found], gone: threading.Event) -> Found:
        """What the work gives, once it is its turn; `LeftError` where `gone` is set before.

        A cancelled caller sets `gone` too: the thread is let go at the next layer.
        """
        if self._turn is None:
            # Here and not before: a lock belongs to the loop that is running.
            self._turn = asyncio.Lock()
        if self.waiting >= self.most:
            raise RefusedError(
                503, f"{self.waiting} others are waiting for the model: try again soon."
            )
        self.waiting += 1
        try:
            async with self._turn:
                if gone.is_set():
                    raise LeftError
                loop = asyncio.get_running_loop()
                running = loop.run_in_executor(self._thread, work, gone.is_set)
                try:
                    return await asyncio.shield(running)
                except asyncio.CancelledError:
                    gone.set()
                    # The next in line must not meet the model while it is still at work.
                    await asyncio.wait([running])
                    if not running.cancelled():
                        # Looked at, or the loop would complain that nobody had.
                        running.exception()
                    raise
        finally:
            self.waiting -= 1

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)


def _step_back(patience: int) -> None:
    if patience and sys.platform == "linux":
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), patience)
