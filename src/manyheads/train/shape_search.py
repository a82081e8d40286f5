"""Shapes of encoders that suit a device: layers, width and hidden width by a grid search.

As in appendix B of ModernBERT (arXiv 2412.13663) and in arXiv 2401.14489: a GPU multiplies matrices
in tiles, one per multiprocessor at a time. Where the tiles do not fill the last wave, or a matrix
does not fill its tiles, multiprocessors wait. Widths are multiples of 64; each shape costs

    waves of tiles * time of a tile, summed over the four matrices of a layer
    + attention over the sequence + what norms, activations and residuals read and write

on each device. A shape is as good as its mean slowness: the time per weight of the layers beside
that of the best shape of each device.
"""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import mean

import torch

from manyheads.annotations import PositiveInt
from manyheads.argument_checks import checked
from manyheads.devices import resolve_device
from manyheads.errors import ConfigError, InputError
from manyheads.models.build import build
from manyheads.models.recipes import modernbert
from manyheads.ragged import Lengths, Ragged

HEAD_SIZE = STEP = 64
VOCABULARY = 50_368
TILE_ROWS, TILE_COLUMNS = 128, 256
# How far the number of parameters may be from what was requested.
TOLERANCE = 0.03
# Hidden width over width, and width over layers, of encoders that people train.
EXPANSIONS, ASPECTS = (1.0, 4.5), (16, 160)
BYTES = 2
# Timed layers, and the fewest repetitions and seconds.
TIMED_LAYERS, REPETITIONS, SECONDS = 2, 5, 0.3


@dataclass(frozen=True, slots=True, kw_only=True)
class TiledDevice:
    """What the cost of a shape depends on; speeds in operations and bytes per second.

    A CPU has cores instead of multiprocessors, and tiles so small that they are always filled.
    """

    multiprocessors: int
    operations: float
    bandwidth: float
    tile: tuple[int, int] = (TILE_ROWS, TILE_COLUMNS)


# Dense products in half precision and memory, by the data sheets.
DEVICES = {
    "t4": TiledDevice(multiprocessors=40, operations=65e12, bandwidth=320e9),
    "a10": TiledDevice(multiprocessors=72, operations=125e12, bandwidth=600e9),
    "l4": TiledDevice(multiprocessors=58, operations=121e12, bandwidth=300e9),
    "rtx3090": TiledDevice(multiprocessors=82, operations=71e12, bandwidth=936e9),
    "rtx4090": TiledDevice(multiprocessors=128, operations=165e12, bandwidth=1008e9),
    "a100": TiledDevice(multiprocessors=108, operations=312e12, bandwidth=2039e9),
    "h100": TiledDevice(multiprocessors=132, operations=989e12, bandwidth=3350e9),
    "h200": TiledDevice(multiprocessors=132, operations=989e12, bandwidth=4800e9),
    "cpu": TiledDevice(multiprocessors=1, operations=2e11, bandwidth=2e10, tile=(16, 16)),
}


@dataclass(frozen=True, slots=True, order=True)
class EncoderShape:
    """Layers, width, and the width of the gated feed-forward's hidden layer.

    >>> str(EncoderShape(22, 768, 1152)), EncoderShape(22, 768, 1152).parameters()
    ('22 x 768 x 1,152', 149569536)
    """

    layers: int
    width: int
    hidden: int

    def __str__(self) -> str:
        return f"{self.layers} x {self.width:,} x {self.hidden:,}"

    @property
    def matrices(self) -> tuple[tuple[int, int], ...]:
        """Inputs and outputs of a layer's matrices: two of attention, two of the feed-forward."""
        width, hidden = self.width, self.hidden
        return (width, 3 * width), (width, width), (width, 2 * hidden), (hidden, width)

    @property
    def layer_weights(self) -> int:
        """The weights of all layers; norms and biases are few."""
        return self.layers * sum(inputs * outputs for inputs, outputs in self.matrices)

    def parameters(self, vocabulary: int = VOCABULARY) -> int:
        """With the table of tokens and the transform in front of it."""
        return self.layer_weights + vocabulary * self.width + self.width**2

    def seconds(self, device: TiledDevice, *, tokens: int, length: int) -> float:
        """The predicted time of a forward over sequences of `length` tokens."""
        rows, columns = device.tile
        tile_speed = device.operations / device.multiprocessors
        products = 0.0
        for inputs, outputs in self.matrices:
            tiles = math.ceil(tokens / rows) * math.ceil(outputs / columns)
            waves = math.ceil(tiles / device.multiprocessors)
            products += waves * 2 * rows * columns * inputs / tile_speed
        attention = 4 * tokens * length * self.width / device.operations
        # Norms and residuals of two branches, queries to outputs, and the gated hidden layer.
        moved = BYTES * tokens * (14 * self.width + 3 * self.hidden) / device.bandwidth
        return self.layers * (products + attention + moved)

    def idle(self, device: TiledDevice, *, tokens: int) -> float:
        """The fraction of multiprocessors that wait in the last waves, over all matrices."""
        rows, columns = device.tile
        slots = used = 0.0
        for inputs, outputs in self.matrices:
            tiles = math.ceil(tokens / rows) * math.ceil(outputs / columns)
            slots += inputs * math.ceil(tiles / device.multiprocessors) * device.multiprocessors
            used += inputs * tokens * outputs / (rows * columns)
        return 1 - used / slots


