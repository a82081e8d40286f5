"""All checks side by side, in as many lanes as there are cores to spare.

    python -m tests.lanes              everything: types, compiled tests, tests and doctests
    python -m tests.lanes --changed    the tests nearest to what changed, and a sample of the others
    python -m tests.lanes --record     everything, and note how long each file took

One pytest collects all tests in the first lane and works them off there. The other lanes have jobs
of their own first, types and the tests that cannot run with shape checks; a lane that is done with
them takes part in the tests, as another worker of the same pytest (tests/workers.py). Files are
handed out longest first, by the seconds that they took when they were last recorded, so that the
lanes end together. The time of every part is printed at the end.
"""

import argparse
import json
import os
import subprocess
import sys
import threading
import time
import xml.etree.ElementTree as ET
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.changed import ROOT, UNKNOWN, changed_files, choose, unchanged_snippets

DURATIONS = ROOT / "tests" / "durations.json"
LOGS = ROOT / "build" / "tests"
# torch.compile cannot trace shape checks: these tests share a process without them.
COMPILED = "shapes_unchecked"
# More failures than this are no accident.
MAX_ALONE = 3


@dataclass(slots=True)
class Lane:
    """Jobs that run one after another: a name and a command each."""

    number: int
    jobs: list[tuple[str, list[str]]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Part:
    """How one job of a lane ended."""

    lane: int
    name: str
    seconds: float
    cpu_seconds: float
    returncode: int
    summary: str
    # Its lines from the first failure on; where nothing failed, none.
    failures: Sequence[str] = ()


def files_with_tests() -> list[str]:
    """Every file with tests, and every module with doctests, below the root."""
    tests = [
        path
        for path in (ROOT / "tests").rglob("test_*.py")
        if "gpu" not in path.relative_to(ROOT / "tests").parts[:1]
    ]
    modules = [path for path in (ROOT / "src").rglob("*.py") if ">>> " in path.read_text("utf-8")]
    return sorted(path.relative_to(ROOT).as_posix() for path in [*tests, *modules])


def compiled_files() -> list[str]:
    return [name for name in files_with_tests() if COMPILED in (ROOT / name).read_text("utf-8")]


def read_durations() -> dict[str, float]:
    return json.loads(DURATIONS.read_text("utf-8")) if DURATIONS.exists() else {}


def plan(
    files: Sequence[str],
    *,
    lanes: int,
    compiled: bool,
    record: bool,
    free: int,
    left_out: Sequence[str] = (),
) -> Sequence[Lane]:
    """The lanes with their jobs: tests in the first, what else there is to do in the others."""
    durations = read_durations()
    planned = [Lane(number + 1) for number in range(lanes)]
    others = [("types", [sys.executable, "-m", "mypy"])]
    if compiled:
        others.append(("compiled tests", pytest_command(compiled_files(), record, only=COMPILED)))
    for number, job in enumerate(others):
        (planned[1:] or planned)[number % max(1, lanes - 1)].jobs.append(job)
    if files:
        longest_first = sorted(files, key=lambda file: (-durations.get(file, UNKNOWN), file))
        command = pytest_command(longest_first, record, only=f"not {COMPILED}")
        command += [f"--deselect={test}" for test in left_out]
        planned[0].jobs.append(("tests", [*command, "-p", "tests.workers", f"--free={free}"]))
    return planned


def pytest_command(files: Sequence[str], record: bool, *, only: str) -> list[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-m", only, *files]
    if record:
        command += [f"--junitxml={LOGS / ('compiled' if only == COMPILED else 'tests')}.xml"]
    return command


def run_lane(lane: Lane, parts: list[Part], free: tuple[int, int]) -> None:
    """Run the jobs of a lane, print their lines as they come, and give its core to the tests."""
    for name, command in lane.jobs:
        environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        if name == "compiled tests":
            environment["MANYHEADS_NO_TYPECHECK"] = "1"
        started, lines = time.monotonic(), []
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment,
            text=True,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            pass_fds=free[:1],
        )
        assert process.stdout is not None
        with (LOGS / f"{lane.number}-{name.replace(' ', '-')}.log").open("w") as log:
            for line in process.stdout:
                log.write(line)
                print(f"{lane.number}| {line}", end="", flush=True)
                lines.append(line.rstrip())
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)
        cpu = usage.ru_utime + usage.ru_stime
        summary = next((line for line in reversed(lines) if line.strip()), "")
        seconds, code = time.monotonic() - started, process.returncode
        failures = lines_of_failures(lines) if code else []
        parts.append(Part(lane.number, name, seconds, cpu, code, summary, failures))
    os.write(free[1], b".")


