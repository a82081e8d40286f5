"""The architecture: who may import whom, and what a source file may be."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.architecture.house import (
    FLOORS,
    FLOORS_OF_LENS,
    PACKAGE,
    Source,
    room,
    room_of_lens,
    sources,
    target,
)

LONGEST = 600
MAX_MODULES = 16
NAMES_THAT_SAY_NOTHING = {"base", "common", "helper", "helpers", "misc", "util", "utils"}


def without_a_floor(package: Path) -> list[str]:
    """A file, of whatever kind, that the table of floors does not know."""
    files = (path.relative_to(package) for path in package.rglob("*") if path.is_file())
    return [
        f"{file.as_posix()} has no floor: give it one in tests/architecture/house.py"
        for file in files
        if "__pycache__" not in file.parts
        and file.as_posix() != "py.typed"
        and room(file.as_posix()) is None
    ]


def without_an_init(package: Path) -> list[str]:
    """A folder that would be left out when the package is built."""
    folders = {path.parent for path in package.rglob("*.py")}
    return [
        f"{folder.relative_to(package.parent).as_posix()} has no __init__.py"
        for folder in sorted(folders)
        if not (folder / "__init__.py").is_file()
    ]


def steps_up(package: Path) -> list[str]:
    """An import that is neither of a lower floor nor of the file's own folder."""
    known = sources(package)
    result = []
    for source in known.values():
        here = room(source.place)
        for imported in source.imports():
            reached = target(imported, known)
            there = room(reached.place) if reached else None
            if here is None or there in (None, here, "__init__.py"):
                continue
            # Files right below the package share a folder, but not a floor.
            share_a_folder = not (here.endswith("/") or there.endswith("/"))
            if FLOORS[there] >= FLOORS[here] + share_a_folder:
                result.append(
                    f"{source.place}:{imported.line}, on floor {FLOORS[here]}, "
                    f"imports {there} of floor {FLOORS[there]}"
                )
    return result


def steps_up_in_lens(package: Path) -> list[str]:
    """An import inside lens that is neither of a lower floor of lens nor of the file's folder."""
    known = sources(package)
    result = []
    for source in known.values():
        if not source.place.startswith("lens/"):
            continue
        here = room_of_lens(source.place)
        if here is None:
            result.append(
                f"{source.place} has no floor: give it one in tests/architecture/house.py"
            )
            continue
        for imported in source.imports():
            reached = target(imported, known)
            there = room_of_lens(reached.place) if reached else None
            if there not in (None, here) and FLOORS_OF_LENS[there] >= FLOORS_OF_LENS[here]:
                result.append(
                    f"{source.place}:{imported.line}, on floor {FLOORS_OF_LENS[here]} of lens, "
                    f"imports {there} of floor {FLOORS_OF_LENS[there]}"
                )
    return result


def imports_of_the_root(package: Path) -> list[str]:
    """An import of the public names, which only users import."""
    known = sources(package)
    root = known.get(package.name)
    return [
        f"{source.place}:{imported.line} imports the package root: import from the file that "
        f"defines {imported.name or 'what you need'}"
        for source in known.values()
        for imported in source.imports()
        if imported.module == package.name and target(imported, known) in (root, None)
    ]


def circle(package: Path) -> list[str]:
    """The first circle among the imports that run on loading, as a walk back to its start."""
    known = sources(package)
    finished: set[str] = set()

    def walk(source: Source, trail: list[str]) -> list[str]:
        if source.module in trail:
            return [*trail[trail.index(source.module) :], source.module]
        if source.module in finished:
            return []
        for imported in source.imports():
            reached = target(imported, known)
            if reached is None or imported.type_checking or imported.inside_function:
                continue
            if result := walk(reached, [*trail, source.module]):
                return result
        finished.add(source.module)
        return []

    for source in known.values():
        if result := walk(source, []):
            return [" imports ".join(result)]
    return []


