"""What a run reports: metrics.jsonl, TensorBoard, the progress line, advice on slow settings."""

import json
import math
import os
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
from manyheads.errors import MissingPackageError
from manyheads.models.build import Model
from manyheads.parts.experts import Experts
from manyheads.progress import duration
from manyheads.train.distributed import model_layers


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
        with atomic_write(self.file) as fresh:
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
            raise MissingPackageError("run.tensorboard", "tensorboard") from None
        self._writer: Any = SummaryWriter(os.fspath(folder))

    def write(self, line: Mapping[str, Any]) -> None:
        for name, value in _flat(line):
            if name != "step" and isinstance(value, int | float):
                self._writer.add_scalar(name, value, line["step"])

    def close(self) -> None:
        self._writer.close()


def _flat(line: Mapping[str, Any], before: str = "") -> list[tuple[str, Any]]:
    result = []
    for name, value in line.items():
        if isinstance(value, Mapping):
            result += _flat(value, f"{before}{name}/")
        else:
            result.append((f"{before}{name}", value))
    return result


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
    if device.type != "cuda" or not half:
        return 0.0
    name = torch.cuda.get_device_name(device)
    return next((peak for known, peak in PEAKS.items() if known in name), 0.0)


def training_flops(model: Model, length: int) -> float:
    """Operations per token of training: six per weight, and attention over half the length.

    Embedding look-ups do not count, and of experts only the chosen ones.
    """
    layers = model_layers(model)
    weights = sum(_active_parameters(layer) for layer in layers)
    readout = getattr(model, "readout", None)
    table = getattr(getattr(model, "embedding", None), "tokens", None)
    if readout is not None:
        weights += sum(each.numel() for each in readout.parameters())
        if readout.weight is None and table is not None:
            weights += table.weight.numel()
    attention = sum(
        12 * layer.attention.config.heads * layer.attention.config.size * length / 2
        for layer in layers
        if layer.attention is not None
    )
    return 6 * weights + attention


def _active_parameters(layer: Any) -> int:
    every = sum(each.numel() for each in layer.parameters())
    branch = layer.config.feedforward
    if branch is None or not isinstance(branch.inner, Experts):
        return every
    held = sum(each.numel() for each in (layer.feedforward.expand, layer.feedforward.contract))
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
    _next: float = 0.0
    _drawn: bool = False

    def step(self, step: int, loss: float, speed: Speed, utilisation: float) -> None:
        if not self.progress or self.clock() < self._next:
            return
        out = self._out()
        between = SECONDS_BETWEEN_DRAWINGS if out.isatty() else SECONDS_BETWEEN_LINES
        self._next = self.clock() + between
        known = [f"step {step:,} of {self.total:,}", f"loss {loss:.4f}"]
        if speed.tokens:
            known.append(f"{speed.tokens:,.0f} {self.unit}/s")
        if utilisation:
            known.append(f"{utilisation:.0%} of peak")
        if speed.steps:
            known.append(f"{duration((self.total - step) / speed.steps)} left")
        self._write(", ".join(known), over=out.isatty())

    def message(self, text: str) -> None:
        """Print a line that is not overwritten."""
        if self.progress:
            self._write(text, over=False)

    def _write(self, text: str, *, over: bool) -> None:
        out = self._out()
        clear = "\r\033[K" if self._drawn else ""
        out.write(f"{clear}{text}" if over else f"{clear}{text}\n")
        out.flush()
        self._drawn = over

    def _out(self) -> Any:
        return sys.stderr if self.stream is None else self.stream


def performance_advice(model: nn.Module, device: torch.device, *, half: bool) -> Iterator[str]:
    """Settings that are slow on a CPU, each with the setting to use instead."""
    if device.type != "cpu":
        return
    if half and not _has_bfloat16():
        yield 'this CPU has no bfloat16 instructions: run.precision="float32" is many times faster'
    drops = [each for each in model.modules() if isinstance(each, Attention)]
    if any(each.config.dropout for each in drops):
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
