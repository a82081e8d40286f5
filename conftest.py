"""Set up before any test or doctest imports manyheads: threads, shape checks, hypothesis.

It stands at the root because the doctests under src need it as much as the tests do. What is not
installed is left out: `make gpu-test` runs on machines that have torch and pytest alone.
"""

import gc
import inspect
import os
import re
import signal
import subprocess
import sys
from dataclasses import is_dataclass
from functools import partial, wraps
from importlib.util import find_spec
from pathlib import Path
from typing import Any

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

# Hardly anything of what is imported is ever garbage.
gc.disable()

os.environ.setdefault("MPLBACKEND", "Agg")
# On ARM torch hands nearly every product to oneDNN, which takes 70 µs to prepare even the smallest.
os.environ.setdefault("TORCH_MKLDNN_MATMUL_MIN_SIZE", "10000000")
# No test depends on how it was started: a shell ignores Ctrl-C for what it runs in the background,
# and some terminals ask for colors or a width.
signal.signal(signal.SIGINT, signal.default_int_handler)
for name in ("COLUMNS", "LINES", "FORCE_COLOR", "NO_COLOR"):
    os.environ.pop(name, None)

if SHAPES_ARE_CHECKED:
    import jaxtyping
    from jaxtyping import install_import_hook, jaxtyped

    # A quote that is neither of a class nor of a shape: of a Literal, or around an annotation.
    QUOTED = re.compile(r"""(?<!<class )(?<!Tensor, )['"](?=\w)""")

    # How often a function was called or, within another, made; forgotten before each file.
    SEEN: dict[object, int] = {}
    # The file whose tests are running, if any are.
    FILE: list[Path] = []

    def is_due(key: object) -> bool:
        """Whether this is the first, second, fourth, eighth ... time in this file."""
        SEEN[key] = times = SEEN.get(key, 0) + 1
        return not times & (times - 1)

    def check_shapes(checked: Any = None, *, typechecker: Any) -> Any:
        """What jaxtyping's own decorator does, where a check is due.

        To check every call takes more time than the tests themselves do, and to prepare every
        function more than to import torch. So a function is prepared when it is first called, and
        in each file its arguments are checked ever more rarely.
        """
        if checked is None:
            return partial(check_shapes, typechecker=typechecker)
        if inspect.isclass(checked):
            if is_dataclass(checked) and "__init__" in vars(checked):
                init = check_shapes(checked.__init__, typechecker=typechecker)
                checked.__init__ = init  # type: ignore[method-assign]
            return checked
        if not inspect.isfunction(checked) or inspect.iscoroutinefunction(checked):
            return jaxtyped(checked, typechecker=typechecker)
        inner = "<locals>" in checked.__qualname__
        if inner and not is_due(checked.__code__):
            return checked
        key = object()
        prepared: Any = None

        @wraps(checked)
        def call(*given: Any, **named: Any) -> Any:
            nonlocal prepared
            # `is_due` in two lines: most calls end here.
            SEEN[key] = times = SEEN.get(key, 0) + 1
            if times & (times - 1):
                return checked(*given, **named)
            if prepared is None:
                prepared = prepare(checked, typechecker)
            return prepared(*given, **named)

        return call

    def prepare(function: Any, typechecker: Any) -> Any:
        """The function with its checks.

        It does without most of the bookkeeping of jaxtyping, which binds arguments to names and
        checks them twice, for a message that tells shapes. Annotations in quotes may name what is
        imported for type checkers alone; jaxtyping knows how to pass over them.
        """
        hints = repr(list(getattr(function, "__annotations__", {}).values()))
        # A generator runs after its context has ended, so that its shapes would leak into another.
        if inspect.isgeneratorfunction(function) or QUOTED.search(hints):
            return jaxtyped(function, typechecker=typechecker)
        checking = typechecker(function)
        if "jaxtyping" not in hints:
            return checking

        def with_shapes(*given: Any, **named: Any) -> Any:
            with jaxtyped("context"):
                return checking(*given, **named)

        return with_shapes

    jaxtyping.jaxtyped = check_shapes  # type: ignore[assignment]
    install_import_hook("manyheads", "beartype.beartype")

if find_spec("hypothesis"):
    from hypothesis import settings

    settings.register_profile(
        "manyheads", deadline=None, max_examples=25, derandomize=bool(os.getenv("CI"))
    )
    settings.load_profile("manyheads")


def pytest_collection_finish() -> None:
    """Leave what was imported out of every later collection of garbage, and have fewer of them."""
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "torch" in sys.modules:
        # Random weights and texts are the same in every run.
        seed_all(sys.modules["torch"])
    if SHAPES_ARE_CHECKED:
        if item.path not in FILE:
            FILE[:] = [item.path]
            SEEN.clear()
    elif item.get_closest_marker("shapes_unchecked") and "torch._dynamo" in sys.modules:
        # As in a process of its own: what others compiled counts against no limit.
        sys.modules["torch._dynamo"].reset()


def seed_all(torch: Any) -> None:
    """Seed the generators of the devices that this machine has.

    `torch.manual_seed` keeps a traceback per call and absent device, for an error it may report.
    """
    if torch.cuda.is_available():
        torch.manual_seed(0)
    else:
        torch.default_generator.manual_seed(0)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Run a test marked `shapes_unchecked` in a process of its own, without the import hook.

    torch.compile(fullgraph=True) cannot trace the checks, and what is decorated once stays so.
    `make test` runs these tests in one process without the hook and leaves them out here.
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
