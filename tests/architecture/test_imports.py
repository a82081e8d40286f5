"""The core needs torch, numpy, safetensors, einops and jaxtyping to be imported, and no more."""

import json
import subprocess
import sys
from functools import cache
from importlib.metadata import PackageNotFoundError, packages_distributions, requires

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.architecture.house import CORE, ROOT, Source, room, sources

ALLOWED = {"torch", "numpy", "safetensors", "einops", "jaxtyping"}

# Everything but the named packages is made to look as if it was never installed. The finder is
# replaced rather than made to raise, because torch asks for packages that it can do without.
IMPORT_WITH_NOTHING_ELSE_INSTALLED = """
import importlib, importlib.machinery, json, sys

installed, modules = json.loads(sys.argv[1])
visible = {*installed, "manyheads", *sys.stdlib_module_names}


class OnlyTheVisible(importlib.machinery.PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        if name.partition(".")[0] not in visible:
            return None
        return super().find_spec(name, path, target)


place = sys.meta_path.index(importlib.machinery.PathFinder)
sys.meta_path[place] = OnlyTheVisible
for name in modules:
    importlib.import_module(name)
print(len(modules))
"""


def core() -> list[Source]:
    """But for kernels in triton, which a function imports where there is a device for them."""
    inside = [source for source in sources().values() if room(source.place) in CORE]
    return [source for source in inside if not source.needs_triton]


def distributions_behind(names: set[str]) -> set[str]:
    """The named distributions and all that they themselves require, without their extras."""
    result: set[str] = set()
    waiting = {canonicalize_name(name) for name in names}
    while waiting:
        name = waiting.pop()
        result.add(name)
        try:
            requirements = [Requirement(line) for line in requires(name) or []]
        except PackageNotFoundError:
            continue
        waiting |= {
            canonicalize_name(requirement.name)
            for requirement in requirements
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        } - result
    return result


@cache
def packages_behind() -> list[str]:
    behind = distributions_behind(ALLOWED)
    return sorted(
        top
        for top, distributions in packages_distributions().items()
        if behind & {canonicalize_name(name) for name in distributions}
    )


def import_alone(modules: list[str]) -> subprocess.CompletedProcess[str]:
    argument = json.dumps([packages_behind(), modules])
    return subprocess.run(
        [sys.executable, "-c", IMPORT_WITH_NOTHING_ELSE_INSTALLED, argument],
        cwd=ROOT / "src",
        capture_output=True,
        text=True,
        check=False,
    )


def test_the_core_imports_where_nothing_else_is_installed() -> None:
    result = import_alone([source.module for source in core()])
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 1


def test_a_package_outside_the_list_cannot_be_imported() -> None:
    result = import_alone(["matplotlib"])
    assert "No module named 'matplotlib'" in result.stderr


def test_the_core_names_no_other_package_at_import_time() -> None:
    allowed = {*ALLOWED, "manyheads", *sys.stdlib_module_names}
    faults = [
        f"{source.place}:{imported.line} imports {imported.module}: "
        "import it in the function that uses it"
        for source in core()
        for imported in source.imports()
        if not (imported.inside_function or imported.type_checking)
        and imported.module.partition(".")[0] not in allowed
    ]
    assert not faults, "\n".join(faults)
