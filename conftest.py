"""Set up before any test or doctest imports manyheads: threads, shape checks, hypothesis.

It stands at the root because the doctests under src need it as much as the tests do. What is not
installed is left out: `make gpu-test` runs on machines that have torch and pytest alone.
"""

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

SHAPES_ARE_CHECKED = (
    find_spec("jaxtyping") is not None
    and find_spec("beartype") is not None
    and not os.getenv("MANYHEADS_NO_TYPECHECK")
)

# Kernels in triton, which comes with CUDA's torch alone.
HERE = Path(__file__).parent
NEED_TRITON = [
    str(file) for file in HERE.glob("src/**/*.py") if "\nimport triton\n" in file.read_text()
]
collect_ignore = [] if find_spec("triton") else NEED_TRITON

if "PYTEST_XDIST_WORKER" in os.environ:
    # Each worker has a core to itself; more threads than cores would only wait for one another.
    # torch reads this once, when it is imported.
    os.environ["OMP_NUM_THREADS"] = "1"

os.environ.setdefault("MPLBACKEND", "Agg")

if SHAPES_ARE_CHECKED:
    from jaxtyping import install_import_hook

    install_import_hook("manyheads", "beartype.beartype")

if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile(
        "manyheads", deadline=None, max_examples=25, derandomize=bool(os.getenv("CI"))
    )
    settings.load_profile("manyheads")


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `shapes_unchecked` in a process of its own, without the import hook.

    torch.compile(fullgraph=True) cannot trace the checks, and what is decorated once stays so.
    """
    if not (SHAPES_ARE_CHECKED and pyfuncitem.get_closest_marker("shapes_unchecked")):
        return None
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", pyfuncitem.nodeid],
        cwd=pyfuncitem.config.rootpath,
        env={**os.environ, "MANYHEADS_NO_TYPECHECK": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if result.returncode:
        pytest.fail(result.stdout + result.stderr, pytrace=False)
    return True
