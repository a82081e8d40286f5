"""What the tests of the CUDA kernels share: the device, and a table of how close each kernel comes.

The table is printed when all tests have run. `--on cpu` tries the tests themselves on a machine
without a GPU; it says nothing of the CUDA kernels.
"""

import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

# For our own files: a `tests` that came with the machine's own packages would hide ours.
sys.path.insert(0, str(Path(__file__).parent))

from ledger import Ledger

LEDGER = pytest.StashKey[Ledger]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--on", choices=("cuda", "cpu"), default="cuda", help="device of tests/gpu")
    parser.addoption("--share", default="1/1", help="2/4 runs the second of four equal shares")
    parser.addoption("--ledger", type=Path, help="also write the table to this file")


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
    if config.getoption("--ledger") is not None:
        config.stash[LEDGER].write(config.getoption("--ledger"))
    lines = config.stash[LEDGER].lines()
    if len(lines) > 1:
        terminalreporter.section("worst output and gradient error against reference (cases)")
        for line in lines:
            terminalreporter.write_line(line)


def teach_interpreter() -> None:
    """Triton's interpreter takes arrays of one number for numbers; numpy 2.4 does not."""
    from triton.runtime import interpreter

    original: Any = interpreter._patch_lang_tensor

    def patch(tensor: Any, scope: Any) -> None:
        original(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    interpreter._patch_lang_tensor = patch


if os.environ.get("TRITON_INTERPRET") == "1":
    teach_interpreter()


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
    # The LSTM of cuDNN has a setting of its own.
    torch.backends.cudnn.allow_tf32 = False
    torch.set_float32_matmul_precision("highest")
