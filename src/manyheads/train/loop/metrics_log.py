"""metrics.jsonl and telemetry.jsonl: one JSON object per line, and TensorBoard."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.atomic_write import whole
from manyheads.errors import MissingExtraError


class MetricsLog:
    """A JSON Lines file with one object per step; lines are complete even if a run is killed."""

    def __init__(self, file: Path, *, enabled: bool = True) -> None:
        self.file = file
        self._enabled = enabled

    def truncate_after(self, step: int) -> None:
        """Remove the lines after a step, before a resumed run writes them again."""
        if not self._enabled or not self.file.exists():
            return
        kept = [line for line in _complete_lines(self.file) if json.loads(line)["step"] <= step]
        with whole(self.file) as fresh:
            fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        if not self._enabled:
            return
        try:
            with self.file.open("a", encoding="utf-8") as file:
                # In one call, so that a killed run leaves no half line.
                file.write(json.dumps(_json_safe(line)) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.file)) from error

    def has_entry(self, step: int, name: str = "step") -> bool:
        """Whether a line of this step has this key."""
        if not self.file.exists():
            return False
        return any(line["step"] == step and name in line for line in self.read())

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _complete_lines(self.file)]


def _complete_lines(file: Path) -> list[str]:
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    return lines


def _json_safe(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _json_safe(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardWriter:
    """Writes the same numbers for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingExtraError(
                "run.tensorboard needs the package tensorboard",
                "pip install 'manyheads[tensorboard]'",
            ) from None
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in _flat(line):
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


def _flat(line: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    found = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            found += _flat(value, f"{before}{name}/")
        else:
            found.append((f"{before}{name}", value))
    return found
