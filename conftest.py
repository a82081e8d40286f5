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
from functools import cache, partial, update_wrapper, wraps
from importlib.util import find_spec
from itertools import count
from pathlib import Path
from types import CodeType, FunctionType
from typing import Any, ClassVar

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
if find_spec("lm_eval") is None:
    # A subclass of what an extra has; a function imports it where that is installed.
    collect_ignore.append(str(HERE / "src/manyheads/tasks/benchmarks/lm_eval_adapter.py"))

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

    # How often a function within another was made; forgotten before each file.
    SEEN: dict[object, int] = {}
    # The file whose tests are running, if any are, and how many of them were started.
    FILE: list[Path] = []
    STARTED = count(1)
    # A function counts this many of its calls in a file.
    COUNTED_CALLS = 64

    def is_due(times: int) -> bool:
        """Whether this is the first, second, fourth, eighth ... time."""
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
                CheckedFunction(vars(checked)["__init__"], typechecker)
            return checked
        if not inspect.isfunction(checked) or inspect.iscoroutinefunction(checked):
            return jaxtyped(checked, typechecker=typechecker)
        if "<locals>" in checked.__qualname__:
            SEEN[checked.__code__] = made = SEEN.get(checked.__code__, 0) + 1
            return check_inner(checked, typechecker) if is_due(made) else checked
        CheckedFunction(checked, typechecker)
        return checked

    def check_inner(function: Any, typechecker: Any) -> Any:
        """A function that goes when nobody refers to it, and that Ray can pickle."""
        times, prepared = 0, None

        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal times, prepared
            times += 1
            if not is_due(times):
                return function(*args, **kwargs)
            if prepared is None:
                prepared = prepare(function, typechecker)
            return prepared(*args, **kwargs)

        return call

    class CheckedFunction:
        """Has the calls of a function checked, at no cost while none is due.

        The function stays as it is, but for its code: while calls are counted, that is
        `count_call`, which comes here. In each file the first, second, fourth ... up to the last
        that is counted are checked; later the first call in the second, fourth, eighth ... test.
        """

        # Those that were called in this file.
        called: ClassVar[set["CheckedFunction"]] = set()

        def __init__(self, function: Any, typechecker: Any) -> None:
            self.function = function
            self.code = code = function.__code__
            self.plain = FunctionType(
                code,
                function.__globals__,
                function.__name__,
                function.__defaults__,
                function.__closure__,
            )
            self.plain.__kwdefaults__ = function.__kwdefaults__
            update_wrapper(self.plain, function)
            del vars(self.plain)["__wrapped__"]
            # Whoever asks for the arguments of the function finds them there.
            function.__wrapped__ = self.plain
            self.prepare = cache(partial(prepare, self.plain, typechecker))
            template = counting_code(code.co_freevars)
            self.counting = template.replace(
                co_consts=tuple(self if value == "" else value for value in template.co_consts),
                co_name=code.co_name,
                co_qualname=code.co_qualname,
            )
            self.count(COUNTED_CALLS)

        def count(self, last: int) -> None:
            """Count calls from now on, up to the last."""
            self.calls, self.last = 0, last
            self.function.__code__ = self.counting

        def call(self, /, *args: Any, **kwargs: Any) -> Any:
            self.calls = times = self.calls + 1
            if times == 1:
                self.called.add(self)
            if times >= self.last:
                self.function.__code__ = self.code
            return (self.prepare() if is_due(times) else self.plain)(*args, **kwargs)

    @cache
    def counting_code(free: tuple[str, ...]) -> CodeType:
        """Code that calls its constant, the CheckedFunction, in place of ''.

        It has the same free variables as the code that it replaces, and takes their cells:
        whoever looks at the locals of a frame, as pytest does after a failure, would find none
        there otherwise, and crash.
        """
        if not free:
            return count_call.__code__
        lines = [
            "def outer():",
            f"    {' = '.join(free)} = None",
            "    def inner(*positional_, **named_):",
            "        return ''.call(*positional_, **named_)",
            f"        {', '.join(free)}",
            "    return inner.__code__",
        ]
        namespace: dict[str, Any] = {}
        exec("\n".join(lines), namespace)
        code: CodeType = namespace["outer"]()
        assert code.co_freevars == free
        return code

    def count_call(*args: Any, **kwargs: Any) -> Any:
        return "".call(*args, **kwargs)  # type: ignore[attr-defined]

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

    def start_counting(file: Path) -> None:
        """Before a test: in a new file anew, in every second, fourth, eighth ... one call more."""
        global STARTED
        if file not in FILE:
            FILE[:], STARTED = [file], count(2)
            SEEN.clear()
            for function in CheckedFunction.called:
                function.count(COUNTED_CALLS)
            CheckedFunction.called.clear()
        elif is_due(next(STARTED)):
            for function in CheckedFunction.called:
                if function.calls >= function.last:
                    function.count(1)

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
    if "torch" in sys.modules and not sys.modules["torch"].cuda.is_available():
        sys.modules["torch"].manual_seed = seed_the_processor  # type: ignore[attr-defined]
    gc.freeze()
    gc.set_threshold(20_000, 20, 20)
    gc.enable()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    if "torch" in sys.modules:
        # Random weights and texts are the same in every run.
        sys.modules["torch"].manual_seed(0)
    if SHAPES_ARE_CHECKED:
        start_counting(item.path)
    elif item.get_closest_marker("shapes_unchecked") and "torch._dynamo" in sys.modules:
        # As in a process of its own: what others compiled counts against no limit.
        sys.modules["torch._dynamo"].reset()


def seed_the_processor(seed: int) -> Any:
    """`torch.manual_seed` where the processor is the only device.

    Torch's own keeps a traceback per call and absent device, for an error it may report.
    """
    return sys.modules["torch"].default_generator.manual_seed(int(seed))


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
