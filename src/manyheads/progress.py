"""Long work: its progress, as a bar on a terminal and a line every few seconds elsewhere, and its
end by Ctrl-C or SIGTERM between two steps, so that it can save what it has.
"""

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass
from io import TextIOBase
from types import FrameType
from typing import Any, ClassVar, TypeVar

Item = TypeVar("Item")
Source = TypeVar("Source")

QUIET_SECONDS = 2.0
# A bar is redrawn in place; a log grows with each line.
SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = 4.2
# The program has started before its bar.
FIRST_LINE_SECONDS = 3.5
# How often a thread looks whether a step takes long.
SECONDS_BETWEEN_LOOKS = 0.5

NOTICE = "interrupted: saving after this step; press Ctrl-C again to stop without saving"
STDERR = 2
SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Progress:
    """Counts the work done and, after two seconds, reports it on stderr, at least every 5 seconds.

    While one step takes long, a thread reports the time it has taken so far. Of nested bars only
    the innermost reports, so that a bar around everything, which advances never and with
    `draws_bar=False` prints lines on a terminal too, speaks while nothing else does.

    >>> with Progress("encoding", total=3, unit="tokens") as bar:
    ...     for _ in range(3):
    ...         bar.advance()
    >>> bar.done
    3
    """

    # Bars that are running, the innermost last.
    _running: ClassVar[list["Progress"]] = []
    _lock: ClassVar[threading.RLock] = threading.RLock()

    def __init__(
        self,
        label: str,
        *,
        total: int | float | None = None,
        unit: str = "steps",
        enabled: bool = True,
        draws_bar: bool = True,
        stream: TextIOBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done: int | float = 0
        self._before: int | float = 0
        self._stream: Any = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._draws_bar = draws_bar
        self._clock = clock
        self._started = clock()
        self._next = self._started + QUIET_SECONDS
        self._reported = False
        self._bar: Any = None
        self._ended = threading.Event()

    def __enter__(self) -> "Progress":
        self._notify()
        self._started = self._clock()
        self._next = self._started + (QUIET_SECONDS if self._draws_bar else FIRST_LINE_SECONDS)
        if self._enabled:
            # The one around it may be about to speak and cannot from now on.
            for outer in self._running[-1:]:
                self._next = min(self._next, max(outer._next, self._started))
            self._running.append(self)
            threading.Thread(target=self._watch, name="progress", daemon=True).start()
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        self._ended.set()
        with self._lock:
            if self in self._running:
                self._running.remove(self)
            self._stop_bar()
            for outer in self._running[-1:] if self._reported else ():
                outer._next = outer._clock() + SECONDS_BETWEEN_LINES
            if self._reported and self._done_now and kind is None:
                count = f"{self._done_now:,.0f} {self.unit} in {duration(self.seconds)}"
                self._print(f"{count}, {self._rate()}")

    @property
    def _done_now(self) -> int | float:
        return self.done - self._before

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def advance(self, amount: int | float = 1) -> None:
        """Add to the work done."""
        self.done += amount
        self._notify()
        finished = self.total is not None and self.done >= self.total
        if self._enabled and not finished and self._clock() >= self._next:
            with self._lock:
                self._report()

    def resume(self, amount: int | float) -> None:
        """Add work that was done before, which says nothing about the rate."""
        self._before += amount
        self.done += amount

    def expect(self, total: int | float) -> None:
        """Set the total, where it is known only later."""
        self.total = total

    def announce(self, text: str) -> None:
        """Print a line about work that will take long, before it begins."""
        if self._enabled:
            with self._lock:
                self._stop_bar()
                self._print(text)

    def _notify(self) -> None:
        listener = _LISTENER.get()
        if listener is not None:
            listener(self)

    def _watch(self) -> None:
        """Report from a thread of its own while a step takes long."""
        while not self._ended.wait(SECONDS_BETWEEN_LOOKS):
            with self._lock:
                quiet_for = self._clock() - self._next
                if not self._ended.is_set() and self._running[-1:] == [self] and quiet_for >= 0:
                    self._report()

    def _stop_bar(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def _report(self) -> None:
        self._reported = True
        if self._draws_bar and self._stream.isatty():
            self._next = self._clock() + SECONDS_BETWEEN_DRAWINGS
            self._draw()
        else:
            self._next = self._clock() + SECONDS_BETWEEN_LINES
            self._print(f"{self._count()}, {self._forecast()}")

    def _print(self, text: str) -> None:
        print(f"{self.label}: {text}", file=self._stream, flush=True)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._bar is None:
            # A terminal shows one bar at a time.
            for other in self._running:
                other._stop_bar()
            columns = (TextColumn(self.label), BarColumn(), TextColumn("{task.fields[forecast]}"))
            # Drawn when there is something new, so that no thread competes with the work.
            console = Console(file=self._stream, highlight=False)
            self._bar = Bars(*columns, console=console, auto_refresh=False, transient=True)
            self._bar.start()
            self._bar.add_task(self.label, total=self.total, forecast="")
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=self.done, total=self.total, forecast=self._forecast())
        self._bar.refresh()

    def _count(self) -> str:
        if self.total is None and not self.done:
            return "working"
        of = "" if self.total is None else f" of {self.total:,.0f}"
        return f"{self.done:,.0f}{of} {self.unit}"

    def _forecast(self) -> str:
        """Fraction, rate and time left, as far as they are known."""
        if not self._done_now:
            return f"{duration(self.seconds)} so far"
        parts = [self._rate()]
        # What has hardly begun says nothing about the rest.
        if self.total and self._done_now >= (self.total - self._before) / 200:
            remaining = max(0.0, self.total - self.done) / self._done_now * self.seconds
            fraction = f"{min(1.0, self.done / self.total):.0%}"
            parts = [fraction, *parts, f"{duration(remaining)} left"]
        return ", ".join(parts)

    def _rate(self) -> str:
        rate = self._done_now / max(self.seconds, 1e-9)
        return f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2g} {self.unit}/s"


