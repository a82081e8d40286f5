"""What the tests of the CUDA kernels share: the device, and a table of how close each kernel comes.

The table is printed when all tests have run. `--on cpu` tries the tests themselves on a machine
without a GPU; it says nothing of the CUDA kernels.
"""

import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

# For kernel_cases.py: a `tests` that came with the machine's own packages would hide ours.
sys.path.insert(0, str(Path(__file__).parent))

KERNELS = ("fused", "varlen", "flex", "reference")
DTYPES = ("float32", "bfloat16", "float16")


@dataclass
class Closeness:
    """The worst of some cases, as a share of the length of what the reference gives."""

    cases: int = 0
    output: float = 0.0
    gradient: float = 0.0

    def add(self, output: float, gradient: float) -> None:
        self.cases += 1
        self.output = max(self.output, output)
        self.gradient = max(self.gradient, gradient)

    def __str__(self) -> str:
        gradient = f"{self.gradient:.0e}" if self.gradient else "-"
        return f"{self.output:.0e} {gradient} ({self.cases})"


@dataclass
class Ledger:
    """How close each kernel came, and what each would not do."""

    closeness: dict[tuple[str, str, str], Closeness] = field(
        default_factory=lambda: defaultdict(Closeness)
    )
    refusals: Counter[tuple[str, str]] = field(default_factory=Counter)

    def lines(self) -> list[str]:
        rows = sorted(
            {(kernel, mask) for kernel, mask, _ in self.closeness},
            key=lambda row: (KERNELS.index(row[0]), row[1]),
        )
        lines = [f"{'kernel':<10}{'mask':<14}" + "".join(f"{dtype:<22}" for dtype in DTYPES)]
        for kernel, mask in rows:
            found = (self.closeness.get((kernel, mask, dtype)) for dtype in DTYPES)
            cells = "".join(f"{one or '-'!s:<22}" for one in found)
            lines.append(f"{kernel:<10}{mask:<14}{cells}")
        for (kernel, reason), cases in sorted(self.refusals.items()):
            lines.append(f"{kernel} refused {cases} cases: {reason}"[:110])
        return lines


LEDGER = pytest.StashKey[Ledger]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), default="cuda", help="device of tests/gpu")
    parser.addoption("--share", default="1/1", help="2/4 runs the second of four equal shares")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    share, shares = (int(number) for number in config.getoption("--share").split("/"))
    items[:] = items[share - 1 :: shares]


def pytest_configure(config: pytest.Config) -> None:
    config.stash[LEDGER] = Ledger()


def pytest_sessionstart(session: pytest.Session) -> None:
    if session.config.getoption("--on") == "cuda" and not torch.cuda.is_available():
        pytest.exit("make gpu-test needs a CUDA device, and torch finds none here", returncode=1)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    lines = config.stash[LEDGER].lines()
    if len(lines) > 1:
        terminalreporter.section("worst output and gradient error against reference (cases)")
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture(scope="session")
def device(pytestconfig: pytest.Config) -> str:
    return str(pytestconfig.getoption("--on"))


@pytest.fixture(scope="session")
def ledger(pytestconfig: pytest.Config) -> Ledger:
    return pytestconfig.stash[LEDGER]


@pytest.fixture(autouse=True, scope="session")
def exact_float32() -> None:
    """A float32 product is one, and not three digits of it."""
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
