"""Progress of long work: a bar on a terminal, a line every few seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from io import TextIOBase
from types import TracebackType
from typing import Any

QUIET_SECONDS = 2.0
# A bar is redrawn in place; a log grows with each line.
SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts the work done and, after two seconds, reports it on stderr.

    >>> with Progress("encoding", total=3, unit="tokens") as bar:
    ...     for _ in range(3):
    ...         bar.advance()
    >>> bar.done
    3
    """

    def __init__(
        self,
        label: str,
        *,
        total: int | float | None = None,
        unit: str = "steps",
        enabled: bool = True,
        stream: TextIOBase | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.label = label
        self.total = total
        self.unit = unit
        self.done: int | float = 0
        self._stream: Any = sys.stderr if stream is None else stream
        self._enabled = enabled
        self._clock = clock
        self._started = clock()
        self._next = self._started + QUIET_SECONDS
        self._reported = False
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._started = self._clock()
        self._next = self._started + QUIET_SECONDS
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._reported and kind is None:
            self._print(f"{self.done:,.0f} {self.unit} in {duration(self.seconds)}, {self._rate()}")

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def advance(self, amount: int | float = 1) -> None:
        """Add to the work done."""
        self.done += amount
        finished = self.total is not None and self.done >= self.total
        if self._enabled and not finished and self._clock() >= self._next:
            self._report()

    def expect(self, total: int | float) -> None:
        """Set the total, where it is known only later."""
        self.total = total

    def _report(self) -> None:
        self._reported = True
        if self._stream.isatty():
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
            columns = (TextColumn(self.label), BarColumn(), TextColumn("{task.fields[forecast]}"))
            # Drawn by the caller, so that no thread of its own competes with the work.
            self._bar = Bars(
                *columns,
                console=Console(file=self._stream, highlight=False),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self.label, total=self.total, forecast="")
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=self.done, total=self.total, forecast=self._forecast())
        self._bar.refresh()

    def _count(self) -> str:
        of = "" if self.total is None else f" of {self.total:,.0f}"
        return f"{self.done:,.0f}{of} {self.unit}"

    def _forecast(self) -> str:
        """Fraction, rate and time left, as far as they are known."""
        parts = [self._rate()]
        if self.total and self.done:
            left = max(0.0, self.total / self.done - 1) * self.seconds
            parts = [f"{min(1.0, self.done / self.total):.0%}", *parts, f"{duration(left)} left"]
        return ", ".join(parts)

    def _rate(self) -> str:
        rate = self.done / max(self.seconds, 1e-9)
        return f"{rate:,.0f} {self.unit}/s" if rate >= 10 else f"{rate:.2g} {self.unit}/s"


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