@dataclass(frozen=True, slots=True, eq=False)
class MeasuredStream(Iterable[Item]):
    """Items of unknown number, and the fraction of them that has been read so far, from 0 to 1."""

    items: Iterable[Item]
    fraction: Callable[[], float]

    @classmethod
    def over(
        cls, sources: Sequence[Source], read: Callable[[Source], Item]
    ) -> "MeasuredStream[Item]":
        """What `read` makes of the sources, one at a time.

        >>> stream = MeasuredStream.over(["one", "three"], len)
        >>> [(length, stream.fraction()) for length in stream]
        [(3, 0.5), (5, 1.0)]
        """
        count = 0

        def items() -> Iterator[Item]:
            nonlocal count
            for source in sources:
                count += 1
                yield read(source)

        return cls(items(), lambda: count / max(1, len(sources)))

    def __iter__(self) -> Iterator[Item]:
        return iter(self.items)


_LISTENER: ContextVar[Callable[[Progress], None] | None] = ContextVar("listener", default=None)


@contextmanager
def listening(listener: Callable[[Progress], None]) -> Iterator[None]:
    """Call a function with every bar that begins or advances in this thread, printed or not."""
    token = _LISTENER.set(listener)
    try:
        yield
    finally:
        _LISTENER.reset(token)


def duration(seconds: int | float) -> str:
    """
    >>> duration(7.4), duration(125), duration(7500)
    ('7 s', '2 min 5 s', '2 h 5 min')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


class Interrupted(KeyboardInterrupt):
    """Raised when a signal ended an activity that may be interrupted anywhere.

    `exit_code` is what a shell expects of a program that a signal ended.
    """

    def __init__(self, activity: str, exit_code: int) -> None:
        super().__init__(f"interrupted while {activity}")
        self.exit_code = exit_code


class InterruptHandler:
    """Remembers the first of some signals, with a notice; a second one raises KeyboardInterrupt."""

    # Signals go to the process, so there is one handler at a time.
    current: ClassVar["InterruptHandler | None"] = None

    def __init__(self, notice: str = NOTICE, signals: Sequence[int] = SIGNALS) -> None:
        self.notice, self.signals = notice, signals
        self.signal = 0
        self.activity = ""
        self._before: dict[int, Any] = {}
        self._outer: InterruptHandler | None = None

    def __enter__(self) -> "InterruptHandler":
        # Only the main thread can handle signals.
        if threading.current_thread() is threading.main_thread():
            self._outer, InterruptHandler.current = InterruptHandler.current, self
            for number in self.signals:
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
                os.write(STDERR, f"{self.notice}\n".encode())

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
