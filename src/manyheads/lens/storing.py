"""Results on disk: JSON to be read by people, safetensors for large arrays; whole or not at all."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from manyheads.errors import InputError
from manyheads.whole import whole
from manyheads.wording import without_nan

__all__ = ["Arrays", "Facts", "read_result", "write_result"]

Arrays = dict[str, NDArray[Any]]
Facts = dict[str, Any]

ABOUT = "manyheads"


def write_result(path: Path | str, kind: str, arrays: Mapping[str, Any], facts: Facts) -> None:
    """Arrays by name and small facts beside them, as the ending of the path asks."""
    path = Path(path)
    about = {"kind": kind, "facts": facts}
    if _ending(path) == ".json":
        listed = {name: without_nan(np.asarray(array).tolist()) for name, array in arrays.items()}
        written = json.dumps(about | {"arrays": listed}, indent=1, allow_nan=False).encode()
    else:
        dense = {name: np.ascontiguousarray(array) for name, array in arrays.items()}
        written = save(dense, metadata={ABOUT: json.dumps(about, allow_nan=False)})
    with whole(path) as beside:
        beside.write_bytes(written)


def read_result(path: Path | str, kind: str) -> tuple[Arrays, Facts]:
    """What `write_result` wrote; a file of another kind is refused."""
    path = Path(path)
    ending = _ending(path)
    if not path.is_file():
        raise InputError(f"there is no {path}", "name a file that a result was saved to")
    about, arrays = _read_json(path) if ending == ".json" else _read_safetensors(path)
    found = about.get("kind", "something else")
    if found != kind:
        raise InputError(f"{path} holds {found}", f"name a file that holds {kind}")
    return arrays, about["facts"]


def _ending(path: Path) -> str:
    if path.suffix not in (".json", ".safetensors"):
        raise InputError(f"{path} has no known ending", "use .json or .safetensors")
    return path.suffix


def _read_json(path: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        about = json.loads(path.read_text("utf-8"))
    except ValueError as error:
        raise InputError(f"{path} is not JSON ({error})", "save the result again") from None
    if not isinstance(about, dict) or "arrays" not in about:
        raise InputError(f"{path} holds no result", "name a file that a result was saved to")
    arrays = {
        name: np.asarray(_unlisted(values), dtype=np.float64)
        for name, values in about["arrays"].items()
    }
    return about, arrays


def _read_safetensors(path: Path) -> tuple[dict[str, Any], Arrays]:
    try:
        with safe_open(path, framework="np") as opened:
            metadata = opened.metadata() or {}
            arrays = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    except SafetensorError as error:
        raise InputError(f"{path} is damaged ({error})", "save the result again") from None
    if ABOUT not in metadata:
        raise InputError(f"{path} holds no result", "name a file that a result was saved to")
    return json.loads(metadata[ABOUT]), arrays


def _unlisted(values: Any) -> Any:
    if isinstance(values, list):
        return [_unlisted(value) for value in values]
    return math.nan if values is None else values
