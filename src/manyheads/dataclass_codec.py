"""Frozen dataclasses from plain data (the tables of a TOML or JSON file) and back.

Whatever does not fit is reported by its key path.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, dataclass, fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, isabstract, signature
from pathlib import Path
from types import MappingProxyType
from typing import Any, get_origin

from manyheads.annotations import Annotation, annotations_of, read_annotation
from manyheads.errors import LONGEST_REPR, ConfigError, ManyheadsError, short_repr
from manyheads.formatting import alternatives
from manyheads.renamed_keys import CLASSES, with_new_keys

REQUIRED = object()
NOTHING: Mapping[str, Any] = MappingProxyType({})
SCALARS = {
    bool: "true or false",
    int: "an integer",
    float: "a number",
    str: "a string",
    Path: "a path in quotes",
}


@dataclass(frozen=True, slots=True)
class DataclassCodec:
    """How the dataclasses of one kind of file are written.

    The key `tag` of a table names its class. It can be left out where the field's default or its
    annotation leaves one class. `classes` are those that may stand for an abstract annotation.
    """

    tag: str
    classes: tuple[type, ...] = ()

    def encode(self, value: object) -> Any:
        """A dataclass as dictionaries, lists, strings and numbers; every table has its tag.

        >>> @dataclass(frozen=True)
        ... class Window:
        ...     before: int
        ...     after: int = 0
        >>> DataclassCodec("type", (Window,)).encode((Window(3), "wide"))
        [{'type': 'Window', 'before': 3, 'after': 0}, 'wide']
        """
        if is_dataclass(value):
            assert type(value) in self.classes, f"{type(value)} is not a class of this file"
            values = {field.name: self.encode(getattr(value, field.name)) for field in _init(value)}
            return {self.tag: type(value).__name__, **values}
        if isinstance(value, tuple):
            return [self.encode(item) for item in value]
        return value

    def decode(self, kind: Any, value: object, path: str, default: object = REQUIRED) -> Any:
        """The value of a field annotated as `kind`; `path` is where it is in the file.

        >>> DataclassCodec("type").decode(tuple[int, ...] | str, [1, 2], "run.layers")
        (1, 2)
        """
        return self._decode(read_annotation(kind), value, path, default)

    def _decode(
        self, annotation: Annotation, value: object, path: str, default: object = REQUIRED
    ) -> Any:
        match annotation.form:
            case "any":
                return value
            case "literal":
                if not annotation.is_choice(value):
                    choices = alternatives([*map(repr, annotation.values)])
                    raise ConfigError(f"{path} is {short_repr(value)}", f"use {choices}")
                return value
            case "union":
                return self._decode_union(annotation, value, path, default)
            case "sequence" | "tuple":
                return self._decode_tuple(annotation, value, path)
            case "mapping":
                return {
                    key: self._decode(annotation.items[1], item, _join(path, key))
                    for key, item in _table(value, path).items()
                }
        if candidates := self._candidates(annotation):
            return self._decode_tagged(candidates, value, path, default)
        return _decode_scalar(annotation.hint, value, path)

    def decode_table(
        self, kind: Any, table: object, path: str = "", known: Mapping[str, Any] = NOTHING
    ) -> Any:
        """The dataclass `kind` with the values of a table, and the `known` ones as they are."""
        cls, annotations = get_origin(kind) or kind, annotations_of(kind)
        defaults = {field.name: _default(field) for field in _init(cls)}
        values = with_new_keys(_table(table, path), defaults)
        _check_keys(defaults, values, path)
        for name, default in defaults.items():
            if name in values or name in known or default is not REQUIRED:
                continue
            if not all(map(self._candidates, annotations[name].members)):
                raise ConfigError(f"{_join(path, name)} is missing", "add it")
            # Decoded as an empty table, it reports which of its own keys are missing.
            values[name] = {}
        decoded = self._decode_values(annotations, defaults, values, path)
        try:
            return cls(**decoded, **known)
        except ManyheadsError as error:
            prefix = f"{path}: " if path else ""
            raise ConfigError(f"{prefix}{error.problem}", error.remedy) from None

    def decode_arguments(
        self, function: Callable[..., Any], table: Mapping[str, Any], path: str
    ) -> dict[str, Any]:
        """Keyword arguments of a function, decoded as its signature declares them."""
        defaults = {
            name: REQUIRED if parameter.default is Parameter.empty else parameter.default
            for name, parameter in signature(function).parameters.items()
        }
        _check_keys(defaults, table, path)
        return self._decode_values(annotations_of(function), defaults, table, path)

    def _decode_values(
        self,
        annotations: Mapping[str, Annotation],
        defaults: Mapping[str, Any],
        table: Mapping[str, Any],
        path: str,
    ) -> dict[str, Any]:
        return {
            name: self._decode(annotations[name], table[name], _join(path, name), default)
            for name, default in defaults.items()
            if name in table
        }

    def _candidates(self, annotation: Annotation) -> tuple[Any, ...]:
        """The classes that an annotated table can be; none where the annotation is no table."""
        if not is_dataclass(annotation.kind):
            return ()
        kind: Any = annotation.kind
        if isabstract(kind):
            return tuple(cls for cls in self.classes if issubclass(cls, kind))
        return (annotation.hint,)

    def _decode_union(
        self, annotation: Annotation, value: object, path: str, default: object
    ) -> Any:
        """A table is one of the dataclasses, anything else the first type that accepts it."""
        tables = tuple(cls for member in annotation.items for cls in self._candidates(member))
        if tables and isinstance(value, Mapping):
            return self._decode_tagged(tables, value, path, default)
        if value is None and any(member.form == "none" for member in annotation.items):
            return None
        refusals = []
        for member in annotation.items:
            if member.form == "none" or self._candidates(member):
                continue
            try:
                return self._decode(member, value, path, default)
            except ConfigError as error:
                refusals.append(error)
        if not refusals:
            _table(value, path)
        remedies = [refusal.remedy.removeprefix("use ") for refusal in refusals]
        raise ConfigError(f"{path} is {short_repr(value)}", f"use {alternatives(remedies)}")

    def _decode_tagged(
        self, candidates: tuple[Any, ...], value: object, path: str, default: object
    ) -> Any:
        """A table of the class that its tag names, else of the default's, else of the only one."""
        values = dict(_table(value, path))
        tag = values.pop(self.tag, REQUIRED)
        if isinstance(tag, str):
            tag = next((new for old, new in CLASSES.items() if _folded(old) == _folded(tag)), tag)
            chosen = [kind for kind in candidates if _folded(_name(kind)) == _folded(tag)]
        elif tag is REQUIRED:
            chosen = [kind for kind in candidates if (get_origin(kind) or kind) is type(default)]
            chosen = chosen or list(candidates if len(candidates) == 1 else ())
        else:
            chosen = []
        if not chosen:
            problem = "is missing" if tag is REQUIRED else f"is {short_repr(tag)}"
            names = alternatives([repr(_name(kind)) for kind in candidates])
            raise ConfigError(f"{_join(path, self.tag)} {problem}", f"use {names}")
        return self.decode_table(chosen[0], values, path)

    def _decode_tuple(self, annotation: Annotation, value: object, path: str) -> tuple[Any, ...]:
        items = annotation.items
        any_length = annotation.form == "sequence"
        # One value stands for a list of one where a list may have any length.
        if any_length and not isinstance(value, list):
            return (self._decode(items[0], value, path),)
        if not isinstance(value, list) or (not any_length and len(value) != len(items)):
            raise ConfigError(
                f"{path} is {short_repr(value)}", f"use a list of {len(items)} values"
            )
        return tuple(
            self._decode(items[0 if any_length else index], item, f"{path}.{index}")
            for index, item in enumerate(value)
        )


