"""Tables of a TOML file to frozen dataclasses; what does not fit is named by its key path."""

import tomllib
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, Field, fields, is_dataclass
from difflib import get_close_matches
from inspect import Parameter, signature
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from manyheads.errors import ConfigError, ManyheadsError

KIND = "kind"
NOT_GIVEN = object()
NOTHING: Mapping[str, Any] = types.MappingProxyType({})


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file that must be there."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}", "name a run file, such as run.toml") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder", "name a run file, such as run.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is no TOML ({error})", "mend that line") from None


def changed(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Tables with some values replaced, each given as `run.steps=100`.

    >>> changed({"run": {"steps": 5}}, ["run.steps=7", "data.train=a.txt"])
    {'run': {'steps': 7}, 'data': {'train': 'a.txt'}}
    """
    result = _copied(tables)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {setting} changes nothing", "write it as run.steps=100")
        _put(result, keys, _parsed(text.strip()), setting)
    return result


def _copied(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copied(each) for key, each in value.items()}
    return [_copied(each) for each in value] if isinstance(value, list) else value


def _parsed(text: str) -> Any:
    """What TOML makes of it; a word that it cannot read is a word."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _put(tables: Any, keys: list[str], value: Any, setting: str) -> None:
    for depth, key in enumerate(keys):
        if isinstance(tables, list):
            if not key.isdigit() or int(key) >= len(tables):
                path = ".".join(keys[:depth])
                raise ConfigError(
                    f"--set {setting}: {path} is a list of {len(tables)}",
                    f"count from {path}.0",
                )
            step: Any = int(key)
        elif isinstance(tables, dict):
            step = key
        else:
            path = ".".join(keys[:depth])
            raise ConfigError(f"--set {setting}: {path} is {tables!r}, no table", f"set {path}")
        if depth == len(keys) - 1:
            tables[step] = value
        else:
            tables = tables[step] if isinstance(tables, list) else tables.setdefault(step, {})


def read_table(
    kind: type, table: object, where: str = "", given: Mapping[str, Any] = NOTHING
) -> Any:
    """The dataclass `kind` with the values of a table, and some that are `given` as they are."""
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} is {table!r}", f"write it as a table, [{where}]")
    hints = get_type_hints(kind)
    defaults = {field.name: _default(field) for field in fields(kind) if field.init}
    _check_known(defaults, table, where)
    for name, default in defaults.items():
        if name in {*table, *given} or default is not NOT_GIVEN:
            continue
        if not _is_table(hints[name]):
            raise ConfigError(f"{where or 'the file'} lacks {name}", f"add {_join(where, name)}")
        # An empty one says what it lacks.
        table = {**table, name: {}}
    read = _read_values(hints, defaults, table, where)
    try:
        return kind(**read, **given)
    except ManyheadsError as error:
        place = f"{where}: " if where else ""
        raise ConfigError(f"{place}{error.problem}", error.remedy) from None


def read_arguments(function: Callable[..., Any], table: Mapping[str, Any], where: str) -> Any:
    """Those arguments of a function that a table gives, read as the function declares them."""
    defaults = {
        name: NOT_GIVEN if parameter.default is Parameter.empty else parameter.default
        for name, parameter in signature(function).parameters.items()
    }
    return _read_values(get_type_hints(function), defaults, table, where)


def _read_values(
    hints: Mapping[str, Any], defaults: Mapping[str, Any], table: Mapping[str, Any], where: str
) -> dict[str, Any]:
    _check_known(defaults, table, where)
    return {
        name: _read(hints[name], table[name], _join(where, name), default)
        for name, default in defaults.items()
        if name in table
    }


def _check_known(known: Iterable[str], table: Mapping[str, Any], where: str) -> None:
    for key in table:
        if key not in known:
            raise unknown(_join(where, key), [_join(where, name) for name in known])


def _is_table(kind: Any) -> bool:
    """Whether it is written as a table and no other way."""
    kinds = get_args(kind) if get_origin(kind) in (Union, types.UnionType) else (kind,)
    return all(is_dataclass(each) for each in kinds)


def _default(field: "Field[Any]") -> Any:
    if field.default is not MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not MISSING else NOT_GIVEN


