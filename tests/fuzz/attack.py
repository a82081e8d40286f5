"""The frame of `make fuzz`: seeded attacks, each case under a time limit, outcomes counted.

An attack is a function `attack(random, folder) -> outcome` in the list ATTACKS of its module; those
that start processes stand in SLOW as well and get fewer cases. All chance comes from `random`, so a
case is repeated by its attack, number and seed. What a case may do:

- return "equal": the input was accepted, and the answer agrees with an independent one;
- return "harmless": the input was accepted, and the change cannot matter;
- return "refused", or raise a ManyheadsError: one clear line.

An AssertionError is a wrong answer, every other exception a raw exception.
"""

import multiprocessing
import resource
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from importlib import import_module
from multiprocessing.connection import Connection, wait
from pathlib import Path
from random import Random

from manyheads.errors import ManyheadsError

Attack = Callable[[Random, Path], str]

MODULES = ("checkpoints", "user_files", "training", "arguments", "kernels", "statistics")
ACCEPTED = ("equal", "harmless", "refused")
FAILED = ("wrong answer", "raw exception", "hang", "died")
LIMIT_S = 30
# A slow attack gets one case for so many of another.
SLOW_ONE_IN = 50
# An error longer than this is no clear line.
LONGEST_MESSAGE = 1_000
# What a case may allocate, beyond what torch itself maps.
MEMORY = 12 << 30


@dataclass(frozen=True, slots=True)
class Case:
    """One attempt of an attack; `str` gives what repeats it."""

    attack: str
    number: int
    seed: int

    def __str__(self) -> str:
        return f"--only {self.attack} --case {self.number} --seed {self.seed}"


@dataclass(frozen=True, slots=True)
class Verdict:
    case: Case
    outcome: str
    detail: str = ""


@dataclass(slots=True)
class Tally:
    """Outcomes per attack, and the cases that failed."""

    counts: dict[str, Counter[str]] = field(default_factory=dict)
    failures: list[Verdict] = field(default_factory=list)

    def add(self, verdict: Verdict) -> None:
        self.counts.setdefault(verdict.case.attack, Counter())[verdict.outcome] += 1
        if verdict.outcome in FAILED:
            self.failures.append(verdict)


def attacks(only: str = "") -> dict[str, tuple[Attack, bool]]:
    """Attacks by name, as in "checkpoints.config", and whether they are slow."""
    every: dict[str, tuple[Attack, bool]] = {}
    for name in MODULES:
        module = import_module(f"tests.fuzz.{name}")
        slow = getattr(module, "SLOW", ())
        every |= {f"{name}.{one.__name__}": (one, one in slow) for one in module.ATTACKS}
    return {name: one for name, one in every.items() if name.startswith(only)}


def plan(names: dict[str, tuple[Attack, bool]], count: int, seed: int) -> list[Case]:
    """About `count` cases, spread over the attacks, in the order of their numbers."""
    weights = {name: 1 / SLOW_ONE_IN if slow else 1.0 for name, (_, slow) in names.items()}
    total = sum(weights.values())
    shares = {name: max(1, round(count * weight / total)) for name, weight in weights.items()}
    cases = [Case(name, number, seed) for name, n in shares.items() for number in range(n)]
    return sorted(cases, key=lambda case: (case.number / shares[case.attack], case.attack))


def run_case(attack: Attack, case: Case) -> Verdict:
    """Run one case here, without a time limit."""
    random = Random(str((case.attack, case.number, case.seed)))
    with tempfile.TemporaryDirectory(prefix="fuzz-") as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            outcome = attack(random, Path(folder))
        except ManyheadsError as error:
            return _refusal(case, error)
        except AssertionError:
            return Verdict(case, "wrong answer", traceback.format_exc())
        except BaseException:
            return Verdict(case, "raw exception", traceback.format_exc())
    if outcome not in ACCEPTED:
        return Verdict(case, "raw exception", f"the attack returned {outcome!r}")
    return Verdict(case, outcome)


def _refusal(case: Case, error: ManyheadsError) -> Verdict:
    message = str(error)
    if "\n" in message.strip() or len(message) > LONGEST_MESSAGE or not message.strip():
        return Verdict(case, "raw exception", f"not one clear line: {message[:2_000]!r}")
    return Verdict(case, "refused")


def run(cases: list[Case], workers: int) -> Iterator[Verdict]:
    """Verdicts as they come, from `workers` processes; a case over the limit loses its process."""
    waiting = cases[::-1]
    crew = [Worker() for _ in range(min(workers, len(cases)))]
    for worker in crew:
        worker.give(waiting.pop())
    while any(worker.case for worker in crew):
        busy = {worker.connection: worker for worker in crew if worker.case}
        for connection in wait(list(busy), timeout=1):
            assert isinstance(connection, Connection)
            yield busy[connection].verdict()
        for worker in crew:
            if worker.case and time.monotonic() > worker.started + LIMIT_S:
                yield Verdict(worker.case, "hang", f"over {LIMIT_S} s")
                worker.restart()
            if not worker.case and waiting:
                worker.give(waiting.pop())
    for worker in crew:
        worker.stop()


class Worker:
    """A process that runs one case after another."""

    def __init__(self) -> None:
        self.case: Case | None = None
        self.started = 0.0
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self.connection, other = context.Pipe()
        self.process = context.Process(target=_serve, args=(other,), daemon=False)
        self.process.start()
        other.close()
        # Its imports take seconds, and are no part of the first case.
        self.connection.recv()

    def give(self, case: Case) -> None:
        self.case, self.started = case, time.monotonic()
        self.connection.send(case)

    def verdict(self) -> Verdict:
        assert self.case is not None
        try:
            verdict: Verdict = self.connection.recv()
            self.case = None
        except EOFError:
            verdict = Verdict(self.case, "died", f"the process ended, {self.process.exitcode}")
            self.restart()
        return verdict

    def restart(self) -> None:
        self.stop()
        self.case = None
        self._start()

    def stop(self) -> None:
        self.connection.close()
        self.process.kill()
        self.process.join()


def _serve(connection: Connection) -> None:
    import torch

    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    known = attacks()
    connection.send(None)
    while True:
        try:
            case: Case = connection.recv()
        except EOFError:
            return
        connection.send(run_case(known[case.attack][0], case))
