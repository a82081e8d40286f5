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
from typing import Any

import numpy as np
import torch
from jaxtyping import AbstractArray
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from torch import Tensor

from manyheads.annotations import Annotation, annotations_of
from manyheads.argument_checks import check_argument
from manyheads.atomic_write import atomic_write
from manyheads.checkpoints.files import parse_json
from manyheads.errors import InputError, ManyheadsError, short_repr
from manyheads.lens.results import html_tables
from manyheads.ragged import Lengths, Ragged
from manyheads.renamed_keys import CLASSES, with_new_keys

Arrays = dict[str, NDArray[Any]]
Metadata = dict[str, Any]

# Those that an array of a result can have.
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64"),
    *("bfloat16", "float16", "float32", "float64"),
)
# The entry of a safetensors header that describes the result.
HEADER_KEY = "manyheads"
REMEDY = "pass a file written by the save() of a lens result"
AGAIN = "save the result again"
# What values that do not fit raise, those of torch included.
CONTRADICTIONS = (
    *(ArithmeticError, AttributeError, LookupError, ManyheadsError),
    *(RuntimeError, TypeError, ValueError),
)


class Result:
    """The base of all results: a frozen dataclass that can be saved; `lens.load` reads it back."""

    __slots__ = ()

    def save(self, path: Path | str) -> None:
        """Write to .json or .safetensors, by the suffix; a save that fails leaves the old file."""
        path = Path(path)
        if _suffix(path) == ".json":
            content = json.dumps(self.to_json(), indent=1, allow_nan=False).encode()
        else:
            arrays: Arrays = {}
            about = {"kind": type(self).__name__, "fields": _encode_fields(self, "", arrays)}
            content = save(arrays, metadata={HEADER_KEY: json.dumps(about, allow_nan=False)})
        with atomic_write(path) as beside:
            beside.write_bytes(content)

    def to_json(self) -> Metadata:
        """All of it in values that JSON can hold, as `save` writes them to .json."""
        arrays: Arrays = {}
        about = {"kind": type(self).__name__, "fields": _encode_fields(self, "", arrays)}
        summary = self._summary()
        about |= {"summary": summary} if summary else {}
        return about | {"arrays": {name: _encode_floats(arrays[name].tolist()) for name in arrays}}

    def show(self) -> None:
        """Display the result in a notebook, or print it."""
        html_tables.display(self)

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        return html_tables.html_text(str(self))

    def _summary(self) -> Metadata:
        """Derived values that people look for in a JSON file; they are not read back."""
        return {}


def read_result(path: Path | str, kinds: Mapping[str, type[Result]]) -> Result:
    """Read the result that `Result.save` wrote, as the class that `kinds` has for it."""
    path = Path(path)
    suffix = _suffix(path)
    if not path.is_file():
        raise InputError(f"{path} does not exist", REMEDY)
    about, arrays = _read(path, as_json=suffix == ".json")
    kind = str(about["kind"])
    kind = CLASSES.get(kind, kind)
    if kind not in kinds:
        raise InputError(
            f"{path} holds a result of the unknown type {short_repr(kind)}",
            f"use {', '.join(kinds)}",
        )
    try:
        result: Result = _decode_fields(kinds[kind], about["fields"], "", arrays)
        # Values that contradict each other are noticed where a result is shown.
        str(result)
        return result
    except CONTRADICTIONS as error:
        why = " ".join(str(error).split())[:300]
        raise InputError(
            f"{path} is damaged: its {kind} cannot be restored ({why})", AGAIN
        ) from None


def _suffix(path: Path) -> str:
    if path.suffix not in (".json", ".safetensors"):
        raise InputError(
            f"{path} must end in .json or .safetensors, got {path.suffix!r}", "rename it"
        )
    return path.suffix


def _read(path: Path, *, as_json: bool) -> tuple[Metadata, Arrays]:
    where = f"{path} is damaged: it"
    try:
        if as_json:
            about = parse_json(path.read_bytes(), where, remedy=AGAIN)
        else:
            with safe_open(path, framework="np") as opened:
                header = (opened.metadata() or {}).get(HEADER_KEY, "null")
                about = parse_json(header.encode(), where, remedy=AGAIN)
                arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except (SafetensorError, TypeError) as error:
        # NumPy has no type for some tensors.
        raise InputError(f"{path} is damaged ({error})", AGAIN) from None
    tables = ("fields", "arrays") if as_json else ("fields",)
    described = isinstance(about, dict) and "kind" in about
    if not described or not all(isinstance(about.get(table), dict) for table in tables):
        raise InputError(f"{path} holds no lens result", REMEDY)
    if as_json:
        # `None` becomes NaN later; the dtype of each array is among the fields.
        arrays = {name: np.array(values, dtype=object) for name, values in about["arrays"].items()}
    return about, arrays