def fail_alone(lines: Iterable[str]) -> bool:
    """Whether the few tests that failed beside others fail on a quiet machine too.

    One that passes alone depends on what runs beside it: it is named, to be mended.
    """
    names = [
        line.split(" - ")[0].split(maxsplit=1)[1] for line in lines if line.startswith("FAILED ")
    ]
    if not 0 < len(names) <= MAX_ALONE:
        return True
    print(f"\nonce more, alone: {' '.join(names)}", flush=True)
    command = [sys.executable, "-m", "pytest", "-q", *names]
    failed = subprocess.run(command, cwd=ROOT, check=False).returncode != 0
    print(f"{'failed' if failed else 'passed'} alone: {' '.join(names)}", flush=True)
    return failed


def lines_of_failures(lines: Sequence[str]) -> Sequence[str]:
    """What to read when only the end of a log is left: the errors of a tool, or of tests."""
    marks = ("E  ", "FAILED ", "ERROR ")
    return [line for line in lines if line.startswith(marks) or " error: " in line][-40:]


def run(lanes: Sequence[Lane], free: tuple[int, int]) -> list[Part]:
    """Run all lanes at once, and print the time of every part."""
    LOGS.mkdir(parents=True, exist_ok=True)
    parts: list[Part] = []
    started = time.monotonic()
    threads = [threading.Thread(target=run_lane, args=(lane, parts, free)) for lane in lanes]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for part in parts:
        for line in part.failures:
            print(f"{part.lane}! {line}")
    print("\nlane  part             wall    core  result")
    for part in sorted(parts, key=lambda part: part.lane):
        print(
            f"{part.lane:>4}  {part.name:<15}{part.seconds:5.0f} s {part.cpu_seconds:5.0f} s"
            f"  {part.summary.strip('= ')}"
        )
    cpu = sum(part.cpu_seconds for part in parts)
    print(f" all                 {time.monotonic() - started:5.0f} s {cpu:5.0f} s")
    return parts


def record_durations(parts: Iterable[Part]) -> None:
    """Note the seconds of each file, summed over its tests, and of the jobs before them."""
    seconds = {part.name: part.seconds for part in parts if part.name != "tests"}
    for report in LOGS.glob("*.xml"):
        if report.stem == "compiled":
            continue
        for case in ET.parse(report).iter("testcase"):
            name = case_file(case.get("classname", ""))
            seconds[name] = seconds.get(name, 0.0) + float(case.get("time", 0))
    rounded = {name: round(value, 1) for name, value in sorted(seconds.items()) if name}
    DURATIONS.write_text(json.dumps(rounded, indent=0) + "\n", "utf-8")


def case_file(name: str) -> str:
    """The file of a test case, from the dotted name that pytest gives it.

    A doctest has the name of its module, a test that of its file and perhaps a class.
    """
    parts = name.split(".")
    for count in range(len(parts), 0, -1):
        for path in (Path(*parts[:count]), Path("src", *parts[:count])):
            if (ROOT / path).with_suffix(".py").is_file():
                return path.with_suffix(".py").as_posix()
            if (ROOT / path / "__init__.py").is_file():
                return (path / "__init__.py").as_posix()
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--lanes", type=int, default=2)
    parser.add_argument("--changed", action="store_true")
    parser.add_argument("--record", action="store_true")
    options = parser.parse_args()
    files, left_out = files_with_tests(), []
    if options.changed:
        changes = changed_files()
        files = choose(files, read_durations(), changes)
        left_out = unchanged_snippets(changes)
    free = os.pipe()
    lanes = plan(
        files,
        lanes=options.lanes,
        compiled=not options.changed,
        record=options.record,
        free=free[0],
        left_out=left_out,
    )
    parts = run(lanes, free)
    # pytest ends with 5 where no test was selected.
    failed = any(part.returncode not in (0, 5) for part in parts)
    if failed and all("tests" in part.name or not part.returncode for part in parts):
        failed = fail_alone([line for part in parts for line in part.failures])
    if options.record and not failed:
        record_durations(parts)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