def unknown_key(path: str, keys: Sequence[str]) -> ConfigError:
    """The error for a key that means nothing here, with the nearest key that does.

    >>> print(unknown_key("run.stesp", ["run.steps", "run.seed"]))
    run.stesp is not a known key: use run.steps.
    """
    last = {name.rpartition(".")[2]: name for name in keys}
    near = get_close_matches(path.rpartition(".")[2], list(last), n=1, cutoff=0.5)
    choices = [last[near[0]]] if near else sorted(keys)
    remedy = f"use {alternatives(choices)}" if choices else "remove it"
    path = path if len(path) <= LONGEST_REPR else f"{path[: LONGEST_REPR - 1]}…"
    return ConfigError(f"{path} is not a known key", remedy)


def _check_keys(keys: Iterable[str], table: Mapping[str, Any], path: str) -> None:
    for key in table:
        if key not in keys:
            raise unknown_key(_join(path, key), [_join(path, name) for name in keys])


def _table(value: object, path: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"{path} is {short_repr(value)}", "use a table with keys and values")
    return value


def _decode_scalar(kind: Any, value: object, path: str) -> Any:
    assert kind in SCALARS, f"{path}: a file cannot hold a {kind}"
    if kind is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise ConfigError(f"{path} is {short_repr(value)}", f"use {SCALARS[kind]}")
    return value


def _init(kind: Any) -> "list[Field[Any]]":
    return [field for field in fields(kind) if field.init]


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else REQUIRED


def _name(kind: Any) -> str:
    name: str = (get_origin(kind) or kind).__name__
    return name


def _folded(name: str) -> str:
    """Class names are compared without case, dashes and underscores: masked-lm is MaskedLM."""
    return name.replace("-", "").replace("_", "").lower()


def _join(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)
