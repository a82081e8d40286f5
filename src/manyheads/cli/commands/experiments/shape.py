"""manyheads shape: layers and widths that suit a device."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from manyheads.cli import arguments
from manyheads.cli.options import DeviceOptions
from manyheads.errors import InputError
from manyheads.formatting import plain_table, pluralise

if TYPE_CHECKING:
    from manyheads.train.shape_search import EncoderShape

UNITS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9}
# A forward on a CPU takes seconds with more.
CPU_TOKENS = 2048
MODERNBERT = (22, 768, 1152)


@dataclass(frozen=True, slots=True)
class ShapeCommand:
    """Search layers and widths of an encoder that suit a device, and time the best of them.

    For example: manyheads shape --parameters 150M --devices h200,rtx4090,cpu --layers 22

    Every shape with about so many parameters is scored by how its matrices fill the tiles and the
    multiprocessors of each device, as for ModernBERT (arXiv 2412.13663). Times are of a forward.
    """

    PYTHON_NAMES: ClassVar = {"length": "--max-length"}

    parameters: Annotated[str, arguments.metavar("COUNT")] = "150M"
    """How many parameters, the table of tokens included: 150M, 1.2B or 400000."""

    devices: Annotated[str, arguments.metavar("NAMES")] = "h200,rtx4090,cpu"
    """Devices to fit, separated by commas: t4, a10, l4, rtx3090, rtx4090, a100, h100, h200, cpu."""

    layers: arguments.OptionalInt = None
    """Only shapes with this many layers; by default all depths, and shallow ones are fastest."""

    vocabulary: int = 50_368
    """Tokens in the vocabulary."""

    tokens: int = 32_768
    """Tokens of a forward; on a CPU at most 2,048 of them are timed, and the time is scaled."""

    max_length: int = 512
    """Tokens of a sequence."""

    top: int = 10
    """How many shapes to show and to time."""

    no_timing: arguments.Flag = False
    """Only predict."""

    json: arguments.JsonFile = None
    """A JSON file for all shapes; - prints it instead."""

    compute: DeviceOptions = DeviceOptions()

    def run(self) -> None:
        """Print the best shapes with predicted and measured times."""
        from manyheads.console import TerminalPage
        from manyheads.train.shape_search import EncoderShape, device_at_hand, search_shapes

        arguments.check_json(self.json)
        for flag, value in (("--top", self.top), ("--max-length", self.max_length)):
            arguments.check_minimum(flag, value, 1)
        names = [name.strip().lower() for name in self.devices.split(",") if name.strip()]
        ranked = search_shapes(
            parse_count(self.parameters),
            names,
            layers=self.layers,
            vocabulary=self.vocabulary,
            tokens=self.tokens,
            length=self.max_length,
        )
        own = None if self.no_timing else device_at_hand(self.compute.device)
        shapes = [row.shape for row in ranked[: self.top]]
        times = [] if self.no_timing else self._times(shapes)
        rows = []
        for index, row in enumerate(ranked[: self.top]):
            cells = [str(row.shape), f"{row.shape.parameters(self.vocabulary) / 1e6:.1f}M"]
            cells += [f"{1e3 * row.predicted[name]:.2f}" for name in names]
            cells += [f"{1e3 * times[index]:.2f}"] if times else []
            rows.append([*cells, f"{row.slowness:.3f}"])
        titles = ["parameters", *(f"{name}, ms" for name in names)]
        titles += ["measured, ms"] if times else []
        page = TerminalPage(table_width=120)
        head = ["layers x width x hidden"]
        page.console.print(plain_table(head, [*titles, "slowness"], rows))
        count = pluralise(len(ranked), "shape")
        print(f"\n{count} in all; slowness: time per weight beside the best.")
        place = [row.shape for row in ranked]
        if EncoderShape(*MODERNBERT) in place:
            rank = place.index(EncoderShape(*MODERNBERT)) + 1
            print(f"ModernBERT-base, {EncoderShape(*MODERNBERT)}, is number {rank}.")
        if times and own in names and len(times) > 2:
            agreement = _agreement([row.predicted[own] for row in ranked[: self.top]], times)
            print(f"Ranks of predicted and measured times on {own} correlate by {agreement:.2f}.")
        values = [
            {
                "layers": row.shape.layers,
                "width": row.shape.width,
                "hidden": row.shape.hidden,
                "parameters": row.shape.parameters(self.vocabulary),
                "predicted": dict(row.predicted),
                "measured": times[index] if index < len(times) else None,
                "slowness": row.slowness,
            }
            for index, row in enumerate(ranked)
        ]
        arguments.write_json(self.json, values)

    def _times(self, shapes: "Sequence[EncoderShape]") -> list[float]:
        from manyheads.devices import resolve_device
        from manyheads.progress import Progress
        from manyheads.train.shape_search import measure_shape

        device = resolve_device(self.compute.device, "--device")
        tokens = self.tokens if device.type == "cuda" else min(self.tokens, CPU_TOKENS)
        times = []
        with Progress("timing", total=len(shapes), unit="shapes") as bar:
            for shape in shapes:
                seconds = measure_shape(
                    shape, str(device), tokens=tokens, length=min(self.max_length, tokens)
                )
                times.append(seconds * self.tokens / tokens)
                bar.advance()
        return times


def parse_count(text: str) -> int:
    """A number of parameters, as people write it.

    >>> parse_count("150M"), parse_count("1.2b"), parse_count("400,000")
    (150000000, 1200000000, 400000)
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([kmb]?)", text.strip().lower().replace(",", ""))
    count = round(float(match[1]) * UNITS[match[2]]) if match else 0
    if count < 1:
        raise InputError(f"--parameters {text!r} is not a count", "write 150M, 1.2B or 400000")
    return count


def _agreement(predicted: list[float], measured: list[float]) -> float:
    import numpy as np

    from manyheads.lens.causal.gradient_importance import rank_correlation

    return rank_correlation(np.array(predicted), np.array(measured))
