"""The house of the design as data, and the imports of a source tree read without running it."""

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "src" / "manyheads"

FLOORS = {
    "annotations.py": 0,
    "argument_checks.py": 0,
    "atomic_write.py": 0,
    "dataclass_codec.py": 0,
    "devices.py": 0,
    "errors.py": 0,
    "formatting.py": 0,
    "progress.py": 0,
    "ragged.py": 0,
    "renamed_keys.py": 0,
    "taps.py": 0,
    "tokenizers.py": 0,
    "parts/": 1,
    "kernels/": 2,
    "cache.py": 2,
    "attention.py": 3,
    "mixers/": 3,
    "models/": 4,
    "bridge/": 5,
    "quantization/": 5,
    "checkpoints/": 6,
    # Weights of small models; no code.
    "bundled/": 6,
    "decoding/": 7,
    "encoding/": 6,
    "data/": 6,
    "train/": 8,
    "lens/": 8,
    "surgery/": 9,
    "tasks/": 9,
    "pictures/": 10,
    "console.py": 9,
    "explain/": 11,
    "report/": 12,
    "studio/": 12,
    "cli/": 13,
    "__main__.py": 14,
    "__init__.py": 14,
    "__init__.pyi": 14,
}


# The floors inside lens, from what every result is made of to the report of everything.
FLOORS_OF_LENS = {
    "results/": 0,
    "inputs/": 1,
    "measure/": 2,
    "causal/": 2,
    "attention_maps/": 3,
    "probing/": 3,
    "weights/": 3,
    "redundant/": 4,
    "attribution/": 5,
    "faithful/": 6,
    "head_kinds/": 6,
    "circuit_discovery/": 7,
    "diff/": 7,
    "inspection.py": 7,
    "task_heads/": 7,
    "corpus/": 8,
    "result_types.py": 9,
    "__init__.py": 10,
}

CORE = {room for room, floor in FLOORS.items() if floor <= 4} | {"lens/", "train/", "__init__.py"}

# Where a node of a syntax tree keeps the statements inside it.
BLOCKS = ("body", "handlers", "orelse", "finalbody", "cases")


@dataclass(frozen=True, slots=True, kw_only=True)
class Import:
    """One name that a file imports: `module` as written, and `name` where it says `from`."""

    module: str
    name: str | None
    line: int
    type_checking: bool
    inside_function: bool


@dataclass(frozen=True, slots=True)
class Source:
    """One Python file of the package that lies in the folder `package`."""

    path: Path
    package: Path

    @property
    def place(self) -> str:
        """The path below the package, as in `parts/masks/rules.py`."""
        return self.path.relative_to(self.package).as_posix()

    @property
    def module(self) -> str:
        """The dotted name, as in `manyheads.parts.masks`."""
        parts = self.path.relative_to(self.package.parent).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    @property
    def text(self) -> str:
        return read(self.path)

    @property
    def tree(self) -> ast.Module:
        return parse(self.path)

    @property
    def needs_triton(self) -> bool:
        """It is nothing but kernels for CUDA: whole files of them say so by this very import."""
        return any(imported.module == "triton" for imported in self.imports())

    def imports(self) -> tuple[Import, ...]:
        return imports_of(self)

    def classes(self) -> set[str]:
        """The classes that an import of this file can reach; those inside a function are not."""
        return set(_classes(self.tree))

    def public_names(self) -> set[str]:
        """What `__all__` lists, here or in a stub, and what `from ... import` binds at the top."""
        names = {
            imported.name
            for imported in self.imports()
            if imported.name and not (imported.inside_function or imported.type_checking)
        }
        stub = self.path.with_suffix(".pyi")
        for node in [*self.tree.body, *(parse(stub).body if stub.is_file() else ())]:
            if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
                names |= _strings(node.value)
        return names

    def _walk(self, node: ast.AST, checking: bool, inside: bool) -> Iterator[Import]:
        if isinstance(node, ast.Import | ast.ImportFrom):
            module = self._absolute(node) if isinstance(node, ast.ImportFrom) else None
            for alias in node.names:
                yield Import(
                    module=module or alias.name,
                    name=alias.name if module else None,
                    line=node.lineno,
                    type_checking=checking,
                    inside_function=inside,
                )
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for statement in node.body:
                yield from self._walk(statement, True, inside)
            for statement in node.orelse:
                yield from self._walk(statement, checking, inside)
        else:
            inside = inside or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            # Statements alone hold statements, so that no expression is looked into.
            for block in BLOCKS:
                for child in getattr(node, block, ()):
                    yield from self._walk(child, checking, inside)

    def _absolute(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        package = self.module.split(".")
        if self.path.name == "__init__.py":
            package.append("__init__")
        above = package[: -node.level]
        return ".".join([*above, node.module] if node.module else above)


# A file is read and parsed once per process, however many rules look at it: no test changes a file
# that a rule has seen.
@cache
def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@cache
def parse(path: Path) -> ast.Module:
    return ast.parse(read(path), filename=str(path))


@cache
def imports_of(source: Source) -> tuple[Import, ...]:
    return tuple(source._walk(source.tree, False, False))


def _strings(node: ast.AST) -> set[str]:
    constants = [each.value for each in ast.walk(node) if isinstance(each, ast.Constant)]
    return {value for value in constants if isinstance(value, str)}


def _classes(node: ast.AST) -> Iterator[str]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield child.name
        elif isinstance(child, ast.If | ast.Try | ast.With):
            yield from _classes(child)


@cache
def sources(package: Path = PACKAGE) -> dict[str, Source]:
    """Every Python file of the package, by dotted name."""
    result = [Source(path, package) for path in sorted(package.rglob("*.py"))]
    return {source.module: source for source in result}


def target(imported: Import, known: dict[str, Source]) -> Source | None:
    """The file of ours that an import reaches; None where it reaches another package."""
    if imported.name and f"{imported.module}.{imported.name}" in known:
        return known[f"{imported.module}.{imported.name}"]
    return known.get(imported.module)


def room(place: str, floors: dict[str, int] = FLOORS) -> str | None:
    """The entry of the floors that a path below the package, or a folder of it, belongs to."""
    top, slash, _ = place.partition("/")
    return top + slash if top + slash in floors else None


def room_of_lens(place: str) -> str | None:
    """The entry of FLOORS_OF_LENS that a path below the package belongs to, if any."""
    return room(place.removeprefix("lens/"), FLOORS_OF_LENS) if place.startswith("lens/") else None
