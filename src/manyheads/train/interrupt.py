"""Ctrl-C and SIGTERM: a run finishes its step, saves a checkpoint, and tells how to resume."""

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, ClassVar

NOTICE = b"interrupted: saving after this step; press Ctrl-C again to stop without saving\n"
STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Interrupted(KeyboardInterrupt):
    """Raised when a signal ended an activity that may be interrupted anywhere.

    `exit_code` is what a shell expects of a program that a signal ended.
    """

    def __init__(self, activity: str, exit_code: int) -> None:
        super().__init__(f"interrupted while {activity}")
        self.exit_code = exit_code


class InterruptHandler:
    """Remembers the first interrupt signal; a second one raises KeyboardInterrupt."""

    # Signals go to the process, so there is one handler at a time.
    current: ClassVar["InterruptHandler | None"] = None

    def __init__(self) -> None:
        self.signal = 0
        self.activity = ""
        self._before: dict[int, Any] = {}
        self._outer: InterruptHandler | None = None

    def __enter__(self) -> "InterruptHandler":
        # Only the main thread can handle signals.
        if threading.current_thread() is threading.main_thread():
            self._outer, InterruptHandler.current = InterruptHandler.current, self
            for number in SIGNALS:
                self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *error: object) -> None:
        for number, before in self._before.items():
            signal.signal(number, before)
        if InterruptHandler.current is self:
            InterruptHandler.current = self._outer

    @property
    def requested(self) -> bool:
        return self.signal != 0

    @property
    def exit_code(self) -> int:
        """What a shell expects of a program that a signal ended."""
        return 128 + (self.signal or signal.SIGINT)

    def _handle(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        if self.requested:
            raise KeyboardInterrupt
        self.signal = number
        self.raise_if_requested()
        if os.environ.get("RANK", "0") == "0":
            # Not by print, which the signal may have interrupted.
            with suppress(OSError):
                os.write(STDERR, NOTICE)

    def raise_if_requested(self) -> None:
        """Raise `Interrupted` if a signal came and the current activity may be interrupted."""
        if self.requested and self.activity:
            raise Interrupted(self.activity, self.exit_code)


def interrupt_requested() -> bool:
    """Whether the run of this process, if there is one, received an interrupt."""
    return InterruptHandler.current is not None and InterruptHandler.current.requested


@contextmanager
def interruptible(activity: str) -> Iterator[None]:
    """A context in which an interrupt raises `Interrupted` at once."""
    stop = InterruptHandler.current
    if stop is None:
        yield
        return
    before, stop.activity = stop.activity, activity
    try:
        stop.raise_if_requested()
        yield
    finally:
        stop.activity = before