def train_and_lens_meet(package: Path) -> list[str]:
    """Training takes watchers and lens gives them, so neither needs to know the other."""
    known = sources(package)
    return [
        f"{source.place}:{imported.line} imports {imported.module}"
        for source in known.values()
        for imported in source.imports()
        if (reached := target(imported, known))
        and {room(source.place), room(reached.place)} == {"train/", "lens/"}
    ]


def named_for_nothing(package: Path) -> list[str]:
    """A file or folder whose name does not say which idea it holds."""
    return [
        f"{source.place} is named for no idea: name it after what it holds"
        for source in sources(package).values()
        if NAMES_THAT_SAY_NOTHING & set(Path(source.place).with_suffix("").parts)
    ]


def too_long(package: Path) -> list[str]:
    """A file that holds more than one idea."""
    lengths = {source.place: len(source.text.splitlines()) for source in sources(package).values()}
    return [
        f"{place} has {lines} lines, and past {LONGEST} it is two ideas: split it"
        for place, lines in lengths.items()
        if lines > LONGEST
    ]


def crowded(package: Path) -> list[str]:
    """A folder with more modules than a reader can take in at once."""
    modules = Counter(
        source.path.parent
        for source in sources(package).values()
        if source.path.name != "__init__.py"
    )
    return [
        f"{folder.relative_to(package.parent).as_posix()}/ has {count} modules, and at most "
        f"{MAX_MODULES} are allowed: group them in folders"
        for folder, count in sorted(modules.items())
        if count > MAX_MODULES
    ]


def hidden_by_a_public_name(package: Path) -> list[str]:
    """A module that an import cannot reach, because its package binds the name to something else.

    After `from manyheads.lens.measure.statistics import statistics` in lens/__init__.py,
    `import manyheads.lens.measure.statistics as module` gives the function.
    """
    known = sources(package)
    result = []
    for source in known.values():
        if source.path.name != "__init__.py":
            continue
        modules = {each.name for each in source.imports() if each.module == source.module}
        result += [
            f"{known[f'{source.module}.{name}'].place} has the name of a public name of "
            f"{source.module}: rename the module"
            for name in sorted(source.public_names() - modules)
            if f"{source.module}.{name}" in known
        ]
    return result


def two_classes_of_one_name(package: Path) -> list[str]:
    """A class name, private ones included, that means two things."""
    homes: dict[str, list[str]] = {}
    for source in sources(package).values():
        for name in source.classes():
            homes.setdefault(name, []).append(source.place)
    return [
        f"class {name} is defined in {' and '.join(places)}: rename all but one"
        for name, places in sorted(homes.items())
        if len(places) > 1
    ]


Rule = Callable[[Path], list[str]]

RULES: list[Rule] = [
    without_a_floor,
    without_an_init,
    steps_up,
    steps_up_in_lens,
    imports_of_the_root,
    circle,
    train_and_lens_meet,
    named_for_nothing,
    too_long,
    crowded,
    hidden_by_a_public_name,
    two_classes_of_one_name,
]