def _encode_fields(value: Any, name: str, arrays: Arrays) -> Metadata:
    return {
        field.name: _encode(getattr(value, field.name), _join(name, field.name), arrays)
        for field in fields(value)
    }


def _encode(value: Any, name: str, arrays: Arrays) -> Any:
    """The JSON of a value; arrays move to `arrays` and leave their dtype."""
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
                str(key): _encode(item, _join(name, str(key)), arrays)
                for key, item in value.items()
            }
        return [
            [_encode(key, name, arrays), _encode(item, _join(name, str(index)), arrays)]
            for index, (key, item) in enumerate(value.items())
        ]
    if isinstance(value, range):
        return [value.start, value.stop, value.step]
    if isinstance(value, list | tuple):
        return [_encode(item, _join(name, str(index)), arrays) for index, item in enumerate(value)]
    return _encode_floats(value.item() if isinstance(value, np.generic) else value)


def _decode_fields(kind: Any, encoded: Metadata, name: str, arrays: Arrays) -> Any:
    annotations = annotations_of(kind)
    encoded = with_new_keys(encoded, annotations)
    return kind(
        **{
            field.name: _decode(
                annotations[field.name], encoded[field.name], _join(name, field.name), arrays
            )
            for field in fields(kind)
            if field.name in encoded
        }
    )


def _decode(annotation: Annotation, encoded: Any, name: str, arrays: Arrays) -> Any:
    """Invert `_encode`, by the type that the field declares."""
    hint, items = annotation.hint, annotation.items
    match annotation.form:
        case "union":
            members = [member for member in items if member.form != "none"]
            if encoded is not None and len(members) == 1:
                return _decode(members[0], encoded, name, arrays)
            # Unions of several types hold only numbers and strings, which JSON preserves.
            check_argument(name, encoded, hint)
        case "literal":
            check_argument(name, encoded, hint)
        case "sequence" | "tuple":
            items = items * len(encoded) if annotation.form == "sequence" else items
            return annotation.kind(
                _decode(item, value, _join(name, str(index)), arrays)
                for index, (item, value) in enumerate(zip(items, encoded, strict=True))
            )
        case "mapping":
            return _decode_mapping(items, encoded, name, arrays)
        case "class":
            return _decode_class(hint, encoded, name, arrays)
    return encoded


def _decode_class(kind: type[Any], encoded: Any, name: str, arrays: Arrays) -> Any:
    if kind is float:
        return math.nan if encoded is None else float(encoded)
    if kind is range:
        return range(*encoded)
    if kind is Ragged:
        values = _decode_array(Tensor, encoded["values"], arrays[_join(name, "values")])
        if sum(encoded["lengths"]) != len(values):
            raise ValueError(f"{name} has {len(values)} values for other lengths")
        return Ragged(values, Lengths.of(encoded["lengths"]))
    if issubclass(kind, Tensor | np.ndarray | AbstractArray):
        array = _decode_array(getattr(kind, "array_type", kind), encoded, arrays[name])
        letters = getattr(kind, "dim_str", "...").split()
        if "..." not in letters and len(letters) != array.ndim:
            raise ValueError(f"{name} has shape {tuple(array.shape)}")
        return array
    if issubclass(kind, Enum):
        return kind(encoded)
    if is_dataclass(kind):
        parse = getattr(kind, "parse", None)
        return parse(encoded) if parse else _decode_fields(kind, encoded, name, arrays)
    check_argument(name, encoded, kind)
    return encoded


def _decode_mapping(
    items: tuple[Annotation, ...], encoded: Any, name: str, arrays: Arrays
) -> dict[Any, Any]:
    keys, values = items
    if isinstance(encoded, dict):
        read = getattr(keys.hint, "parse", int if keys.hint is int else str)
        return {
            read(key): _decode(values, value, _join(name, key), arrays)
            for key, value in encoded.items()
        }
    return {
        _decode(keys, key, name, arrays): _decode(values, value, _join(name, str(index)), arrays)
        for index, (key, value) in enumerate(encoded)
    }


def _decode_array(kind: type, dtype: Any, array: NDArray[Any]) -> Any:
    if dtype not in DTYPES:
        raise ValueError(f"{short_repr(dtype)} is not a dtype")
    if kind is not Tensor:
        return array.astype(dtype)
    plain = torch.from_numpy(array.astype("float32" if dtype == "bfloat16" else dtype))
    return plain.to(getattr(torch, dtype))


def _encode_floats(value: Any) -> Any:
    """JSON has no NaN, which becomes null, and no infinities, which become strings."""
    if isinstance(value, list):
        return [_encode_floats(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else str(value)
    return value


def _parses(kind: type) -> bool:
    """Whether a value is saved as its text, such as the address of a head."""
    return hasattr(kind, "parse")


def _join(name: str, more: str) -> str:
    return f"{name}/{more}" if name else more
