"""What a run reports: metrics.jsonl, TensorBoard, the progress line, advice on slow settings."""

import json
import math
import os
import shutil
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from manyheads.atomic_write import atomic_write
from manyheads.attention import Attention
from manyheads.checkpoints.deferred.sharded_load import model_layers
from manyheads.errors import InputError, MissingPackageError
from manyheads.models.build import Model
from manyheads.parts.experts import Experts
from manyheads.progress import duration
from manyheads.train.distributed import ProcessGroup
from manyheads.train.loop.checkpoint import RunFolder


class MetricsLog:
    """A JSON Lines file with one object per step; lines are complete even if a run is killed."""

    def __init__(self, file: Path, *, enabled: bool = True) -> None:
        self.file = file
        self._enabled = enabled

    def truncate_after(self, step: int) -> str:
        """Remove the lines after a step, before a resumed run writes them again.

        Damaged lines are removed too; the returned warning says which.
        """
        if not self._enabled or not self.file.exists():
            return ""
        entries = self._entries()
        damaged = [str(number) for number, (_, entry) in enumerate(entries, 1) if entry is None]
        aside = self.file.with_name(f"{self.file.name}.damaged")
        if damaged:
            shutil.copy2(self.file, aside)
        lines = [line for line, entry in entries if entry is not None and entry["step"] <= step]
        with atomic_write(self.file) as fresh:
            fresh.write_bytes(b"".join(line + b"\n" for line in lines))
        if not damaged:
            return ""
        which = f"line {damaged[0]} is" if len(damaged) == 1 else f"lines {', '.join(damaged)} are"
        return f"{self.file}: {which} damaged and left out; the file as it was is {aside.name}"

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
        entries = (entry for _, entry in self._entries() if entry is not None)
        return any(entry["step"] == step and name in entry for entry in entries)

    def read(self) -> list[dict[str, Any]]:
        """All lines; an error if one of them is damaged."""
        result = []
        for number, (_, entry) in enumerate(self._entries(), 1):
            if entry is None:
                raise InputError(f"{self.file}, line {number} is damaged", "remove that line")
            result.append(entry)
        return result

    def _entries(self) -> list[tuple[bytes, dict[str, Any] | None]]:
        """Every complete line, with its object or None if it is damaged."""
        *lines, _ = self.file.read_bytes().split(b"\n")
        return [(line, _entry(line)) for line in lines]


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line.decode())
    except (ValueError, RecursionError):
        return None
    is_entry = isinstance(entry, dict) and type(entry.get("step")) is int
    return entry if is_entry else None


