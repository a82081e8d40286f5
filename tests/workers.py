"""Several processes share the tests of one pytest, which imports and collects everything once.

    python -m pytest -p tests.workers --free FD tests src

After the collection pytest forks a worker, and one more for each byte that it reads from FD: a core
is free. A worker asks for a file, runs its tests and asks again. Its reports are printed by the
first process, as those of a single pytest are.
"""

import atexit
import os
import traceback
import warnings
from collections.abc import Iterator, Sequence
from itertools import chain
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait

import pytest

from tests.chromium import opens_pages


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--free", type=int, help="where to read of cores that become free")


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    """Hand out files and print reports until all workers have ended."""
    free = session.config.getoption("free")
    if session.testsfailed or session.config.option.collectonly or free is None:
        return None
    units: dict[object, list[pytest.Item]] = {}
    for item in session.items:
        units.setdefault(unit_of(item), []).append(item)
    files = list(units.values())
    rooms = [room_of(items[0]) for items in files]
    waiting = list(range(len(files)))
    at_work: dict[Connection, str] = {}
    workers = dict([start(session, files)])
    last: dict[Connection, str] = {}
    while workers:
        for ready in wait([*workers, *([] if free is None else [free])]):
            if not isinstance(ready, Connection):
                if not os.read(free, 1):
                    free = None
                elif waiting:
                    workers |= [start(session, files)]
                continue
            try:
                message = ready.recv()
            except EOFError:
                _, status = os.waitpid(workers.pop(ready), 0)
                at_work.pop(ready, None)
                if status:
                    session.testsfailed += 1
                    print(f"\nERROR a worker ended with status {status} after {last.get(ready)}")
                continue
            if message is None:
                elsewhere = {room for worker, room in at_work.items() if worker is not ready}
                number = choose(waiting, rooms, at_work.get(ready), elsewhere)
                if number is not None:
                    waiting.remove(number)
                    at_work[ready] = rooms[number]
                ready.send(number)
                continue
            report = session.config.hook.pytest_report_from_serializable(
                config=session.config, data=message
            )
            last[ready] = report.nodeid
            session.config.hook.pytest_runtest_logreport(report=report)
    return True


def unit_of(item: pytest.Item) -> object:
    """What one worker has in one piece: a file, or all files that share a browser or a cluster."""
    if opens_pages(item):
        return "pages"
    return getattr(getattr(item, "module", None), "WORKER_UNIT", item.path)


def room_of(item: pytest.Item) -> str:
    """The room of the house that a test is about: `lens`, of a test as of a doctest."""
    parts = item.path.relative_to(item.config.rootpath).parts
    return parts[min(len(parts) - 1, 2 if parts[0] == "src" else 1)]


def choose(
    waiting: Sequence[int], rooms: Sequence[str], room: str | None, elsewhere: set[str]
) -> int | None:
    """The next file for a worker: of its room, else of one where nobody works, else any.

    What a room needs is imported, prepared and measured by one worker then.

    >>> choose([0, 1, 2], ["lens", "data", "lens"], "data", {"lens"})
    1
    >>> choose([0, 2], ["lens", "data", "lens"], "data", {"lens"})
    0
    """
    own = (number for number in waiting if rooms[number] == room)
    free = (number for number in waiting if rooms[number] not in elsewhere)
    return next(chain(own, free, waiting), None)


def start(session: pytest.Session, files: list[list[pytest.Item]]) -> tuple[Connection, int]:
    """A new worker: the connection to it, and its process."""
    connection, far_end = Pipe()
    with warnings.catch_warnings():
        # No thread is at work after the collection: those of libraries wait, and are started anew.
        warnings.simplefilter("ignore")
        process = os.fork()
    if process:
        far_end.close()
        return connection, process
    connection.close()
    status = 1
    try:
        work(session, files, far_end)
        status = 0
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


def work(session: pytest.Session, files: list[list[pytest.Item]], parent: Connection) -> None:
    plugins = session.config.pluginmanager
    plugins.unregister(name="terminalreporter")
    plugins.register(Forward(session.config, parent))
    # What tests print goes into files, which this process would share with the others.
    capture = plugins.get_plugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    capture.suspend_global_capture()

    def items() -> Iterator[pytest.Item]:
        while True:
            parent.send(None)
            number = parent.recv()
            if number is None:
                return
            yield from files[number]

    every = items()
    item = next(every, None)
    while item is not None:
        following = next(every, None)
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        item = following
    # As at the end of every pytest: what was not closed is a fault, and what is left is cleaned up.
    session.config._ensure_unconfigure()
    atexit._run_exitfuncs()


class Forward:
    """Sends the reports of a worker to the first process."""

    def __init__(self, config: pytest.Config, parent: Connection) -> None:
        self.config = config
        self.parent = parent

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook
        data = hook.pytest_report_to_serializable(config=self.config, report=report)
        self.parent.send(data)
