"""The tables of a run file, and single values of them changed at the command line."""

import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from manyheads.dataclass_codec import DataclassCodec
from manyheads.errors import ConfigError

# In a run file a table names its class by `kind`.
RUN_TABLES = DataclassCodec(tag="kind")


def read_toml(file: Path) -> dict[str, Any]:
    """The tables of a TOML file that must exist."""
    try:
        return tomllib.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        raise ConfigError(f"there is no {file}", "name a run file, such as run.toml") from None
    except IsADirectoryError:
        raise ConfigError(f"{file} is a folder", "name a run file, such as run.toml") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML ({error})", "correct that line") from None


def apply_settings(tables: Mapping[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """A copy of the tables with some values replaced, each written as `run.steps=100`.

    >>> apply_settings({"run": {"steps": 5}}, ["run.steps=7", "data.train=a.txt"])
    {'run': {'steps': 7}, 'data': {'train': 'a.txt'}}
    """
    result = _copy(tables)
    for setting in settings:
        path, equals, text = setting.partition("=")
        keys = [key.strip() for key in path.split(".")]
        if not equals or not all(keys):
            raise ConfigError(f"--set {setting} has no value", "write it as run.steps=100")
        _put(result, keys, _parse(text.strip()), setting)
    return result


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(each) for key, each in value.items()}
    return [_copy(each) for each in value] if isinstance(value, list) else value


def _parse(text: str) -> Any:
    """The value that TOML reads; a word without quotes is a string."""
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
            raise ConfigError(f"--set {setting}: {path} is {tables!r}, not a table", f"set {path}")
        if depth == len(keys) - 1:
            tables[step] = value
        else:
            tables = tables[step] if isinstance(tables, list) else tables.setdefault(step, {})