def _json_safe(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    if isinstance(value, Mapping):
        return {key: _json_safe(item) for key, item in value.items()}
    return None if isinstance(value, float) and not math.isfinite(value) else value


class TensorBoardWriter:
    """Writes the same numbers for TensorBoard."""

    def __init__(self, folder: Path) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise MissingPackageError("run.tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in _flat(line):
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def write_heads(self, line: Mapping[str, Any]) -> None:
        """A line of telemetry: each number by layer and head, as in heads/entropy/L5H1."""
        stack = "" if line["stack"] == "main" else f"{line['stack']}/"
        for name, value in line.items():
            if name in ("step", "stack"):
                continue
            for address, number in _by_address(value):
                tag = f"heads/{stack}{name}{address and '/'}{address}"
                self._writer.add_scalar(tag, number, line["step"])

    def close(self) -> None:
        self._writer.close()


def _flat(line: Mapping[str, Any], before: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in line.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{before}{name}/")
        else:
            yield f"{before}{name}", value


def _by_address(value: Any) -> Iterator[tuple[str, float]]:
    """Numbers with the address of their layer or head.

    >>> list(_by_address([[0.5, 0.25], [], 2.0]))
    [('L0H0', 0.5), ('L0H1', 0.25), ('L2', 2.0)]
    """
    if not isinstance(value, list):
        yield "", value
        return
    for layer, numbers in enumerate(value):
        if isinstance(numbers, list):
            yield from ((f"L{layer}H{head}", number) for head, number in enumerate(numbers))
        else:
            yield f"L{layer}", numbers


# Dense bfloat16 operations per second, from the vendors' data sheets.
PEAKS = {
    "B200": 2250e12,
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
    "4090": 165e12,
    "V100": 125e12,
}
SECONDS_BETWEEN_LINES = 5.0
SECONDS_BETWEEN_DRAWINGS = 0.2


def peak_flops(device: torch.device, *, half: bool) -> float:
    """Peak operations per second of the device, 0 if unknown."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" and half else ""
    return next((peak for device_name, peak in PEAKS.items() if device_name in name), 0.0)


def training_flops(model: Model, length: int) -> float:
    """Operations per token of training: six per weight, and attention over half the length.

    Embedding look-ups do not count, and of experts only the chosen ones.
    """
    layers = model_layers(model)
    weights = sum(_active_parameters(layer) for layer in layers)
    readout = getattr(model, "readout", None)
    table = getattr(getattr(model, "embedding", None), "tokens", None)
    if readout is not None:
        weights += sum(weight.numel() for weight in readout.parameters())
        if readout.weight is None and table is not None:
            weights += table.weight.numel()
    attention = sum(
        12 * layer.attention.config.heads * layer.attention.config.size * length / 2
        for layer in layers
        if layer.attention is not None
    )
    return 6 * weights + attention


def peak_fraction(model: Model, length: int, processes: ProcessGroup, *, half: bool) -> float:
    """The fraction of the peak of all devices that training at one token per second uses."""
    peak = peak_flops(processes.device, half=half) * processes.world_size
    return training_flops(model, length) / peak if peak else 0.0


def _active_parameters(layer: Any) -> int:
    every = sum(weight.numel() for weight in layer.parameters())
    branch = layer.config.feedforward
    if branch is None or not isinstance(branch.inner, Experts):
        return every
    held = sum(weight.numel() for weight in (layer.feedforward.expand, layer.feedforward.contract))
    return every - held + held * branch.inner.top_k // branch.inner.count


@dataclass(slots=True)
class Speed:
    """Tokens and steps per second over the last `window` steps."""

    clock: Callable[[], float] = time.perf_counter
    window: int = 20
    _past: list[tuple[float, int]] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self._past = [*self._past[-self.window :], (self.clock(), tokens)]

    @property
    def tokens(self) -> float:
        return self._over(sum(tokens for _, tokens in self._past[1:]))

    @property
    def steps(self) -> float:
        return self._over(len(self._past) - 1)

    def _over(self, amount: int) -> float:
        if len(self._past) < 2:
            return 0.0
        return amount / max(self._past[-1][0] - self._past[0][0], 1e-9)


@dataclass(slots=True)
class Display:
    """A progress line on stderr, which a terminal overwrites."""

    total: int
    progress: bool = True
    unit: str = "tokens"
    stream: Any = None
    clock: Callable[[], float] = time.monotonic
    warnings: bool = True
    _next: float = 0.0
    _drawn: bool = False

    def step(self, step: int, loss: float, speed: Speed, utilization: float) -> None:
        if not self.progress or self.clock() < self._next:
            return
        out = self._out()
        between = SECONDS_BETWEEN_DRAWINGS if out.isatty() else SECONDS_BETWEEN_LINES
        self._next = self.clock() + between
        parts = [f"step {step:,} of {self.total:,}", f"loss {loss:.4f}"]
        if speed.tokens:
            parts.append(f"{speed.tokens:,.0f} {self.unit}/s")
        if utilization:
            parts.append(f"{utilization:.0%} of peak")
        if speed.steps:
            parts.append(f"{duration((self.total - step) / speed.steps)} left")
        self._write(", ".join(parts), over=out.isatty())

    def message(self, text: str) -> None:
        """Print a line that is not overwritten."""
        if self.progress:
            self._write(text, over=False)

    def warn(self, text: str) -> None:
        """Print a line about damage, also where progress is not shown."""
        if self.warnings:
            self._write(text, over=False)

    def _write(self, text: str, *, over: bool) -> None:
        out = self._out()
        clear = "\r\033[K" if self._drawn else ""
        out.write(f"{clear}{text}" if over else f"{clear}{text}\n")
        out.flush()
        self._drawn = over

    def _out(self) -> Any:
        return sys.stderr if self.stream is None else self.stream


class Reporter:
    """Shows a run and writes its logs: progress, metrics.jsonl, telemetry.jsonl, TensorBoard.

    The main process alone writes, and shows progress if `progress` is set.
    """

    def __init__(
        self, folder: RunFolder, total: int, unit: str, *, is_main: bool, progress: bool
    ) -> None:
        self.folder, self.is_main = folder, is_main
        self.display = Display(total, progress and is_main, unit, warnings=is_main)
        self.metrics = MetricsLog(folder.metrics, enabled=is_main)
        self.telemetry = MetricsLog(folder.telemetry, enabled=is_main)
        self.board: TensorBoardWriter | None = None

    def open(self, step: int, *, tensorboard: bool) -> None:
        """Continue the logs after a step."""
        for log in (self.metrics, self.telemetry):
            if warning := log.truncate_after(step):
                self.display.warn(warning)
        if tensorboard and self.is_main:
            self.board = TensorBoardWriter(self.folder.tensorboard)

    def write(self, line: Mapping[str, Any]) -> None:
        """A line of metrics.jsonl."""
        self.metrics.write(line)
        if self.board is not None:
            self.board.write(line)

    def write_heads(self, line: Mapping[str, Any]) -> None:
        """A line of telemetry.jsonl."""
        self.telemetry.write(line)
        if self.board is not None:
            self.board.write_heads(line)

    def validation(self, step: int, results: Mapping[str, Mapping[str, float]]) -> None:
        """The results of every validation set by name; the name of a single one is ""."""
        self.write({"step": step, "validation": results.get("", results)})
        for name, result in results.items():
            listed = [f"{key.replace('_', ' ')} {value:.4f}" for key, value in result.items()]
            title = f"validation on {name}:" if name else "validation"
            self.display.message(f"step {step:,}, {title} {', '.join(listed)}")

    def flush(self) -> None:
        """Close the files of TensorBoard; they are opened again by the next line."""
        if self.board is not None:
            self.board.close()


def performance_advice(model: nn.Module, device: torch.device, *, half: bool) -> Iterator[str]:
    """Settings that are slow on a CPU, each with the setting to use instead."""
    if device.type != "cpu":
        return
    if half and not _has_bfloat16():
        yield 'this CPU has no bfloat16 instructions: run.precision="float32" is many times faster'
    if any(isinstance(part, Attention) and part.config.dropout for part in model.modules()):
        yield (
            "dropout of attention weights has no fast kernel on a CPU: "
            "model.heads.dropout=0 is several times faster"
        )


def silence_mkldnn_warning() -> None:
    """torch prints a stack trace for a slow matmul; `performance_advice` needs one line."""
    warnings.filterwarnings("ignore", message="mkldnn_matmul failed")


def _has_bfloat16() -> bool:
    supported = getattr(torch.ops.mkldnn, "_is_mkldnn_bf16_supported", None)
    return supported is None or bool(supported())