def _read(kind: Any, value: object, where: str, default: object) -> Any:
    origin, inner = get_origin(kind), get_args(kind)
    if kind is Any or kind is object:
        return value
    if origin is Literal:
        if not any(value == each and type(value) is type(each) for each in inner):
            raise ConfigError(f"{where} is {value!r}", f"use {_listed(map(repr, inner))}")
        return value
    if origin in (Union, types.UnionType):
        return _read_union(inner, value, where, default)
    if origin is tuple:
        return _read_tuple(inner, value, where)
    if origin is not None and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where} is {value!r}", f"write it as a table, [{where}]")
        return {
            key: _read(inner[1], each, _join(where, key), NOT_GIVEN) for key, each in value.items()
        }
    if is_dataclass(kind):
        assert isinstance(kind, type)
        return _read_tagged((kind,), value, where, default)
    return _read_plain(kind, value, where)


def _read_union(kinds: tuple[Any, ...], value: object, where: str, default: object) -> Any:
    """The only dataclass that a table can be, or the first plain type that takes the value."""
    tables = tuple(kind for kind in kinds if is_dataclass(kind))
    if tables and isinstance(value, Mapping):
        return _read_tagged(tables, value, where, default)
    plain = [kind for kind in kinds if not is_dataclass(kind) and kind is not types.NoneType]
    refusals = []
    for kind in plain:
        try:
            return _read(kind, value, where, default)
        except ConfigError as error:
            refusals.append(error)
    if len(refusals) == 1:
        raise refusals[0]
    remedies = [refusal.remedy.removeprefix("give ").removeprefix("use ") for refusal in refusals]
    if not plain:
        raise ConfigError(f"{where} is {value!r}", f"write it as a table, [{where}]")
    raise ConfigError(f"{where} is {value!r}", f"give {_listed(remedies)}")


def _read_tagged(kinds: tuple[Any, ...], value: object, where: str, default: object) -> Any:
    """A table names its type by `kind`; left out, it is the default's, or the only one."""
    if not isinstance(value, Mapping):
        raise ConfigError(f"{where} is {value!r}", f"write it as a table, [{where}]")
    names = {_plain_name(kind.__name__): kind for kind in kinds}
    listed = _listed(repr(kind.__name__) for kind in kinds)
    tag = value.get(KIND, NOT_GIVEN)
    rest = {key: each for key, each in value.items() if key != KIND}
    if tag is NOT_GIVEN:
        if type(default) in kinds:
            return read_table(type(default), rest, where)
        if len(kinds) == 1:
            return read_table(kinds[0], rest, where)
        raise ConfigError(f"{where} lacks {KIND}", f"add {where}.{KIND}, one of {listed}")
    if not isinstance(tag, str) or _plain_name(tag) not in names:
        raise ConfigError(f"{where}.{KIND} is {tag!r}", f"use {listed}")
    return read_table(names[_plain_name(tag)], rest, where)


def _read_tuple(inner: tuple[Any, ...], value: object, where: str) -> Any:
    many = len(inner) == 2 and inner[1] is Ellipsis
    # One value stands for a list of one where a list may have any length.
    if many and not isinstance(value, list):
        value = [value]
    if not isinstance(value, list) or (not many and len(value) != len(inner)):
        raise ConfigError(f"{where} is {value!r}", f"give a list of {len(inner)}")
    kinds = [inner[0]] * len(value) if many else inner
    return tuple(
        _read(kind, each, f"{where}.{index}" if len(value) > 1 else where, NOT_GIVEN)
        for index, (kind, each) in enumerate(zip(kinds, value, strict=True))
    )


PLAIN = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a text in quotes",
    Path: "a path in quotes",
}


def _read_plain(kind: Any, value: object, where: str) -> Any:
    assert kind in PLAIN, f"{where}: run files cannot say {kind}"
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if kind is float and number:
        return float(value)  # type: ignore[arg-type]
    if kind is Path and isinstance(value, str):
        return Path(value)
    if type(value) is not kind:
        raise ConfigError(f"{where} is {value!r}", f"give {PLAIN[kind]}")
    return value


def unknown(path: str, known: Sequence[str]) -> ConfigError:
    """A key that means nothing, with the nearest that does."""
    last = {name.rpartition(".")[2]: name for name in known}
    near = get_close_matches(path.rpartition(".")[2], list(last), n=1, cutoff=0.5)
    remedy = f"write {last[near[0]]}" if near else f"use {_listed(sorted(known))}"
    return ConfigError(f"{path} is unknown", remedy)


def _plain_name(name: str) -> str:
    return name.replace("-", "").replace("_", "").lower()


def _join(where: str, name: object) -> str:
    return f"{where}.{name}" if where else str(name)


def _listed(names: Any) -> str:
    *head, last = names
    return f"{', '.join(head)} or {last}" if head else str(last)
