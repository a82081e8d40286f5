"""Results on disk: one codec for all of them, JSON for people or safetensors for large arrays.

A file holds the kind of the result (the name of its class), its fields as JSON, and its arrays,
each named after its field, such as `means/entropy`. Loading a file executes nothing from it.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

import numpy as np
import torch
from jaxtyping import AbstractArray
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from manyheads.atomic_write import whole
from manyheads.errors import InputError, ManyheadsError
from manyheads.ragged import Lengths, Ragged

Arrays = dict[str, NDArray[Any]]
Facts = dict[str, Any]

# The entry of a safetensors header that describes the result.
ABOUT = "manyheads"
FOREIGN = "pass a file written by the save() of a lens result"


class Result:
    """What the lens returns: a frozen dataclass that can be saved; `lens.load` reads it back."""

    __slots__ = ()

    def save(self, path: Path | str) -> None:
        """Write to .json or .safetensors, by the suffix; a save that fails leaves the old file."""
        path = Path(path)
        suffix = _suffix(path)
        arrays: Arrays = {}
        about = {"kind": type(self).__name__, "fields": _encode_fields(self, "", arrays)}
        if suffix == ".json":
            summary = self._summary()
            about |= {"summary": summary} if summary else {}
            about["arrays"] = {name: _encode_floats(each.tolist()) for name, each in arrays.items()}
            content = json.dumps(about, indent=1, allow_nan=False).encode()
        else:
            content = save(arrays, metadata={ABOUT: json.dumps(about, allow_nan=False)})
        with whole(path) as beside:
            beside.write_bytes(content)

    def _summary(self) -> Facts:
        """Derived values that people look for in a JSON file; they are not read back."""
        return {}


def read_result(path: Path | str, kinds: Mapping[str, type[Result]]) -> Result:
    """Read the result that `Result.save` wrote, as the class that `kinds` has for it."""
    path = Path(path)
    suffix = _suffix(path)
    if not path.is_file():
        raise InputError(f"there is no file {path}", FOREIGN)
    about, arrays = _read_json(path) if suffix == ".json" else _read_safetensors(path)
    kind = about["kind"]
    if kind not in kinds:
        raise InputError(
            f"{path} holds a result of the unknown kind {kind!r}", f"use {', '.join(kinds)}"
        )
    try:
        return _decode_fields(kinds[kind], about["fields"], "", arrays)
    except (ManyheadsError, AttributeError, LookupError, TypeError, ValueError) as error:
        raise InputError(
            f"{path} is damaged: its {kind} cannot be restored ({error})", "save the result again"
        ) from None


def _suffix(path: Path) -> str:
    if path.suffix not in (".json", ".safetensors"):
        raise InputError(
            f"{path} must end in .json or .safetensors, got {path.suffix!r}", "rename it"
        )
    return path.suffix


def _read_json(path: Path) -> tuple[Facts, Arrays]:
    try:
        about = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path} is damaged: not valid JSON ({error})", "save the result again"
        ) from None
    _check_about(path, about, "arrays")
    # `None` becomes NaN here; the type of each array is among the fields.
    return about, {name: np.array(each, dtype=object) for name, each in about["arrays"].items()}


def _read_safetensors(path: Path) -> tuple[Facts, Arrays]:
    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata() or {}
            if ABOUT not in metadata:
                raise InputError(f"{path} holds no lens result", FOREIGN)
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
        about = json.loads(metadata[ABOUT])
    except (SafetensorError, ValueError) as error:
        if isinstance(error, ManyheadsError):
            raise
        raise InputError(f"{path} is damaged ({error})", "save the result again") from None
    _check_about(path, about)
    return about, arrays


def _check_about(path: Path, about: Any, *more: str) -> None:
    if not isinstance(about, dict) or not all(key in about for key in ("kind", "fields", *more)):
        raise InputError(f"{path} holds no lens result", FOREIGN)


def _encode_fields(value: Any, name: str, arrays: Arrays) -> Facts:
    return {
        field.name: _encode(getattr(value, field.name), _join(name, field.name), arrays)
        for field in fields(value)
    }


def _encode(value: Any, name: str, arrays: Arrays) -> Any:
    """The JSON of a value; an array moves to `arrays`, and its type stays in its place."""
    if isinstance(value, Tensor):
        # numpy has no bfloat16.
        plain = value.float() if value.dtype is torch.bfloat16 else value
        arrays[name] = np.ascontiguousarray(plain.detach().cpu().numpy())
        return str(value.dtype).removeprefix("torch.")
    if isinstance(value, np.ndarray):
        arrays[name] = np.ascontiguousarray(value)
        return str(value.dtype)
    if isinstance(value, Ragged):
        lengths = list(value.lengths.each)
        return {"values": _encode(value.values, _join(name, "values"), arrays), "lengths": lengths}
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value):
        return str(value) if _parses(type(value)) else _encode_fields(value, name, arrays)
    if isinstance(value, Mapping):
        if all(isinstance(key, str | int) or _parses(type(key)) for key in value):
            return {
                str(key): _encode(each, _join(name, str(key)), arrays)
                for key, each in value.items()
            }
        return [
            [_encode(key, name, arrays), _encode(each, _join(name, str(place)), arrays)]
            for place, (key, each) in enumerate(value.items())
        ]
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, list | tuple):
        return [_encode(each, _join(name, str(place)), arrays) for place, each in enumerate(value)]
    return _encode_floats(value.item() if isinstance(value, np.generic) else value)


def _decode_fields(kind: type[Any], told: Facts, name: str, arrays: Arrays) -> Any:
    hints = get_type_hints(kind)
    return kind(
        **{
            field.name: _decode(
                hints[field.name], told[field.name], _join(name, field.name), arrays
            )
            for field in fields(kind)
            if field.name in told
        }
    )


def _decode(hint: Any, told: Any, name: str, arrays: Arrays) -> Any:
    """The value that `_encode` made `told` of, by the type that its field declares."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = [each for each in inner if each is not NoneType]
        # Unions of several types hold numbers and words only, which JSON keeps as they are.
        return told if told is None or len(kinds) > 1 else _decode(kinds[0], told, name, arrays)
    if hint is float:
        return math.nan if told is None else float(told)
    if hint is range:
        return range(*told)
    if hint is Ragged:
        values = _decode(Tensor, told["values"], _join(name, "values"), arrays)
        return Ragged(values, Lengths.of(told["lengths"]))
    if origin is tuple or origin is list:
        each = inner[:1] * len(told) if origin is list or inner[1:] == (...,) else inner
        pairs = zip(each, told, strict=True)
        return origin(
            _decode(kind, one, _join(name, str(place)), arrays)
            for place, (kind, one) in enumerate(pairs)
        )
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return _decode_mapping(inner, told, name, arrays)
    if not isinstance(hint, type):
        return told
    if issubclass(hint, Tensor | np.ndarray | AbstractArray):
        return _decode_array(getattr(hint, "array_type", hint), told, arrays[name])
    if issubclass(hint, Enum):
        return hint(told)
    if is_dataclass(hint):
        parse = getattr(hint, "parse", None)
        return parse(told) if parse else _decode_fields(hint, told, name, arrays)
    return told


def _decode_mapping(inner: tuple[Any, ...], told: Any, name: str, arrays: Arrays) -> dict[Any, Any]:
    key_hint, hint = inner
    if isinstance(told, dict):
        read = getattr(key_hint, "parse", int if key_hint is int else str)
        return {
            read(key): _decode(hint, each, _join(name, key), arrays) for key, each in told.items()
        }
    return {
        _decode(key_hint, key, name, arrays): _decode(hint, each, _join(name, str(place)), arrays)
        for place, (key, each) in enumerate(told)
    }


def _decode_array(kind: type, dtype: str, array: NDArray[Any]) -> Any:
    if kind is not Tensor:
        return array.astype(dtype)
    plain = torch.from_numpy(array.astype("float32" if dtype == "bfloat16" else dtype))
    return plain.to(getattr(torch, dtype))


def _encode_floats(value: Any) -> Any:
    """JSON has neither NaN, which becomes null, nor infinities, which become words."""
    if isinstance(value, list):
        return [_encode_floats(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _parses(kind: type) -> bool:
    """Whether a value is written as its own text: the address of a head, of a neuron."""
    return hasattr(kind, "parse")


def _join(name: str, more: str) -> str:
    return f"{name}/{more}" if name else more
