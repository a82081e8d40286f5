"""What a module says it offers is what it has."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import pytest

import manyheads
from tests.architecture.house import PACKAGE, sources


def modules_with_a_list() -> Iterator[ModuleType]:
    for source in sources().values():
        # Triton comes with CUDA's torch alone.
        if source.path.stem != "__main__" and (not source.needs_triton or find_spec("triton")):
            module = import_module(source.module)
            if hasattr(module, "__all__"):
                yield module


def test_every_listed_name_exists_and_is_listed_once() -> None:
    faults = [
        f"{module.__name__}.__all__ lists {name!r}, which "
        + ("is listed twice" if hasattr(module, name) else "the module does not define")
        for module in modules_with_a_list()
        for index, name in enumerate(module.__all__)
        if not hasattr(module, name) or name in module.__all__[:index]
    ]
    assert not faults, "\n".join(faults)


def test_public_names_are_sorted() -> None:
    assert list(manyheads.__all__) == sorted(manyheads.__all__)


def test_every_public_name_can_be_imported() -> None:
    namespace: dict[str, object] = {}
    exec("from manyheads import *", namespace)
    assert set(manyheads.__all__) <= set(namespace)


def test_type_stubs_import_every_name_from_its_module() -> None:
    stub = ast.parse((PACKAGE / "__init__.pyi").read_text())
    message = {
        alias.name: node.module
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    homes = {name: f"manyheads.{home}" for name, home in manyheads._HOME_OF.items()}
    assert message == homes
    listed = next(node for node in stub.body if isinstance(node, ast.Assign))
    assert ast.literal_eval(listed.value) == list(manyheads.__all__)


def test_importing_the_package_loads_nothing_heavy() -> None:
    script = (
        "import sys, manyheads; sys.exit(any(name in sys.modules for name in ('torch', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0


def test_a_name_that_does_not_exist_is_an_error() -> None:
    with pytest.raises(AttributeError):
        _ = manyheads.no_such_name
