"""How far long work has come: a bar on a terminal, a line now and then elsewhere."""

import sys
import time
from collections.abc import Callable
from io import TextIOBase
from types import TracebackType
from typing import Any

SILENT_SECONDS = 2.0
# A terminal is drawn anew in place; a log grows with each line.
SECONDS_BETWEEN_DRAWINGS = 0.1
SECONDS_BETWEEN_LINES = 5.0


class Progress:
    """Counts work done and tells of it, on stderr, once two seconds have passed.

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
        self._next = self._started + SILENT_SECONDS
        self._told = False
        self._bar: Any = None

    def __enter__(self) -> "Progress":
        self._started = self._clock()
        self._next = self._started + SILENT_SECONDS
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bar is not None:
            self._bar.stop()
        if self._told and kind is None:
            self._print(f"{self.done:,.0f} {self.unit} in {duration(self.seconds)}, {self._rate()}")

    @property
    def seconds(self) -> float:
        return self._clock() - self._started

    def advance(self, amount: int | float = 1) -> None:
        """So much more is done."""
        self.done += amount
        finished = self.total is not None and self.done >= self.total
        if self._enabled and not finished and self._clock() >= self._next:
            self._tell()

    def expect(self, total: int | float) -> None:
        """The work turns out to be so much in all."""
        self.total = total

    def _tell(self) -> None:
        self._told = True
        if self._stream.isatty():
            self._next = self._clock() + SECONDS_BETWEEN_DRAWINGS
            self._draw()
        else:
            self._next = self._clock() + SECONDS_BETWEEN_LINES
            self._print(f"{self._so_far()}, {self._outlook()}")

    def _print(self, text: str) -> None:
        print(f"{self.label}: {text}", file=self._stream, flush=True)

    def _draw(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, TextColumn
        from rich.progress import Progress as Bars

        if self._bar is None:
            columns = (TextColumn(self.label), BarColumn(), TextColumn("{task.fields[outlook]}"))
            # Drawn where work is reported, so that no thread of its own competes with the work.
            self._bar = Bars(
                *columns,
                console=Console(file=self._stream, highlight=False),
                auto_refresh=False,
                transient=True,
            )
            self._bar.start()
            self._bar.add_task(self.label, total=self.total, outlook="")
        task = self._bar.task_ids[0]
        self._bar.update(task, completed=self.done, total=self.total, outlook=self._outlook())
        self._bar.refresh()

    def _so_far(self) -> str:
        of = "" if self.total is None else f" of {self.total:,.0f}"
        return f"{self.done:,.0f}{of} {self.unit}"

    def _outlook(self) -> str:
        """Share, rate and time left, as far as they are known."""
        known = [self._rate()]
        if self.total and self.done:
            left = max(0.0, self.total / self.done - 1) * self.seconds
            known = [f"{min(1.0, self.done / self.total):.0%}", *known, f"{duration(left)} left"]
        return ", ".join(known)

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