# For each rule, a house with the one fault that the rule is there to find.
FAULTS: list[tuple[Rule, dict[str, str]]] = [
    (without_a_floor, {"newcomer.py": ""}),
    (without_a_floor, {"attic/trunk.txt": ""}),
    (without_an_init, {"parts/masks/rules.py": ""}),
    (steps_up, {"ragged.py": "from manyheads.attention import Attention", "attention.py": ""}),
    (steps_up, {"cache.py": "from . import attention", "attention.py": ""}),
    (steps_up, {"cache.py": "def f():\n    import manyheads.kernels", "kernels/__init__.py": ""}),
    (
        steps_up,
        {
            "ragged.py": "from typing import TYPE_CHECKING\n"
            "if TYPE_CHECKING:\n    from manyheads.cache import Cache",
            "cache.py": "",
        },
    ),
    (
        steps_up_in_lens,
        {
            "lens/results/tables.py": "from manyheads.lens.measure import measures",
            "lens/measure/measures.py": "",
        },
    ),
    (
        steps_up_in_lens,
        {
            "lens/causal/ablation.py": "def f():\n    import manyheads.lens.measure.watcher",
            "lens/measure/watcher.py": "",
        },
    ),
    (steps_up_in_lens, {"lens/newcomer/probe.py": ""}),
    (imports_of_the_root, {"cache.py": "import manyheads"}),
    (imports_of_the_root, {"cache.py": "from manyheads import Ragged"}),
    (imports_of_the_root, {"parts/gates.py": "from .. import Ragged"}),
    (
        circle,
        {
            "parts/gates.py": "from manyheads.parts.norms import Norm",
            "parts/norms.py": "from .experts import Experts",
            "parts/experts.py": "import manyheads.parts.gates",
        },
    ),
    (
        circle,
        {
            "parts/__init__.py": "from manyheads.parts.gates import Gate",
            "parts/gates.py": "from manyheads.parts import Norm",
        },
    ),
    (train_and_lens_meet, {"train/loop.py": "import manyheads.lens", "lens/__init__.py": ""}),
    (named_for_nothing, {"parts/utils.py": ""}),
    (named_for_nothing, {"kernels/common/scores.py": ""}),
    (too_long, {"ragged.py": "\n" * (LONGEST + 1)}),
    (crowded, {f"lens/measure/m{number}.py": "" for number in range(MAX_MODULES + 1)}),
    (
        hidden_by_a_public_name,
        {
            "lens/__init__.py": "from manyheads.lens.measure.statistics import statistics",
            "lens/statistics.py": "def statistics(): ...",
        },
    ),
    (
        hidden_by_a_public_name,
        {"__init__.py": '__all__ = ["load", "train"]', "train/__init__.py": ""},
    ),
    (
        two_classes_of_one_name,
        {"cache.py": "class Step: ...", "train/loop.py": "if True:\n    class Step: ..."},
    ),
    (two_classes_of_one_name, {"cache.py": "class _Rows: ...", "ragged.py": "class _Rows: ..."}),
]

# Imports that look like faults and are none.
SOUND = {
    "__init__.py": "from manyheads.cache import Cache",
    "ragged.py": "from manyheads import errors",
    "errors.py": "",
    "cache.py": "import torch\nfrom .ragged import Ragged\nfrom . import errors",
    "parts/__init__.py": "from manyheads.parts import masks\n"
    "from manyheads.parts.gates import Gate\n"
    '__all__ = ["Gate", "masks"]',
    "parts/masks/__init__.py": "class Mask: ...",
    "parts/gates.py": "class Gate: ...\nfrom typing import TYPE_CHECKING\n"
    "if TYPE_CHECKING:\n    from manyheads.parts.norms import Norm",
    "parts/norms.py": "from manyheads.parts import gates\n"
    "def one():\n    class Local: ...\n"
    "def other():\n    class Local: ...",
    **{f"lens/inputs/m{number}.py": "" for number in range(MAX_MODULES)},
    "lens/inputs/__init__.py": "",
    "lens/inspection.py": "from manyheads.lens.inputs import m1",
    "lens/__init__.py": "from manyheads.lens.inputs.m1 import m",
    "models/__init__.py": "",
    "models/sizes.toml": "",
    "py.typed": "",
}


def build(package: Path, files: dict[str, str]) -> Path:
    for place, text in files.items():
        path = package / place
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    return package


def test_the_package_has_files() -> None:
    assert sources(), f"{PACKAGE} holds no Python file"


@pytest.mark.parametrize("rule", RULES)
def test_the_house_keeps_the_rule(rule: Rule) -> None:
    faults = rule(PACKAGE)
    assert not faults, "\n".join(faults)


@pytest.mark.parametrize(("rule", "files"), FAULTS)
def test_a_planted_fault_is_found(rule: Rule, files: dict[str, str], tmp_path: Path) -> None:
    assert len(rule(build(tmp_path / "manyheads", files))) == 1


@pytest.mark.parametrize("rule", RULES)
def test_a_sound_house_has_no_fault(rule: Rule, tmp_path: Path) -> None:
    assert rule(build(tmp_path / "manyheads", SOUND)) == []
