"""Run studies: every arm and seed, in one process or in several.

    python -m studies.run gates --quick
    python -m studies.run gates sinks --device cuda --workers 8 --minutes 9
    python -m studies.run all --page        # only write pictures and pages of the results again

What has ended is kept: the same command goes on where it was stopped.
"""

import argparse
import multiprocessing
import os
import platform
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from manyheads.devices import resolve_device
from manyheads.errors import InputError, ManyheadsError
from manyheads.formatting import alternatives, pluralise
from manyheads.progress import Progress
from studies import pages
from studies.study import Arm, Result, Study, Values

HERE = Path(__file__).parent
DOCS = HERE.parent / "docs"


@dataclass(frozen=True, slots=True)
class Task:
    """One arm of a study that is to be measured."""

    study: str
    arm: Arm
    settings: dict[str, Any]

    def __str__(self) -> str:
        return f"study {self.study}, arm {self.arm.key!r}"


@dataclass(frozen=True, slots=True)
class Failure:
    """What could not be measured or drawn, and why."""

    where: str
    reason: str
    # Empty for an error that the user can mend.
    trace: str = ""

    def __str__(self) -> str:
        return f"{self.where}: {self.reason.rstrip('.')}"


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a task measured, or why it failed."""

    task: Task
    values: Values = field(default_factory=dict)
    seconds: float = 0.0
    failure: Failure | None = None
    # Whether its process ended, perhaps through the fault of another one.
    killed: bool = False


@dataclass(slots=True)
class StudyRun:
    """How far studies have come, and what went wrong; the rest is not lost."""

    results: dict[str, Result]
    failures: list[Failure] = field(default_factory=list)
    unmeasured: int = 0
    interrupted: bool = False


def study_names() -> list[str]:
    return sorted(file.parent.name for file in HERE.glob("*/study.py"))


def find_study(name: str) -> Study:
    if name not in study_names():
        raise InputError(f"there is no study {name!r}", f"use {alternatives(study_names())}")
    return import_module(f"studies.{name}.study").STUDY


def run_studies(
    folders: Mapping[str, Path],
    level: str = "full",
    *,
    device: str = "cpu",
    workers: int = 1,
    minutes: float | None = None,
) -> StudyRun:
    """Measure the arms of studies that the result.json of their folders lacks, and write pages.

    No arm starts once so many minutes have passed. Several workers take arms of all studies
    together, so that none of them waits for the last arm of one. An arm that fails is reported at
    the end; Ctrl-C ends the run with what has been measured.
    """
    results = {name: _started(name, level, device, folder) for name, folder in folders.items()}
    kind = resolve_device(device).type
    tasks = [
        Task(name, arm, result.settings)
        for name, result in results.items()
        for arm in find_study(name).arms(result.settings)
        if not result.has(arm) and arm.device in ("", kind)
    ]
    run = StudyRun(results, unmeasured=len(tasks))
    deadline = None if minutes is None else time.monotonic() + 60 * minutes

    def late() -> bool:
        return deadline is not None and time.monotonic() > deadline

    try:
        with Progress("studies", total=len(tasks), unit="runs") as bar:
            for outcome in _measure(tasks, device, workers, late):
                run.unmeasured -= 1
                bar.advance()
                _note(run, outcome, folders)
    except KeyboardInterrupt:
        run.interrupted = True
    for name, result in results.items():
        if result.arms:
            try:
                pages.write_page(find_study(name), result, folders[name])
            except Exception as error:
                run.failures.append(_failure(f"study {name}, its page", error))
    return run


def _note(run: StudyRun, outcome: Outcome, folders: Mapping[str, Path]) -> None:
    """Keep what was measured, on disk too, or the reason why not."""
    task = outcome.task
    if outcome.failure is not None:
        run.failures.append(outcome.failure)
        return
    run.results[task.study].add(task.arm, outcome.values, outcome.seconds)
    run.results[task.study].write(folders[task.study] / "result.json")


def _started(name: str, level: str, device: str, folder: Path) -> Result:
    """The result as far as it has come with these settings, or a new one."""
    machine = machine_name(device)
    new = Result(name, level, find_study(name).settings(level), machine)
    file = folder / "result.json"
    if not file.is_file():
        return new
    result = Result.read(file)
    if (result.study, result.settings) != (name, new.settings):
        raise InputError(
            f"{file} has a result of other settings", "name another folder, or delete it"
        )
    machines = result.machine if machine in result.machine else f"{result.machine}; {machine}"
    return replace(result, machine=machines)


def machine_name(device: str) -> str:
    on_cuda = torch.device(device).type == "cuda"
    chip = torch.cuda.get_device_name(device) if on_cuda else platform.machine() + " CPU"
    return f"{chip}, torch {torch.__version__.split('+')[0]}"


def _measure(
    tasks: Sequence[Task], device: str, workers: int, late: Callable[[], bool]
) -> Iterator[Outcome]:
    if workers == 1:
        for task in tasks:
            if late():
                return
            yield run_task(task, device)
        return
    # Alone at the end: what measures time, and once more what was killed beside others.
    alone = [task for task in tasks if task.arm.alone]
    together = [task for task in tasks if not task.arm.alone]
    for outcome in _in_processes(together, device, workers, late):
        if outcome.killed:
            alone.append(outcome.task)
        else:
            yield outcome
    yield from _in_processes(alone, device, 1, late)


def _in_processes(
    tasks: Sequence[Task], device: str, workers: int, late: Callable[[], bool]
) -> Iterator[Outcome]:
    """Run tasks side by side; where a process is killed, the others start again."""
    waiting = list(tasks)
    while waiting and not late():
        with _pool(workers) as pool:
            running: dict[Future[Outcome], Task] = {}
            works = True
            while running or (works and waiting and not late()):
                while works and waiting and len(running) < workers and not late():
                    task = waiting.pop(0)
                    running[pool.submit(run_task, task, device)] = task
                ended = wait(running, return_when=FIRST_COMPLETED).done
                for future in [future for future in running if future in ended]:
                    task = running.pop(future)
                    try:
                        yield future.result()
                    except BrokenProcessPool:
                        works = False
                        failure = Failure(str(task), "its process was killed", "killed")
                        yield Outcome(task, failure=failure, killed=True)


@contextmanager
def _pool(workers: int) -> Iterator[ProcessPoolExecutor]:
    """Processes that end with the block, at once if an exception ends it."""
    before = set(multiprocessing.active_children())
    pool = ProcessPoolExecutor(
        workers,
        mp_context=multiprocessing.get_context("spawn"),
        initializer=_begin_worker,
        initargs=(workers,),
    )
    try:
        yield pool
    except BaseException:
        for process in set(multiprocessing.active_children()) - before:
            process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


def _begin_worker(workers: int) -> None:
    """Share the cores, and leave Ctrl-C and progress to the process that started it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(max(1, (os.cpu_count() or 1) // workers))
    sys.stderr = open(os.devnull, "w")  # noqa: PTH123, SIM115, kept open until the end


def run_task(task: Task, device: str) -> Outcome:
    """Measure one arm; in a process of its own where there are several."""
    if torch.device(device).type == "cuda":
        torch.set_float32_matmul_precision("high")
    torch.manual_seed(task.arm.seed)
    start = time.perf_counter()
    try:
        values = find_study(task.study).run(task.arm, task.settings, device)
    except Exception as error:
        return Outcome(task, failure=_failure(str(task), error))
    return Outcome(task, values, time.perf_counter() - start)


def _failure(where: str, error: Exception) -> Failure:
    if isinstance(error, ManyheadsError):
        return Failure(where, str(error))
    return Failure(where, f"{type(error).__name__}: {error}", traceback.format_exc())


def measured_studies(folder: Path = HERE) -> list[tuple[Study, Result]]:
    """The studies with a result, those that the checkout comes with by default."""
    return [
        (find_study(name), Result.read(folder / name / "result.json"))
        for name in study_names()
        if (folder / name / "result.json").is_file()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="+", choices=[*study_names(), "all"], metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="minutes on two CPU cores")
    parser.add_argument("--test", action="store_true", help="seconds, to see that it runs")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--workers", type=int, default=1, help="processes side by side")
    parser.add_argument("--minutes", type=float, help="start no run after so many minutes")
    parser.add_argument("--out", type=Path, default=HERE, help="the folder of the results")
    parser.add_argument(
        "--page", action="store_true", help="only write pages again, and docs/studies.md"
    )
    arguments = parser.parse_args()
    names = study_names() if "all" in arguments.names else arguments.names
    if arguments.page:
        for study, result in measured_studies(arguments.out):
            if study.name in names:
                pages.write_page(study, result, arguments.out / study.name)
        if arguments.out == HERE:
            pages.write_verdicts(measured_studies(), HERE, DOCS)
        return
    level = "quick" if arguments.quick else "test" if arguments.test else "full"
    run = run_studies(
        {name: arguments.out / name for name in names},
        level,
        device=arguments.device,
        workers=arguments.workers,
        minutes=arguments.minutes,
    )
    for name, result in run.results.items():
        print(pages.summary(find_study(name), result))
    if run.unmeasured:
        print(f"{pluralise(run.unmeasured, 'run')} left: the same command goes on")
    for failure in run.failures:
        print(f"failed: {failure}\n{failure.trace}", file=sys.stderr)
    sys.exit(bool(run.failures) or run.interrupted)


if __name__ == "__main__":
    main()
