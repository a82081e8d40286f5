"""Lines of JSON that grow with a run, and go back with it when it starts again earlier."""

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from manyheads.errors import MissingExtraError
from manyheads.whole import whole


class Journal:
    """One JSON object a line, each with its step; whole lines only, whatever kills the run."""

    def __init__(self, file: Path, *, writes: bool = True) -> None:
        self.file = file
        self._writes = writes

    def back_to(self, step: int) -> None:
        """Forget the lines after a step: they are about to be written again."""
        if not self._writes or not self.file.exists():
            return
        kept = [line for line in _whole_lines(self.file) if json.loads(line)["step"] <= step]
        with whole(self.file) as fresh:
            fresh.write_text("".join(f"{line}\n" for line in kept), encoding="utf-8")

    def write(self, line: Mapping[str, Any]) -> None:
        if not self._writes:
            return
        try:
            with self.file.open("a", encoding="utf-8") as file:
                # In one call, and where the system keeps it: a killed run loses none.
                file.write(json.dumps(_sayable(line)) + "\n")
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.file)) from error

    def tells(self, step: int, name: str = "step") -> bool:
        """Whether a line of this step has this entry."""
        if not self.file.exists():
            return False
        return any(line["step"] == step and name in line for line in self.read())

    def read(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in _whole_lines(self.file)]


def _whole_lines(file: Path) -> list[str]:
    *lines, _ = file.read_text(encoding="utf-8").split("\n")
    return lines


def _sayable(value: Any) -> Any:
    """JSON has no name for what is no number."""
    if isinstance(value, Mapping):
        return {key: _sayable(each) for key, each in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class Board:
    """The same numbers for TensorBoard, where it is asked for."""

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
