"""Long work says how far it has come, short work says nothing; an interrupt comes between steps."""

import io
import os
import signal
import subprocess
import sys
import time

import pytest

from manyheads import progress
from manyheads.progress import (
    Interrupted,
    InterruptHandler,
    Progress,
    interrupt_requested,
    interruptible,
)


class Clock:
    """Time that passes when told to."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def work(stream: io.StringIO, seconds: list[float], total: float | None = 100) -> Progress:
    """Ten units of work after each pause."""
    clock = Clock()
    with Progress("reading", total=total, unit="pages", stream=stream, clock=clock) as bar:
        for pause in seconds:
            clock.now += pause
            bar.advance(10)
    return bar


@pytest.mark.parametrize("stream", [io.StringIO(), Terminal()])
def test_nothing_is_printed_before_two_seconds(stream: io.StringIO) -> None:
    bar = work(stream, [0.19] * 10)
    assert stream.getvalue() == ""
    assert bar.done == 100


def test_lines_tell_share_rate_and_time_left_every_few_seconds() -> None:
    stream = io.StringIO()
    work(stream, [1.0] * 10)
    assert stream.getvalue().splitlines() == [
        "reading: 20 of 100 pages, 20%, 10 pages/s, 8 s left",
        "reading: 70 of 100 pages, 70%, 10 pages/s, 3 s left",
        "reading: 100 pages in 10 s, 10 pages/s",
    ]


def test_remaining_time_needs_a_total() -> None:
    stream = io.StringIO()
    work(stream, [3.0], total=None)
    assert stream.getvalue().splitlines()[0] == "reading: 10 pages, 3.3 pages/s"


def test_work_of_an_earlier_run_does_not_count_in_the_rate() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("reading", total=100, unit="pages", stream=stream, clock=clock) as bar:
        bar.resume(80)
        clock.now += 5
        bar.advance(5)
    assert stream.getvalue().splitlines() == [
        "reading: 85 of 100 pages, 85%, 1 pages/s, 15 s left",
        "reading: 5 pages in 5 s, 1 pages/s",
    ]


def test_work_that_ends_with_the_silence_is_not_printed_as_finished() -> None:
    stream = io.StringIO()
    work(stream, [3.0], total=10)
    assert stream.getvalue() == ""


def test_a_total_may_become_known_on_the_way() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("reading", unit="pages", stream=stream, clock=clock) as bar:
        bar.expect(40)
        clock.now += 2
        bar.advance(10)
    assert "10 of 40 pages, 25%, 5 pages/s, 6 s left" in stream.getvalue()


def test_a_terminal_gets_a_bar_that_leaves_one_line_behind() -> None:
    stream = Terminal()
    work(stream, [1.0] * 10)
    drawn = stream.getvalue()
    assert "━" in drawn
    assert "50%, 10 pages/s, 5 s left" in drawn
    assert drawn.endswith("reading: 100 pages in 10 s, 10 pages/s\n")


def fail_after_three_seconds(stream: io.StringIO) -> None:
    clock = Clock()
    with Progress("reading", total=9, stream=stream, clock=clock) as bar:
        clock.now += 3
        bar.advance()
        raise KeyError


def test_work_that_fails_stops_the_bar_without_a_word_of_success() -> None:
    stream = Terminal()
    with pytest.raises(KeyError):
        fail_after_three_seconds(stream)
    assert "11%" in stream.getvalue()
    assert " in " not in stream.getvalue()


def test_progress_can_be_silenced() -> None:
    stream, clock = io.StringIO(), Clock()
    with Progress("reading", enabled=False, stream=stream, clock=clock) as bar:
        clock.now += 60
        bar.advance()
    assert stream.getvalue() == ""


def test_rich_is_loaded_only_where_a_bar_is_drawn() -> None:
    script = (
        "import sys\nfrom manyheads.progress import Progress\n"
        "with Progress('x', total=1) as bar: bar.advance()\nsys.exit('rich' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_single_long_step_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LOOKS", 0.01)
    stream, clock = io.StringIO(), Clock()
    with Progress("reading", total=1, unit="pages", stream=stream, clock=clock) as bar:
        for _ in range(12):
            clock.now += 1
            time.sleep(0.05)
        bar.advance()
    lines = stream.getvalue().splitlines()
    assert lines[0] == "reading: 0 of 1 pages, 2 s so far"
    assert lines[1].endswith(("6 s so far", "7 s so far"))
    assert lines[-1] == "reading: 1 pages in 12 s, 0.083 pages/s"


def test_only_the_innermost_bar_reports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LOOKS", 0.01)
    stream, clock = Terminal(), Clock()
    more = {"stream": stream, "clock": clock}
    with Progress("outer", total=2, **more) as outer:  # type: ignore[arg-type]
        clock.now += 3
        outer.advance()
        with Progress("inner", total=2, **more) as inner:  # type: ignore[arg-type]
            for _ in range(2):
                clock.now += 3
                time.sleep(0.05)
                inner.advance()
        clock.now += 3
        time.sleep(0.05)
    message = stream.getvalue()
    assert message.index("outer") < message.index("inner") < message.rindex("outer")


def test_a_bar_around_everything_speaks_only_while_nothing_else_does(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(progress, "SECONDS_BETWEEN_LOOKS", 0.01)
    stream, clock = Terminal(), Clock()
    with Progress("inspect", stream=stream, clock=clock, draws_bar=False):
        with Progress("reading", total=4, stream=io.StringIO(), clock=clock) as inner:
            for _ in range(4):
                clock.now += 5
                time.sleep(0.05)
                inner.advance()
        clock.now += 4
        time.sleep(0.05)
        assert stream.getvalue() == ""
        clock.now += 1
        time.sleep(0.05)
    assert stream.getvalue() == "inspect: working, 25 s so far\n"


def test_long_work_is_announced_before_it_begins() -> None:
    stream = io.StringIO()
    with Progress("reading", stream=stream) as bar:
        bar.announce("text 0 has 90,000 tokens")
    assert stream.getvalue() == "reading: text 0 has 90,000 tokens\n"


def ask() -> None:
    os.kill(os.getpid(), signal.SIGINT)


def test_only_what_may_be_broken_off_is() -> None:
    assert not interrupt_requested()
    with InterruptHandler() as stop:
        ask()
        assert interrupt_requested()
        with (
            pytest.raises(Interrupted, match="interrupted while reading"),
            interruptible("reading"),
        ):
            pytest.fail("it was asked before")
    assert stop.exit_code == 130
    assert not interrupt_requested()


def test_a_run_shows_at_once_that_it_is_saving(capfd: pytest.CaptureFixture[str]) -> None:
    with InterruptHandler():
        ask()
        assert "interrupted: saving" in capfd.readouterr().err
    with InterruptHandler(), pytest.raises(Interrupted), interruptible("reading"):
        ask()
    # What ends at once has its own message.
    assert capfd.readouterr().err == ""


def test_a_second_signal_ends_at_once() -> None:
    with InterruptHandler():
        ask()
        with pytest.raises(KeyboardInterrupt):
            ask()


def test_without_a_run_nothing_is_broken_off_but_by_python_itself() -> None:
    with interruptible("reading"):
        assert InterruptHandler.current is None