@dataclass(frozen=True, slots=True)
class RankedShape:
    """A shape with its predicted seconds per device and its slowness beside the fastest shapes."""

    shape: EncoderShape
    predicted: Mapping[str, float]
    slowness: float


@checked
def search_shapes(
    parameters: PositiveInt,
    devices: Sequence[str] = ("h200",),
    *,
    layers: PositiveInt | None = None,
    vocabulary: PositiveInt = VOCABULARY,
    tokens: PositiveInt = 32_768,
    length: PositiveInt = 512,
) -> list[RankedShape]:
    """Encoder shapes with about so many parameters, the best for all devices together first.

    `slowness` is the mean over devices of the predicted time per weight of the layers, over that of
    the best shape there: sizes differ by up to 3 %, and tables of tokens by more.
    Shallow shapes are fast, and deep ones are often better at their task: `layers` fixes the depth.

    >>> best = search_shapes(150_000_000, ["h200", "rtx4090"], layers=22)[0]
    >>> best.shape.layers, best.slowness < 1.05
    (22, True)
    """
    unknown = [name for name in devices if name not in DEVICES]
    if unknown or not devices:
        what = f"devices has {unknown[0]!r}" if unknown else "devices is empty"
        raise InputError(what, f"use {', '.join(DEVICES)}")
    shapes = grid_of_shapes(parameters, layers=layers, vocabulary=vocabulary)
    if not shapes:
        depth = "" if layers is None else f" and {layers} layers"
        raise ConfigError(
            f"no shape has about {parameters:,} parameters{depth}",
            f"the vocabulary of {vocabulary:,} takes its part: change one of them",
        )
    predicted = {
        shape: {
            name: shape.seconds(DEVICES[name], tokens=tokens, length=length) for name in devices
        }
        for shape in shapes
    }
    ranked = []
    best = {
        name: min(times[name] / shape.layer_weights for shape, times in predicted.items())
        for name in devices
    }
    for shape, times in predicted.items():
        slowness = mean(times[name] / shape.layer_weights / best[name] for name in devices)
        ranked.append(RankedShape(shape, times, slowness))
    return sorted(ranked, key=lambda row: (row.slowness, row.shape))


def grid_of_shapes(
    parameters: int, *, layers: int | None = None, vocabulary: int = VOCABULARY
) -> list[EncoderShape]:
    """Every shape of the grid whose parameters are within 3 % of the number."""
    shapes = []
    for width in range(STEP, 8192 + 1, STEP):
        for depth in range(2, 129) if layers is None else [layers]:
            if layers is None and not ASPECTS[0] <= width / depth <= ASPECTS[1]:
                continue
            rest = parameters - EncoderShape(depth, width, 0).parameters(vocabulary)
            few, many = (
                (rest + sign * TOLERANCE * parameters) / (3 * depth * width) for sign in (-1, 1)
            )
            first = max(math.ceil(few / STEP), math.ceil(EXPANSIONS[0] * width / STEP))
            last = min(math.floor(many / STEP), math.floor(EXPANSIONS[1] * width / STEP))
            shapes += [EncoderShape(depth, width, STEP * count) for count in range(first, last + 1)]
    return shapes


@checked
@torch.no_grad()
def measure_shape(
    shape: EncoderShape,
    device: str = "auto",
    *,
    tokens: PositiveInt = 32_768,
    length: PositiveInt = 512,
) -> float:
    """The seconds of a forward through all layers; two are timed, as all are alike.

    On CUDA in bfloat16, elsewhere in float32. The embedding and the readout are left out.
    """
    place = resolve_device(device)
    dtype = torch.bfloat16 if place.type == "cuda" else torch.float32
    config = modernbert(
        width=shape.width,
        heads=shape.width // HEAD_SIZE,
        hidden=shape.hidden,
        layers=TIMED_LAYERS,
        vocabulary=64,
        global_every=1,
    )
    stack = build(config, seed=0, device=str(place), dtype=dtype).eval().stack
    lengths = Lengths.of([length] * max(1, tokens // length), place)
    hidden = Ragged(torch.randn(lengths.total, shape.width, device=place, dtype=dtype), lengths)
    times: list[float] = []
    while len(times) <= REPETITIONS or sum(times[1:]) < SECONDS:
        start = _now(place)
        stack(hidden)
        times.append(_now(place) - start)
    # The first one chooses kernels.
    return min(times[1:]) * shape.layers / TIMED_LAYERS * tokens / lengths.total


def device_at_hand(device: str = "auto") -> str | None:
    """The name of a device of this machine in the table of devices, if it is there."""
    place = resolve_device(device)
    if place.type != "cuda":
        return place.type if place.type in DEVICES else None
    title = torch.cuda.get_device_name(place).lower().replace(" ", "")
    return max((name for name in DEVICES if name in title), key=len, default=None)


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
