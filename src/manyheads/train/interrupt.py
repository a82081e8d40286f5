"""Ctrl-C and its kin: asked to stop, a run ends its step, saves, and says how to go on."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any, ClassVar

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stopped(KeyboardInterrupt):
    """Work that was asked to stop has stopped, in the midst of what it was `doing`.

    `code` is what a shell expects of a program that a signal ended.
    """

    def __init__(self, doing: str, code: int) -> None:
        super().__init__(f"stopped while {doing}")
        self.code = code


class Stop:
    """Whether somebody asked the run to stop; asked twice, it stops at once."""

    # Signals come to a process as a whole, and so there is one who is asked.
    current: ClassVar["Stop | None"] = None

    def __init__(self) -> None:
        self.signal = 0
        self.doing = ""
        self._before: dict[int, Any] = {}
        self._outer: Stop | None = None

    def __enter__(self) -> "Stop":
        # Only the main thread may be asked.
        if threading.current_thread() is threading.main_thread():
            self._outer, Stop.current = Stop.current, self
            for each in SIGNALS:
                self._before[each] = signal.signal(each, self._ask)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for each, before in self._before.items():
            signal.signal(each, before)
        if Stop.current is self:
            Stop.current = self._outer

    @property
    def asked(self) -> bool:
        return self.signal != 0

    @property
    def code(self) -> int:
        """What a shell expects of a program that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def _ask(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.asked:
            raise KeyboardInterrupt
        self.signal = number
        self.end_here()

    def end_here(self) -> None:
        """Stop now if that was asked and what is done may be broken off."""
        if self.asked and self.doing:
            raise Stopped(self.doing, self.code)


def stop_asked() -> bool:
    """Whether the run of this process, if there is one, was asked to stop."""
    return Stop.current is not None and Stop.current.asked


@contextmanager
def at_once(doing: str) -> Iterator[None]:
    """What is done here may be broken off anywhere: asked to stop, a run does not wait for it."""
    stop = Stop.current
    if stop is None:
        yield
        return
    before, stop.doing = stop.doing, doing
    try:
        stop.end_here()
        yield
    finally:
        stop.doing = before
